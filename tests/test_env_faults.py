"""Environments fail one by one: the others go on, the result follows from the seed, too many faults end the run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config, tiny_run
from matrix import UNRELIABLE, single, sized
from recorder import Recorder
from worlds.faulty import Unreliable

import dppo
from dppo.errors import ConfigError, EnvFault, EnvironmentFault, SegmentsLost
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.records import Experience
from dppo.records.closing_lines import closing_lines

ROWS = 4 * 2 * 32
ITERATIONS = 4
ENDLESS = {"world": "worlds.slow:Endless", "world_kwargs": {"slow": "no"}}
MIXED = {"steps": 0.03, "resets": 0.1}


def settings(run_dir: Path, kwargs: dict[str, Any] = MIXED, **changes: Any) -> dppo.Config:
    world = UNRELIABLE | {"env_kwargs": kwargs}
    return make_config(sized(world, ITERATIONS) | {"run_dir": run_dir} | changes)


def faults_of(result: dppo.Result) -> tuple[Any, ...]:
    """What must not depend on who hosts the samplers."""
    counts = {kind: result.incidents.get(kind, 0) for kind in ("env_raised", "bad_step")}
    steps = (result.global_step, result.episodes)
    return result.weights_sha256, steps, counts, result.env_faults


def recorded(recorder: Recorder) -> list[EnvFault]:
    faults = (incident.fault for incident in recorder.incidents)
    return [fault for fault in faults if fault]


@pytest.fixture(scope="module")
def alone(module_path: Path) -> tuple[Any, ...]:
    """An undisturbed run in this process."""
    result = dppo.train(settings(module_path / "alone"))
    return faults_of(result)


@pytest.mark.proves("raises in `step`", "raises in `reset`")
def test_each_fault_is_counted_with_its_environment_and_its_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    result = dppo.train(settings(tmp_path / "run"), observers=[recorder])
    faults = recorded(recorder)
    errors = {fault.error for fault in faults}
    assert errors == {"LicenceError", "KeyboardInterrupt", "SystemExit", "invalid"}

    phases = {fault.phase for fault in faults}
    assert phases == {"step", "reset"}
    places = {(fault.sampler_id, fault.env) for fault in faults}
    assert len(places) == 8

    lost = result.env_faults["steps lost"]
    assert len(faults) == sum(result.env_faults.values()) - lost
    assert len(faults) == sum(result.incidents.values())

    in_steps = [fault for fault in faults if fault.phase == "step"]
    assert result.global_step == ITERATIONS * ROWS - len(in_steps)  # each costs one row
    assert lost == sum(fault.step - 1 for fault in in_steps)

    row = result.metrics[-1]
    assert row["faults/steps lost"] == lost
    counts = [count for name, count in row.items() if name.startswith("faults/sampler")]
    assert sum(counts) == len(faults)

    expected = f"which cost {lost:,} env steps:"
    assert any(expected in line for line in recorder.ending)


def test_faults_of_segments_that_are_collected_again_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost costs nothing of the budget."""
    whole = dppo.train(settings(tmp_path / "whole"))
    counts = dict(whole.env_faults)
    del counts["steps lost"]
    number = sum(counts.values())
    update = LocalTrainer.update
    to_come = [ITERATIONS - 1]

    def update_or_lose(self: LocalTrainer, experience: Experience) -> Any:
        if experience.iteration in to_come:
            to_come.remove(experience.iteration)
            raise SegmentsLost("lost on their way")
        return update(self, experience)

    monkeypatch.setattr(LocalTrainer, "update", update_or_lose)
    result = dppo.train(settings(tmp_path / "run", env_faults=f"{number}/h"))
    assert result.incidents.pop("segments_lost") == 1
    assert faults_of(result) == faults_of(whole)


def play_again(fault: EnvFault) -> None:
    """Play the episode of a fault up to it: what the environment returns and raises is as reported."""
    assert fault.complete
    assert fault.actions is not None
    env = Unreliable(steps=0.02)
    obs, _ = env.reset(seed=fault.seed)
    *before, last = map(int, fault.actions)
    for action in before:
        obs, *_ = env.step(action)
    assert np.array2string(obs) == fault.last_obs
    if fault.error == "invalid":
        obs, reward, *_ = env.step(last)
        assert reward is None or np.isnan(obs).all()
        return
    with pytest.raises(BaseException) as caught:
        env.step(last)
    assert type(caught.value).__name__ == fault.error
    assert fault.error in fault.traceback


def test_the_actions_of_a_fault_play_its_episode_again(tmp_path: Path) -> None:
    recorder = Recorder()
    config = settings(tmp_path / "run", {"steps": 0.02}, num_steps=8, total_timesteps=ROWS * 2)
    dppo.train(config, observers=[recorder])
    faults = recorded(recorder)
    latest = max(fault.step for fault in faults)
    assert latest > 16  # its episode began two segments before
    for fault in faults:
        play_again(fault)


@pytest.mark.proves("raises with a probability of 0.0001 in each step")
@pytest.mark.slow
def test_a_fault_in_ten_thousand_steps_gives_the_weights_of_one_process(
    ray_session: None, tmp_path: Path
) -> None:
    sizes = {"num_steps": 128, "total_timesteps": 80 * 1024, "update_epochs": 1}
    here = dppo.train(settings(tmp_path / "here", {"steps": 1e-4}, **sizes))
    there = dppo.train(settings(tmp_path / "there", {"steps": 1e-4}, num_actors=2, **sizes))
    assert faults_of(there) == faults_of(here)
    assert there.incidents.keys() <= {"env_raised", "bad_step"}
    assert sum(there.incidents.values()) >= 1  # of 8 to be expected


@pytest.mark.proves("raises more often than `--env-faults`")
def test_too_many_faults_end_the_run_with_a_checkpoint_that_can_be_resumed(
    alone: tuple[Any, ...], tmp_path: Path
) -> None:
    allowed = "25/h"
    recorder = Recorder()
    assert sum(alone[-1].values()) > 25
    with pytest.raises(
        EnvironmentFault, match=r"env_faults=25/h: 26 faults of environments in \d+ s. Correct"
    ) as caught:
        dppo.train(settings(tmp_path / "run", env_faults=allowed), observers=[recorder])
    # also those of the iteration that has ended the run
    faults = recorded(recorder)
    assert len(faults) > 20
    assert "The last one: sampler " in caught.value.message
    assert "is rebuilt" not in caught.value.message  # the run ends
    assert caught.value.place is not None
    assert caught.value.place.traceback == caught.value.remote_traceback

    resumed = dppo.train(settings(tmp_path / "run"), resume=tmp_path / "run")
    assert 0 < resumed.resumed_at < ITERATIONS
    assert faults_of(resumed) == alone
    *_, resume = closing_lines(replace(resumed, stopped_by="EnvironmentFault"), caught.value)
    rate = re.findall(r"use `env_faults=([^`]+)`", caught.value.message)[0]
    assert rate == "4000/h"  # 26 in a minute, twice
    assert resume.splitlines()[0].endswith(f" --env-faults {rate}")


@pytest.mark.proves("raises in its first steps")
def test_a_fault_in_the_first_steps_ends_the_run_and_a_later_one_does_not(tmp_path: Path) -> None:
    """Of 8 environments, each counts as early in its first 13 steps."""

    def config(at_step: int) -> dppo.Config:
        world = {
            "env_id": "worlds.faulty:crashing",
            "env_kwargs": ENDLESS | {"at_episode": None, "at_step": at_step},
            "on_env_fault": "auto",
        }
        return settings(tmp_path / str(at_step), **sized(world | single(8, 8), 8))

    with pytest.raises(EnvironmentFault) as early:
        dppo.train(config(13))
    assert "use `on_env_fault=rebuild`" in early.value.message
    assert early.value.place is not None
    assert early.value.place.complete  # the actions of the segment before are known, too

    later = dppo.train(config(14))
    assert later.incidents["env_raised"] >= 8


@pytest.mark.proves("raises at one state, always")
def test_an_environment_that_raises_at_a_state_does_not_keep_a_run_from_its_end(
    tmp_path: Path,
) -> None:
    result = dppo.train(
        settings(tmp_path / "run", {"at": 0.15, "kinds": ["raise"]}, on_env_fault="auto")
    )
    assert result.iterations == ITERATIONS
    assert result.incidents["env_raised"] > 0


def test_a_run_that_ended_with_a_fault_goes_on_with_another_setting(tmp_path: Path) -> None:
    raising = partial(settings, tmp_path / "run", {"steps": 0.01, "kinds": ["raise"]})
    with pytest.raises(
        EnvironmentFault, match=r"raised .*LicenceError: licence server said 503\. Correct"
    ):
        dppo.train(raising(on_env_fault="raise", env_faults="10/h"))
    assert dppo.train(raising(), resume=tmp_path / "run").iterations == ITERATIONS


def test_the_setting_of_older_runs_is_understood() -> None:
    old = make_config({"env_id": "CartPole-v1", "on_bad_step": "drop"})
    assert old.on_env_fault == "rebuild"
    assert old.env_faults == "unlimited"
    raising = make_config({"env_id": "CartPole-v1", "on_bad_step": "raise"})
    assert raising.on_env_fault == "raise"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env_faults": "10"}, "env_faults=10: must be a number of at least 1 in a time"),
        ({"env_faults": "0/h"}, "env_faults=0/h: must be"),
        ({"recycle_after": "2GB"}, "recycle_after=.* has no effect: num_actors=0 starts no actors"),
        (
            {"recycle_after": "often", "num_actors": 1},
            "recycle_after=often: must be like 2GB, 800MB, 500segments or 2GB,500segments",
        ),
    ],
)
def test_a_wrong_budget_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config({"env_id": "CartPole-v1"} | settings)


@pytest.mark.parametrize(
    ("text", "limits"),
    [("2GB", (2e9, np.inf)), ("800MB", (8e8, np.inf)), ("1.5GB,500segments", (1.5e9, 500.0))],
)
def test_an_actor_is_recycled_after_so_much_memory_or_so_many_segments(
    text: str, limits: tuple[float, float]
) -> None:
    config = make_config({"env_id": "CartPole-v1", "num_actors": 1, "recycle_after": text})
    assert config.actors.recycling == limits


@pytest.mark.slow
def test_recycled_actors_give_the_weights_of_one_process(ray_session: None, tmp_path: Path) -> None:
    here = dppo.train(settings(tmp_path / "here", {}))
    there = dppo.train(settings(tmp_path / "there", {}, num_actors=2, recycle_after="4segments"))
    assert there.weights_sha256 == here.weights_sha256
    assert there.incidents == {"actor_recycled": 2}  # each has made 2 x 2 segments
    last = there.metrics[-1]
    memory_gb = [last[f"actors/memory_gb/{actor}"] for actor in range(2)]
    assert min(memory_gb) > 0.01
    assert max(memory_gb) < 10
    assert max(memory_gb) == last["actors/memory_gb"]


class Unclosable(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def close(self) -> None:
        raise OSError("the licence server is gone")


def test_one_traceback_is_printed_for_all_environments_that_raise_the_same_in_close(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dppo.train(tiny_run(tmp_path / "run", samplers=3, env_id=Unclosable))
    shown = capsys.readouterr().err
    assert shown.count("OSError: the licence server is gone") == 1
    assert "2 other environments raised the same in close(): OSError (" in shown
