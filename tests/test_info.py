"""Numbers in the info of env steps and episodes: exact for any number of actors, through faults, kills and resumes."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config
from processes import actors_of_this_process
from recorder import Notes, Recorder

import dppo
from dppo.envs.episode import GroupSettings, InfoMeter
from dppo.envs.rows.serial import SerialRows
from dppo.envs.spaces import describe_spaces

ITERATIONS = 3
SEEN: dict[str, list[float]] = defaultdict(list)


class Informed(gym.Env[Any, Any]):
    """Its info has numbers of each step, of every third, and of the last one; each episode draws its own."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        self._scale = float(self.np_random.uniform(0.1, 1.0))
        return np.zeros(1, np.float32), {"energy": 1e9}

    def step(self, action: Any) -> Any:
        self._steps += 1
        info: dict[str, Any] = {
            "energy": self._scale * self._steps,
            "name": "x",
            "nan": float("nan"),
        }
        if self._steps % 3 == 0:
            info["flow"] = np.float32(action)
        done = self._steps == 17
        if done:
            info["total"] = np.int64(self._steps)
            info["solved"] = True
            info["parts"] = [1, 2]
        for key in ("energy", "flow"):
            if key in info:
                SEEN[key].append(float(info[key]))
        obs = np.array([self._steps], np.float32)
        return obs, 1.0, False, done, info


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    base: dict[str, Any] = {
        "env_id": Informed,
        "num_samplers": 3,
        "envs_per_sampler": 2,
        "num_steps": 20,
        "total_timesteps": ITERATIONS * 120,
        "update_epochs": 1,
        "run_dir": run_dir,
        "progress": "off",
        "info_keys": ("energy", "flow", "total", "absent"),
    }
    return make_config(base | changes)


def measured(result: dppo.Result) -> list[dict[str, float]]:
    rows = []
    for row in result.metrics:
        rows.append({key: value for key, value in row.items() if key.startswith("info/")})
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    return dppo.train(settings(tmp_path_factory.mktemp("whole") / "run"))


def test_numbers_of_steps_and_of_episodes_are_reported_by_name(
    tmp_path: Path, whole: dppo.Result
) -> None:
    SEEN.clear()

    def forget_earlier(number: int) -> None:
        if number < ITERATIONS:
            SEEN.clear()

    recorder = Recorder(after_iteration=forget_earlier)
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run"), observers=[recorder])
    row = measured(result)[-1]
    for key, values in SEEN.items():
        assert row[f"info/{key}_min"] == min(values)
        assert row[f"info/{key}_max"] == max(values)
        assert row[f"info/{key}"] == pytest.approx(np.mean(values))
    last = recorder.episodes[0].info
    assert last.keys() == {"energy", "total", "solved"}
    assert last["total"] == 17.0
    assert last["solved"] == 1.0
    info_notes = [text for text in notes.texts if "info_keys" in text]
    assert info_notes == [
        "info_keys=absent: not a number in any info so far; the last one had energy, solved, total"
    ]
    without = dppo.train(settings(tmp_path / "without", info_keys=()))
    assert without.weights_sha256 == result.weights_sha256
    assert measured(without) == [{}] * ITERATIONS


class Warming(Informed):
    """Takes three steps in each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        for _ in range(3):
            obs, *_, info = self.step(1)
        return obs, info


def test_steps_that_an_environment_makes_in_its_reset_do_not_count() -> None:
    meter = InfoMeter(["energy", "flow"])
    env = Warming()
    settings = GroupSettings(
        "Warming", describe_spaces(env), lambda env, episode: episode, meter=meter
    )
    rows = SerialRows([env], settings)
    [checked] = rows.envs
    totals: dict[str, list[float]] = {"energy": [], "flow": []}
    for episode in (0, 1):
        checked.reset(episode)
        for _ in range(4):
            *_, info = checked.step(1)
            for key in totals.keys() & info.keys():
                totals[key].append(info[key])
    for key, (count, total, least, largest) in meter.take().items():
        values = totals.pop(key)
        assert count == len(values)
        assert least == min(values)
        assert largest == max(values)
        assert total == pytest.approx(sum(values))
    assert not totals
    checked.reset(2)
    assert meter.take() == {}


def test_they_are_equal_after_a_resume(tmp_path: Path, whole: dppo.Result) -> None:
    stopped = dppo.train(settings(tmp_path / "run"), observers=[Recorder(interrupt_at=1)])
    rows = measured(stopped) + measured(
        dppo.train(settings(tmp_path / "run"), resume=tmp_path / "run")
    )
    assert rows == measured(whole)


def test_a_resumed_run_waits_for_an_episode_before_it_misses_a_key(tmp_path: Path) -> None:
    """Checkpoints hold the returns of the last episodes, and not their infos."""
    sizes: dict[str, Any] = {
        "num_steps": 5,
        "total_timesteps": 5 * 3 * 2 * 8,
        "info_keys": ("total",),
    }
    dppo.train(settings(tmp_path / "run", **sizes), observers=[Recorder(interrupt_at=4)])
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", **sizes), resume=tmp_path / "run")
    assert not [text for text in notes.texts if "info_keys" in text]
    assert ["info/total" in row for row in result.metrics] == [
        False,
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ][8 - len(result.metrics) :]


def kill_an_actor() -> None:
    os.kill(min(actors_of_this_process()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"env_threads": True}, {"standby_envs": 1}])
def test_they_are_equal_on_actors_of_which_one_is_killed(
    changes: dict[str, Any], ray_session: None, tmp_path: Path, whole: dppo.Result
) -> None:
    observers = [Recorder(after_iteration=lambda number: kill_an_actor() if number == 1 else None)]
    result = dppo.train(settings(tmp_path / "run", num_actors=2, **changes), observers=observers)
    assert result.incidents["actor_lost"] == 1
    assert measured(result) == measured(whole)
    assert result.weights_sha256 == whole.weights_sha256
