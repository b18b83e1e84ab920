"""Wrappers with running statistics, which no evaluation, export or resumed run has, are named and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import (
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
)
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeVector
from kinds import small
from recorder import Notes
from remedies import executes
from test_doctor import examined
from worlds.joint import cartpole

import dppo
from dppo.envs.statistics import running_statistics
from dppo.errors import ConfigError
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.policies.acting import PlaySettings, PolicyActingFor
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.tools.doctor import examination


def normalized(frozen: bool = False) -> gym.Env[Any, Any]:
    """Return an environment whose wrapper is not the outermost one."""
    env = NormalizeObservation(TimeLimit(cartpole(), 20))
    env.update_running_mean = not frozen
    return RecordEpisodeStatistics(env)


class RunningMeanStd:
    """As Stable-Baselines3 has it."""


class OfParts(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps statistics of each part of an observation."""

    def __init__(self, env: Any, training: bool = True) -> None:
        super().__init__(env)
        self.parts = {"at": RunningMeanStd()}
        self.training = training


FOUND: dict[str, tuple[Any, list[str]]] = {
    "in a factory": (normalized, ["NormalizeObservation"]),
    "both": (lambda: NormalizeReward(normalized()), ["NormalizeReward", "NormalizeObservation"]),
    "around a vector": (
        lambda: NormalizeVector(SyncVectorEnv([cartpole] * 2)),
        ["NormalizeObservation"],
    ),
    "in a vector": (lambda: SyncVectorEnv([normalized] * 2), ["NormalizeObservation"]),
    "in processes": (lambda: AsyncVectorEnv([normalized] * 2), ["NormalizeObservation"]),
    "of parts": (lambda: OfParts(cartpole()), ["OfParts"]),
    "frozen": (lambda: normalized(frozen=True), []),
    "frozen as in Stable-Baselines3": (lambda: OfParts(cartpole(), training=False), []),
    "none": (lambda: RecordEpisodeStatistics(cartpole()), []),
    "none in processes": (lambda: AsyncVectorEnv([cartpole]), []),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if "processes" in case else case for case in FOUND],
)
def test_wrappers_with_running_statistics_are_found(case: str) -> None:
    make, names = FOUND[case]
    env = make()
    try:
        assert running_statistics(env) == names
    finally:
        env.close()


@pytest.mark.proves(
    "is in a wrapper that normalizes by running statistics of its own, such as `NormalizeObservation`"
)
@executes("envs/statistics.py: Leave it out: norm_obs=True and norm_reward=True do this")
@pytest.mark.parametrize("where", ["wrappers", "factory", "vector"])
def test_they_are_refused_before_training_and_each_remedy_goes_on(where: str) -> None:
    settings: dict[str, Any] = {"num_samplers": 1, "norm_obs": False}
    plain: dict[str, Any] = {"env_id": cartpole}
    normalizing: dict[str, Any] = {"env_id": normalized}
    frozen: dict[str, Any] = {"env_id": normalized, "env_kwargs": {"frozen": True}}
    if where == "wrappers":
        normalizing = plain | {"wrappers": ("gymnasium.wrappers:NormalizeObservation",)}
    if where == "vector":
        normalizing = {
            "env_id": lambda: NormalizeVector(SyncVectorEnv([cartpole] * 2)),
            "envs_per_sampler": 2,
        }

    def build(**changes: Any) -> None:
        build_sampler(sampler_plan(make_config(settings | changes)), 0).envs.close()

    with pytest.raises(ConfigError) as refused:
        build(**normalizing)
    assert re.match(
        r"running_statistics=refuse: NormalizeObservation around the environment normalizes by running statistics of "
        r"its own\. .*Leave it out: norm_obs=True and norm_reward=True do this, and are saved with the policy\. Or "
        r"freeze it \(update_running_mean=False\), or use `running_statistics=allow`\.",
        str(refused.value),
    )

    build(**plain, **{"norm_obs": True, "norm_reward": True})
    build(**frozen)
    build(**normalizing, running_statistics="allow")


def test_an_evaluation_with_others_says_so_and_one_in_training_refuses_them(tmp_path: Path) -> None:
    result = dppo.train(
        small(tmp_path / "run", env_id=normalized, running_statistics="allow", total_timesteps=80)
    )
    with Notes() as notes:
        dppo.evaluate(result, episodes=1)
        dppo.evaluate(result, normalized(), episodes=1)
        dppo.evaluate(result, normalized(frozen=True), episodes=1)
    assert (
        sum(
            "begin with none: observations or rewards are not as in training" in text
            for text in notes.texts
        )
        == 2
    )

    env = sampler_plan(small(tmp_path, env_id=normalized)).env
    policy = dppo.load_policy(result.run_dir)
    settings = PlaySettings(1)
    acting_for = PolicyActingFor(policy.spaces, policy.spec, settings)
    player = EpisodePlayer(env, acting_for, settings, 1)
    with pytest.raises(ConfigError, match="running_statistics=refuse: NormalizeObservation"):
        player.play(PolicySnapshot(0, np.zeros(policy.spec.num_parameters)), 0, 9.0)


@pytest.mark.parametrize("setting", ["refuse", "allow"])
def test_the_doctor_names_them_with_a_remedy_that_fits(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 50)
    texts = examined("test_running_statistics:normalized", running_statistics=setting)
    start = "error: running_statistics=refuse: " if setting == "refuse" else "warning: "
    named = [text for text in texts if "normalizes by" in text or "the same seed" in text]
    assert any(
        text.startswith(f"{start}NormalizeObservation around the environment") for text in named
    ), texts
    assert all("norm_obs=True" in text for text in named), texts
