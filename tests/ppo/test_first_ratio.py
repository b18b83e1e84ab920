"""The first minibatch of an update sees the policy that acted, on segments of a real sampler."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from builders import collect, parts_of, random_weights
from torch import Tensor

from dppo.config import Config
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.learning.batch import make_batch


@pytest.mark.parametrize("env_id", ["CartPole-v1", "worlds.simple:point_mass"])
@pytest.mark.parametrize("norm_obs", [False, True], ids=["raw_obs", "norm_obs"])
@pytest.mark.parametrize("norm_reward", [False, True], ids=["raw_reward", "norm_reward"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_ratio_is_one(
    env_id: str, norm_obs: bool, norm_reward: bool, dtype: Literal["float32", "float64"]
) -> None:
    """Acting and training agree to 1e-12 in float64, and to 2e-5 in float32."""
    config = Config(
        env_id=env_id, num_samplers=2, envs_per_sampler=2, num_steps=30, update_epochs=1, minibatch_size=120,
        norm_obs=norm_obs, norm_reward=norm_reward, norm_adv=False, dtype=dtype, learning_rate=0.01,
    )  # fmt: skip
    samplers, trainer = parts_of(config)
    trainer.load(random_weights(trainer.model.spec), trainer.state())  # a policy far from uniform
    statistics = no_statistics(samplers[0].spaces, obs=norm_obs, returns=norm_reward)
    for iteration in range(2):  # in the second, the statistics are not empty
        scale = statistics.obs_scale()
        snapshot = PolicySnapshot(iteration, trainer.weights(), scale)
        reports, segments = collect(samplers, snapshot)
        batch = make_batch(segments, scale, statistics.reward_scale(), gamma=0.99, gae_lambda=0.95)
        assert isinstance(batch.obs, Tensor)
        scored = trainer.model.forward(batch.obs, batch.actions)
        tolerance = {"float32": 2e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(scored.policy.logprobs, batch.logprobs, atol=tolerance)
        np.testing.assert_allclose(scored.values, batch.values, rtol=tolerance, atol=tolerance)
        losses = trainer.update(batch, 0.01, np.random.default_rng(iteration)).figures
        assert abs(losses["approx_kl"]) < {"float32": 1e-6, "float64": 1e-10}[dtype]
        assert abs(losses["old_approx_kl"]) < tolerance
        assert losses["clipfrac"] == 0
        assert losses["policy_loss"] == pytest.approx(-float(batch.advantages.mean()), rel=1e-4, abs=tolerance)
        assert losses["minibatches"] == 1
        statistics = statistics.merged([report.statistics for report in reports])
