"""Observations stored as float64: what float32 cannot tell apart is seen after normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import dppo
from dppo.cluster.plans import build_sampler, build_trainer, sampler_plan, trainer_plan
from dppo.config import Config, make_config
from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import measured_shape
from dppo.ppo.exchange.normalizer import Moments, ObsScale
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.learning.batch import make_batch

OFFSET = 1e9


class FarAway(gym.Env[Any, Any]):
    """The right action is the sign of the last number, which lies beside 1e9; `nest` puts it into a Dict."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, nest: bool = False, dtype: str = "float64") -> None:
        space = gym.spaces.Box(-np.inf, np.inf, (2,), np.dtype(dtype).type)
        self.observation_space = gym.spaces.Dict({"far": space, "dial": gym.spaces.Discrete(3)}) if nest else space
        self._nest = nest

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        reward = float((self._number > 0) == bool(action))
        self._steps += 1
        return self._observe(), reward, self._steps == 20, False, {}

    def _observe(self) -> Any:
        self._number = float(self.np_random.normal())
        far = np.array([0.5, OFFSET + self._number])
        return {"far": far, "dial": self._steps % 3} if self._nest else far


def config_of(**changes: Any) -> Config:
    base = {"env_id": FarAway, "num_samplers": 2, "num_steps": 64, "total_timesteps": 128 * 24, "progress": "off"}
    return make_config(base | {"learning_rate": 3e-3, "norm_obs": True, "obs_dtype": "float64"} | changes)


@pytest.mark.parametrize("nest", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_sign_beside_1e9_is_learnt(nest: bool, tmp_path: Path) -> None:
    result = dppo.train(config_of(env_kwargs={"nest": nest}, run_dir=tmp_path / "exact"))
    assert result.episodic_return > 15
    assert not result.incidents
    rounded = dppo.train(config_of(env_kwargs={"nest": nest}, run_dir=tmp_path / "rounded", obs_dtype="float32"))
    assert rounded.episodic_return < 13
    assert rounded.incidents["precision_lost"] > 0
    policy = dppo.load_policy(result.run_dir)
    actions = []
    for number in (-1.0, 1.0):
        far = np.array([0.5, OFFSET + number])
        actions.append(policy.act({"far": far, "dial": 1} if nest else far))
    assert actions == [0, 1]
    assert dppo.evaluate(result, episodes=5).mean_return > 15


@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_acting_and_learning_normalise_in_float64_before_rounding(nest: bool, dtype: str) -> None:
    config = config_of(env_kwargs={"nest": nest}, dtype=dtype)
    built = build_sampler(sampler_plan(config), 0)
    trainer = build_trainer(trainer_plan(config), built.spaces)
    report, _ = built.sampler.collect(SegmentRequest(0, 0), snapshot(trainer.weights(), None, built.spaces.obs))
    scale = ObsScale.of(report.statistics.obs)  # type: ignore[arg-type]
    _, segment = built.sampler.collect(SegmentRequest(0, 1), snapshot(trainer.weights(), scale, built.spaces.obs))
    batch = make_batch([segment], scale, None, gamma=0.99, gae_lambda=0.95)
    seen = batch.obs["far"] if isinstance(batch.obs, dict) else batch.obs
    raw = segment.obs["far"] if nest else segment.obs
    assert raw.dtype == np.float64
    expected = np.array([(row[1] - scale.mean[1]) / scale.std[1] for row in raw.reshape(-1, 2)])  # the slow twin
    np.testing.assert_allclose(seen[:, 1], np.clip(expected, -10, 10), rtol=1e-6, atol=1e-6)
    scored = trainer.model.forward(batch.obs, batch.actions)
    np.testing.assert_allclose(scored.policy.logprobs, batch.logprobs, atol=2e-5)


def snapshot(weights: np.ndarray, scale: ObsScale | None, obs: np.dtype[Any]) -> PolicySnapshot:
    """Return a policy; without a scale, one that normalises with no samples."""
    return PolicySnapshot(0, weights, scale or ObsScale.of(Moments.empty(measured_shape(obs))))


def test_resume_is_exact(tmp_path: Path) -> None:
    class Stop(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> bool | None:
            return row["iteration"] == 2

    short = {"total_timesteps": 128 * 4}
    whole = dppo.train(config_of(run_dir=tmp_path / "whole", **short))
    dppo.train(config_of(run_dir=tmp_path / "half", **short), observers=[Stop()])
    resumed = dppo.train(config_of(run_dir=tmp_path / "half", **short), resume=tmp_path / "half")
    assert resumed.weights_sha256 == whole.weights_sha256


def test_it_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"obs_dtype=float64 has no effect: the network reads float32\. Use norm_obs"):
        config_of(norm_obs=False)
    with pytest.raises(ConfigError, match="the observation space contains no float64 numbers"):
        dppo.train(config_of(env_kwargs={"dtype": "float32"}, run_dir=tmp_path / "run"))
