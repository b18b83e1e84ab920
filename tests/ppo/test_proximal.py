"""Updates on segments of an older policy, which `overlap` makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, random_weights, spec_of
from mlp_twin import MLP
from torch.distributions import Categorical, Independent, Normal

import dppo
from dppo.config import PPO
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.default.mlp import MLPSpec
from dppo.spaces.actions import BoxActions, DiscreteActions

ROWS = 48
ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])


def make_trainer(spec: MLPSpec, **options: Any) -> PPOTrainer:
    minibatches = options.pop("minibatches", 1)
    trainer = PPOTrainer(PPOModel(spec, 1), PPO(**options), minibatches=minibatches)
    trainer.load(random_weights(spec), trainer.state())
    return trainer


def old_batch(spec: MLPSpec) -> Batch:
    """Rows whose actions another policy has chosen."""
    rng = np.random.default_rng(0)
    discrete = spec.distribution.action_shape == ()
    chosen = rng.integers(0, 3, ROWS) if discrete else rng.normal(size=(ROWS, *spec.distribution.action_shape))
    obs, advantages = (
        torch.from_numpy(rng.normal(size=(ROWS, *spec.obs_shape))),
        torch.from_numpy(rng.normal(size=ROWS)),
    )
    logprobs, values = torch.from_numpy(rng.normal(-1.0, 0.3, ROWS)), torch.from_numpy(rng.normal(size=ROWS))
    return Batch(obs, torch.from_numpy(chosen), logprobs, values, advantages, values + advantages)


@ACTIONS
@pytest.mark.parametrize("norm_adv", [True, False], ids=["standardized", "raw"])
def test_first_gradient_is_that_of_the_importance_weighted_surrogate(
    actions: DiscreteActions | BoxActions, norm_adv: bool
) -> None:
    """At r = 1 the surrogate is -w A r with w = min(pi_now / pi_old, 2), also where PPO would clip w."""
    spec = spec_of(actions, dtype="float64")
    trainer = make_trainer(spec, update_epochs=1, norm_adv=norm_adv, clip_vloss=False, max_grad_norm=1e9)
    batch = old_batch(spec)
    twin = MLP(spec).double()
    for name, parameter in twin.named_parameters():
        parameter.data = torch.from_numpy(spec.unflatten(trainer.weights())[name].copy())
    head, values = twin(batch.obs)
    policy: Any
    if isinstance(actions, DiscreteActions):
        policy = Categorical(logits=head)
    else:
        mean, log_std = head.chunk(2, dim=1)
        policy = Independent(Normal(mean, log_std.exp()), 1)
    logprobs = policy.log_prob(batch.actions)
    advantages = batch.advantages
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    importance = (logprobs.detach() - batch.logprobs).exp().clamp(max=2)
    assert ((importance - 1).abs() > 0.2).any(), "PPO would clip none of these ratios"
    settings = trainer.ppo
    loss = (
        -(importance * advantages * (logprobs - logprobs.detach()).exp()).mean()
        - settings.ent_coef * policy.entropy().mean()
        + settings.vf_coef * 0.5 * (values - batch.returns).square().mean()
    )
    loss.backward()

    trainer.update(batch, 1e-3, np.random.default_rng(0), lagged=True)
    found = spec.unflatten(trainer.model.parameters.gradient.numpy())
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[name], parameter.grad, rtol=1e-9, atol=1e-12, err_msg=name)


@ACTIONS
def test_ratios_are_measured_from_the_policy_before_the_update(actions: DiscreteActions | BoxActions) -> None:
    """In every later minibatch, too: as if that policy had collected, with advantages weighted once."""
    spec = spec_of(actions, dtype="float64")
    lagged, plain = (make_trainer(spec, update_epochs=3, norm_adv=False, minibatches=4) for _ in range(2))
    batch = old_batch(spec)
    now = plain.model.log_probs(batch.obs, batch.actions)
    weighted = replace(batch, logprobs=now, advantages=batch.advantages * (now - batch.logprobs).exp().clamp(max=2))
    losses = lagged.update(batch, 1e-2, np.random.default_rng(0), lagged=True).figures
    expected = plain.update(weighted, 1e-2, np.random.default_rng(0)).figures
    np.testing.assert_allclose(lagged.weights(), plain.weights(), rtol=1e-9, atol=1e-12)
    assert losses["approx_kl"] == pytest.approx(expected["approx_kl"], rel=1e-6)


def test_rows_that_are_not_transitions_have_no_effect() -> None:
    spec = spec_of(DISCRETE, dtype="float64")
    batch = old_batch(spec)
    weights = torch.ones(ROWS, dtype=torch.float64)
    weights[::5] = 0.0
    logprobs = torch.where(weights > 0, batch.logprobs, -1e4)  # exp(now - old) would overflow
    first, second = make_trainer(spec, update_epochs=2), make_trainer(spec, update_epochs=2)
    first.update(replace(batch, weights=weights, logprobs=logprobs), 1e-2, np.random.default_rng(0), lagged=True)
    second.update(replace(batch, weights=weights), 1e-2, np.random.default_rng(0), lagged=True)
    assert np.isfinite(first.weights()).all()
    np.testing.assert_array_equal(first.weights(), second.weights())


def test_overlap_measures_ratios_from_the_policy_that_it_updates(tmp_path: Path) -> None:
    """With one minibatch in all, every ratio is one to the bit in each lagged iteration."""
    config = dppo.Config(
        env_id="CartPole-v1", overlap=True, num_samplers=2, num_steps=32, update_epochs=1, minibatch_size=64,
        total_timesteps=64 * 5, learning_rate=0.05, anneal_lr=False, progress="off", run_dir=tmp_path / "run",
    )  # fmt: skip
    rows = list(dppo.train(config).metrics)
    assert [row["losses/approx_kl"] for row in rows[1:]] == [0.0] * 4
    assert [row["losses/clipfrac"] for row in rows[1:]] == [0.0] * 4
