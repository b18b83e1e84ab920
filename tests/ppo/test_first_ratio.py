"""The first minibatch of an update sees the policy that acted: on segments of a real sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import random_weights

from dppo.assemble import build_sampler, build_trainer, sampler_plan
from dppo.config import Config
from dppo.ppo.batch import make_batch
from dppo.ppo.normalizer import Moments, Statistics
from dppo.ppo.segment import PolicySnapshot, SegmentRequest


@pytest.mark.parametrize("env_id", ["CartPole-v1", "dppo/PointMass-v0"])
@pytest.mark.parametrize("norm_obs", [False, True], ids=["raw_obs", "norm_obs"])
@pytest.mark.parametrize("norm_reward", [False, True], ids=["raw_reward", "norm_reward"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_ratio_is_one(env_id: str, norm_obs: bool, norm_reward: bool, dtype: str) -> None:
    """Acting and training see the same policy: to 1e-12 in float64, to 2e-5 in float32."""
    config = Config(
        env_id=env_id, num_samplers=2, envs_per_sampler=2, num_steps=30, update_epochs=1, minibatch_size=120,
        norm_obs=norm_obs, norm_reward=norm_reward, norm_adv=False, dtype=dtype, learning_rate=0.01,
    )  # fmt: skip
    samplers = [build_sampler(sampler_plan(config), sampler_id) for sampler_id in range(2)]
    spaces = samplers[0].spaces
    trainer = build_trainer(config, spaces)
    trainer.load(random_weights(trainer.model.spec), trainer.state())  # a policy that is far from uniform
    statistics = Statistics(
        Moments.empty(spaces.obs_shape) if norm_obs else None, Moments.empty(()) if norm_reward else None
    )
    for iteration in range(2):  # in the second one the statistics are no longer empty
        mean, std = statistics.obs.mean_and_std() if statistics.obs is not None else (None, None)
        snapshot = PolicySnapshot(iteration, trainer.weights(), mean, std)
        collected = [one.sampler.collect(SegmentRequest(s, iteration), snapshot) for s, one in enumerate(samplers)]
        batch = make_batch([segment for segment, _ in collected], statistics, gamma=0.99, gae_lambda=0.95)
        with torch.no_grad():
            head, values = trainer.model(batch.obs)
            log_std = trainer.model.log_std
            logprobs = trainer.model.spec.distribution.evaluate(head, log_std, batch.actions).logprobs
        tolerance = {"float32": 2e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(logprobs, batch.logprobs, atol=tolerance)
        np.testing.assert_allclose(values, batch.values, rtol=tolerance, atol=tolerance)
        losses = trainer.update(batch, 0.01, np.random.default_rng(iteration))
        assert abs(losses["approx_kl"]) < {"float32": 1e-6, "float64": 1e-10}[dtype]
        assert abs(losses["old_approx_kl"]) < tolerance
        assert losses["clipfrac"] == 0
        assert losses["policy_loss"] == pytest.approx(-float(batch.advantages.mean()), rel=1e-4, abs=tolerance)
        assert losses["minibatches"] == 1
        statistics = statistics.merged([report.statistics for _, report in collected])
