"""Trainers with random weights, batches for them, and the update by a slow twin in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, PLAIN, at_rate, random_weights, spec_of
from numpy.random import default_rng
from numpy.testing import assert_allclose
from torch import Tensor, from_numpy, nn
from torch.distributions import Categorical, Independent, Normal

from dppo.config.parts import ResolvedPPO
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.reuse import OlderPolicies
from dppo.ppo.learning.stages import LagCorrection, RecomputedAdvantages, Stage
from dppo.ppo.learning.trainer import NO_EXPERIENCE, PPOTrainer
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.mlp import MLP
from dppo.ppo.networks.network import LearningNetwork, NetworkSpec, RecurrentInputs

ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
COLUMNS = ("obs", "actions", "logprobs", "values", "advantages", "returns")
DISCRETE_SPEC: BuiltInSpec = spec_of(DISCRETE)


def stages_of(ppo: ResolvedPPO, parallel: Parallel, *, lagged: bool) -> list[Stage]:
    stages: list[Stage] = []
    if ppo.reuse > 1:
        stages.append(OlderPolicies(ppo, parallel))
    elif lagged:
        stages.append(LagCorrection())
    if ppo.recompute_advantages:
        stages.append(RecomputedAdvantages(ppo))
    return stages


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
    ppo = replace(PLAIN, **options)
    trainer = PPOTrainer(
        PPOModel(spec, 1, zeros_like=parallel.zeros_like),
        ppo,
        minibatches=minibatches,
        micro_batch_size=micro_batch_size,
        parallel=parallel,
        stages=stages_of(ppo, parallel, lagged=lagged),
    )
    trainer.load(random_weights(spec), trainer.state())
    return trainer


def experience_of(
    segments: Sequence[Segment] = (), obs_scale: ObsScale | None = None, lag: int = 0
) -> Experience:
    """Return the origin of a batch of these segments, whose rewards are not scaled."""
    snapshot = PolicySnapshot(0, np.zeros(0), obs_scale)
    return Experience(segments, snapshot, None, iteration=lag)


def random_batch(
    spec: BuiltInSpec = DISCRETE_SPEC, rows: int = 50, seed: int = 0, drift: float = 0.3
) -> Batch:
    """Return rows of a policy near that of `make_trainer`: ratios on both sides of the clip, or 1 without drift."""
    rng = default_rng(seed)

    def normal(*shape: int) -> Tensor:
        numbers = rng.normal(size=(rows, *shape))
        return from_numpy(numbers.astype(spec.dtype))

    shape = spec.distribution.action_shape
    if shape:
        actions = normal(*shape)
    else:
        actions = from_numpy(rng.integers(0, 3, rows))
    obs = normal(*spec.spaces.obs.shape)
    scored = make_trainer(spec).model.forward(obs, actions)
    logprobs = scored.policy.logprobs + drift * normal()
    values = scored.values.clone()
    old_values = values + drift * normal()
    advantages = normal()
    returns = values + 2 * advantages
    columns = (obs, actions, logprobs, old_values, advantages, returns)
    return rows_of(*columns)


def rows_of(obs: Tensor, *columns: Any) -> Batch:
    """Return a batch of rows in which nothing terminates, and all rewards are zero."""
    named = dict(zip(COLUMNS[1:], columns, strict=True))
    index = torch.arange(len(obs))
    return Batch(table=obs, index=index, terminates=False, reward_range=(0.0, 0.0), **named)


def weighted(batch: Batch, counted: np.ndarray) -> Batch:
    """Return the batch as `make_batch` would: rows that do not count weigh zero, and hold zeros and an observation."""
    weights = from_numpy(counted).to(batch.values.dtype)
    columns = {}
    for name in COLUMNS[1:]:
        column = getattr(batch, name).clone()
        column[weights == 0] = 0
        columns[name] = column
    return replace(batch, weights=weights, **columns)


def train(
    trainer: PPOTrainer,
    batch: Batch,
    rate: float = 1e-3,
    experience: Experience = NO_EXPERIENCE,
    *,
    seed: int = 0,
    order: Any = None,
) -> dict[str, float]:
    """Do an update with this learning rate, in minibatches drawn by `order` or from `seed`; return its figures."""
    settings = at_rate(trainer, rate)
    order = order or default_rng(seed)
    update = trainer.train_on(batch, settings, order, experience)
    return update.figures


def counted_rows(batch: Batch, rows: np.ndarray) -> np.ndarray:
    """Return those rows that weigh something."""
    if batch.weights is None:
        return rows
    weights = batch.weights[rows].numpy()
    return rows[weights > 0]


def slow_ent_coef(model: MLP, batch: Batch, options: ResolvedPPO, floor: float) -> float:
    """Return the coefficient of the entropy; discrete actions without a reward so far have a bonus."""
    has_bonus = floor > 0 and not any(batch.reward_range)
    if not has_bonus or not options.norm_adv or model.log_std is not None:
        return options.ent_coef
    rows = counted_rows(batch, np.arange(len(batch)))
    deviation = batch.advantages[rows].std().item()
    return options.ent_coef + 0.01 * max(0.0, 1 - 2 * deviation / floor)


def standardized(advantages: Tensor, floor: float) -> Tensor:
    deviation = 0.0
    if len(advantages) > 1:
        deviation = float(advantages.std())
    centered = advantages - advantages.mean()
    return centered / (max(deviation, floor) + 1e-8)


def slow_policy(model: MLP, obs: Tensor) -> Any:
    head = model.policy(obs)
    if model.log_std is None:
        return Categorical(logits=head)
    return Independent(Normal(head, model.log_std.exp()), 1)


def slow_loss(
    model: MLP, mb: SimpleNamespace, options: ResolvedPPO, floor: float, ent_coef: float
) -> tuple[Tensor, float]:
    """Return the loss of a minibatch, and the approximate KL."""
    clip = options.clip_coef
    policy = slow_policy(model, mb.obs)
    logratio = policy.log_prob(mb.actions) - mb.logprobs
    ratio = logratio.exp()
    kl = ((ratio - 1) - logratio).mean().item()

    advantages = mb.advantages
    if options.norm_adv:
        advantages = standardized(advantages, floor)
    clipped_ratio = torch.clamp(ratio, 1 - clip, 1 + clip)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()

    value = model.value(mb.obs)[:, 0]
    error = (value - mb.returns) ** 2
    if options.clip_vloss:
        clipped = mb.values + torch.clamp(value - mb.values, -clip, clip)
        clipped_error = (clipped - mb.returns) ** 2
        error = torch.max(error, clipped_error)
    v_loss = 0.5 * error.mean()

    entropy = policy.entropy().mean()
    return pg_loss - ent_coef * entropy + options.vf_coef * v_loss, kl


def slow_update(
    model: MLP, batch: Batch, rate: float, order: Any, options: ResolvedPPO, minibatches: int
) -> list[float]:
    """Do one PPO update as in the paper and CleanRL: autograd, and torch's clipping, distributions and Adam.

    Rows that weigh nothing are left out. With `desired_kl`, the learning rate is adapted as rsl_rl does, with the KL
    of samples. Return the learning rate of each step.
    """
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    rates: list[float] = []
    floor = 0.0
    if options.norm_reward and not batch.has_learning_signal:
        floor = options.adv_floor
    ent_coef = slow_ent_coef(model, batch, options, floor)

    for _ in range(options.update_epochs):
        permutation = order.permutation(len(batch))
        for drawn in np.array_split(permutation, minibatches):
            rows = counted_rows(batch, drawn)
            if not len(rows):
                continue
            columns = {name: getattr(batch, name)[rows] for name in COLUMNS}
            minibatch = SimpleNamespace(**columns)
            loss, kl = slow_loss(model, minibatch, options, floor, ent_coef)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            if options.desired_kl > 0 and rates:
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
    if kl < desired_kl / 2:
        return min(1e-2, rate * 1.5)
    return rate


def assert_equals_twin(trainer: PPOTrainer, batch: Batch) -> tuple[np.ndarray, list[float]]:
    """Update both alike; return how far each weight moved, and the learning rate of each step."""
    spec = trainer.model.spec
    assert isinstance(spec, BuiltInSpec)

    before = trainer.weights()
    named = spec.unflatten(before.copy())
    twin = spec.mlp(0).double()
    twin.load_state_dict({name: from_numpy(array) for name, array in named.items()})

    ppo = trainer.ppo
    adapts = ppo.desired_kl > 0
    rate = ppo.learning_rate if adapts else 3e-3
    rates = slow_update(twin, batch, rate, default_rng(5), ppo, trainer.minibatches)
    settings = at_rate(trainer, math.nan if adapts else rate)
    update = trainer.train_on(batch, settings, default_rng(5))
    assert update.learning_rate == pytest.approx(rates[-1])

    expected = spec.flatten({name: p.detach().numpy() for name, p in twin.named_parameters()})
    weights = trainer.weights()
    assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)

    return np.abs(weights - before), rates


def load_random(network: LearningNetwork, spec: NetworkSpec, scale: float = 0.4) -> None:
    """Give the network the weights of `builders.agent_of`."""
    weights = random_weights(spec, scale=scale)
    with torch.no_grad():
        network.parameters.weights.copy_(from_numpy(weights))


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
        grad_head = (2 * head).clone()
        network.backward(residuals, grad_head, values.exp())
        total += gradient.numpy()

    return total
