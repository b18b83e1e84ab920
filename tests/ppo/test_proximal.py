"""Updates on segments of an older policy, which `overlap` makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import at_rate, spec_of
from updates import ACTIONS, experience_of, make_trainer, random_batch

import dppo
from dppo.spaces.actions import Actions

LAGGED = experience_of(lag=1)


@pytest.mark.proves("from_current_policy")
@ACTIONS
@pytest.mark.parametrize("norm_adv", [True, False], ids=["standardized", "raw"])
def test_ratios_are_measured_from_the_policy_before_the_update(
    actions: Actions, norm_adv: bool
) -> None:
    """As if that policy had collected, with advantages weighted once by min(pi_now / pi_old, 2)."""
    spec = spec_of(actions)
    minibatches = 1 if norm_adv else 4
    lagged = make_trainer(spec, norm_adv=norm_adv, minibatches=minibatches, lagged=True)
    plain = make_trainer(spec, norm_adv=False, minibatches=minibatches)
    batch = random_batch(spec, drift=1.0)
    now = plain.model.log_probs([batch])
    advantages = batch.advantages
    importance = (now - batch.logprobs).exp().clamp(max=2)
    assert importance.max() == 2
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    weighted = replace(batch, logprobs=now, advantages=advantages * importance)
    losses = lagged.train_on(batch, at_rate(lagged, 1e-2), np.random.default_rng(0), LAGGED).figures
    expected = plain.train_on(weighted, at_rate(plain, 1e-2), np.random.default_rng(0)).figures
    np.testing.assert_allclose(lagged.weights(), plain.weights(), rtol=1e-9, atol=1e-12)
    assert losses["clipfrac"] == expected["clipfrac"]


def test_rows_that_are_not_transitions_have_no_effect() -> None:
    batch = random_batch(drift=1.0)
    weights = torch.ones(len(batch), dtype=torch.float64)
    weights[::5] = 0.0
    logprobs = torch.where(weights > 0, batch.logprobs, -1e4)  # exp(now - old) would overflow
    first = make_trainer(lagged=True)
    second = make_trainer(lagged=True)
    extreme = replace(batch, weights=weights, logprobs=logprobs)
    first.train_on(extreme, at_rate(first, 1e-2), np.random.default_rng(0), LAGGED)
    second.train_on(
        replace(batch, weights=weights), at_rate(second, 1e-2), np.random.default_rng(0), LAGGED
    )
    assert np.isfinite(first.weights()).all()
    np.testing.assert_array_equal(first.weights(), second.weights())


def test_overlap_measures_ratios_from_the_policy_that_it_updates(tmp_path: Path) -> None:
    """With one minibatch in all, every ratio is one but for rounding in each lagged iteration."""
    config = dppo.Config(
        env_id="CartPole-v1", overlap=True, num_samplers=2, num_steps=32, update_epochs=1, minibatch_size=64,
        total_timesteps=64 * 5, learning_rate=0.05, anneal_lr=False, progress="off", run_dir=tmp_path / "run",
    )  # fmt: skip
    rows = list(dppo.train(config).metrics)
    assert [row["losses/approx_kl"] for row in rows[1:]] == pytest.approx([0.0] * 4, abs=1e-7)
    assert [row["losses/clipfrac"] for row in rows[1:]] == [0.0] * 4
