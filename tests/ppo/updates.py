"""Trainers with random weights, batches for them, and the update by a slow twin in plain torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, PLAIN, at_rate, random_weights, spec_of
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from dppo.config.parts import ResolvedPPO
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.reuse import OlderPolicies
from dppo.ppo.learning.stages import LagCorrection, RecomputedAdvantages, Stage
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.mlp import MLP
from dppo.ppo.networks.network import LearningNetwork, NetworkSpec, RecurrentInputs

ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
COLUMNS = ("obs", "actions", "logprobs", "values", "advantages", "returns")
DISCRETE_SPEC: BuiltInSpec = spec_of(DISCRETE)


def make_trainer(
    spec: NetworkSpec = DISCRETE_SPEC,
    parallel: Parallel | None = None,
    *,
    minibatches: int = 4,
    micro_batch_size: int | None = None,
    lagged: bool = False,
    **options: Any,
) -> PPOTrainer:
    """Return a trainer with the stages of these options, and random weights."""
    parallel = parallel or Parallel()
    ppo = dataclasses.replace(PLAIN, **options)
    stages: list[Stage] = []
    if ppo.reuse > 1:
        stages.append(OlderPolicies(ppo, parallel))
    elif lagged:
        stages.append(LagCorrection())
    if ppo.recompute_advantages:
        stages.append(RecomputedAdvantages(ppo))
    trainer = PPOTrainer(
        PPOModel(spec, 1, zeros_like=parallel.zeros_like),
        ppo,
        minibatches=minibatches,
        micro_batch_size=micro_batch_size,
        parallel=parallel,
        stages=stages,
    )
    trainer.load(random_weights(spec), trainer.state())
    return trainer


def experience_of(
    segments: Sequence[Segment] = (), obs_scale: ObsScale | None = None, lag: int = 0
) -> Experience:
    """Return the origin of a batch of these segments, whose rewards are not scaled."""
    return Experience(segments, PolicySnapshot(0, np.zeros(0), obs_scale), None, iteration=lag)


def random_batch(
    spec: BuiltInSpec = DISCRETE_SPEC, rows: int = 50, seed: int = 0, drift: float = 0.3
) -> Batch:
    """Return rows of a policy near that of `make_trainer`: ratios on both sides of the clip, or 1 without drift."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=(rows, *shape)).astype(spec.dtype))

    shape = spec.distribution.action_shape
    actions = normal(*shape) if shape else torch.from_numpy(rng.integers(0, 3, rows))
    obs = normal(*spec.spaces.obs.shape)
    scored = make_trainer(spec).model.forward(obs, actions)
    logprobs = scored.policy.logprobs.clone()
    values = scored.values.clone()
    drifted, noise, advantages = (normal() for _ in range(3))
    columns = (
        obs,
        actions,
        logprobs + drift * drifted,
        values + drift * noise,
        advantages,
        values + 2 * advantages,
    )
    return Batch(*columns, terminates=False, rewards=(0.0, 0.0))


def weighted(batch: Batch, counted: np.ndarray) -> Batch:
    """Return the batch as `make_batch` would, with zeros in all rows but those that count, which weigh zero."""
    weights = torch.from_numpy(counted).to(batch.values.dtype)
    columns = {name: getattr(batch, name).clone() for name in COLUMNS}
    for column in columns.values():
        column[weights == 0] = 0
    return dataclasses.replace(batch, weights=weights, **columns)


def train(trainer: PPOTrainer, batch: Batch, rate: float = 1e-3, seed: int = 0) -> dict[str, float]:
    """Do an update with this learning rate, in minibatches drawn from `seed`; return its figures."""
    return trainer.train_on(batch, at_rate(trainer, rate), np.random.default_rng(seed)).figures


def slow_update(
    model: MLP, batch: Batch, rate: float, order: Any, options: ResolvedPPO, minibatches: int
) -> list[float]:
    """Do one PPO update as in the paper and CleanRL: autograd, and torch's clipping, distributions and Adam.

    Rows that weigh nothing are left out. With `desired_kl`, the learning rate is adapted as rsl_rl does, with the KL
    of samples. Return the learning rate of each step.
    """
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    rates: list[float] = []
    floor = options.adv_floor if options.norm_reward and not batch.has_learning_signal else 0.0
    ent_coef = options.ent_coef
    if floor and not any(batch.rewards) and options.norm_adv and model.log_std is None:
        deviation = (
            batch.advantages[slice(None) if batch.weights is None else batch.weights > 0]
            .std()
            .item()
        )
        ent_coef += 0.01 * max(0.0, 1 - 2 * deviation / floor)
    for _ in range(options.update_epochs):
        for drawn in np.array_split(order.permutation(len(batch)), minibatches):
            rows = drawn if batch.weights is None else drawn[batch.weights[drawn].numpy() > 0]
            if not len(rows):
                continue
            mb = {name: getattr(batch, name)[rows] for name in COLUMNS}
            head = model.policy(mb["obs"])
            value = model.value(mb["obs"])[:, 0]
            policy: Any = Categorical(logits=head)
            if model.log_std is not None:
                policy = Independent(Normal(head, model.log_std.exp()), 1)
            logratio = policy.log_prob(mb["actions"]) - mb["logprobs"]
            ratio = logratio.exp()
            adv = mb["advantages"]
            c = options.clip_coef
            kl = ((ratio - 1) - logratio).mean().item()
            if options.norm_adv:
                deviation = float(adv.std()) if len(adv) > 1 else 0.0
                adv = (adv - adv.mean()) / (max(deviation, floor) + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - c, 1 + c)).mean()
            error = (value - mb["returns"]) ** 2
            if options.clip_vloss:
                clipped = mb["values"] + torch.clamp(value - mb["values"], -c, c)
                error = torch.max(error, (clipped - mb["returns"]) ** 2)
            loss = (
                pg_loss - ent_coef * policy.entropy().mean() + options.vf_coef * 0.5 * error.mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            if options.desired_kl is not None and rates:
                rate = slowly_adapted(rate, kl, options.desired_kl)
            optimizer.param_groups[0]["lr"] = rate
            rates.append(rate)
            optimizer.step()
        if options.target_kl and kl > options.target_kl:
            break
    return rates


def slowly_adapted(rate: float, kl: float, desired_kl: float) -> float:
    if kl > desired_kl * 2:
        return max(1e-5, rate / 1.5)
    return min(1e-2, rate * 1.5) if kl < desired_kl / 2 else rate


def assert_equals_twin(trainer: PPOTrainer, batch: Batch) -> tuple[np.ndarray, list[float]]:
    """Update both alike; return how far each weight moved, and the learning rate of each step."""
    spec = trainer.model.spec
    adapts = trainer.ppo.desired_kl is not None
    assert isinstance(spec, BuiltInSpec)
    twin = spec.mlp(0).double()
    before = trainer.weights()
    twin.load_state_dict(
        {name: torch.from_numpy(a) for name, a in spec.unflatten(before.copy()).items()}
    )
    rate = trainer.ppo.learning_rate if adapts else 3e-3
    rates = slow_update(
        twin, batch, rate, np.random.default_rng(5), trainer.ppo, trainer.minibatches
    )
    update = trainer.train_on(
        batch, at_rate(trainer, math.nan if adapts else rate), np.random.default_rng(5)
    )
    assert update.learning_rate == pytest.approx(rates[-1])
    expected = spec.flatten({name: p.detach().numpy() for name, p in twin.named_parameters()})
    np.testing.assert_allclose(trainer.weights(), expected, rtol=1e-9, atol=1e-12)
    return np.abs(trainer.weights() - before), rates


def load_random(network: LearningNetwork, spec: NetworkSpec, scale: float = 0.4) -> None:
    """Give the network the weights of `builders.agent_of`."""
    with torch.no_grad():
        network.parameters.weights.copy_(torch.from_numpy(random_weights(spec, scale=scale)))


def gradient_of(
    network: LearningNetwork, *pieces: Any, recurrent: RecurrentInputs | None = None
) -> np.ndarray:
    """Return the gradient of the sum of head ** 2 and exp(values) over the pieces of a batch.

    The network's gradient starts as a loud number, so that one that is added to and not replaced shows.
    """
    gradient = network.parameters.gradient
    total = np.zeros_like(gradient.numpy())
    for obs in pieces:
        gradient.fill_(1e6)
        head, values, residuals = network.forward(obs, recurrent)
        network.backward(residuals, (2 * head).clone(), values.exp())
        total += gradient.numpy()
    return total
