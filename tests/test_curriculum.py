"""Observers change options of environments: exact for any number of actors, through kills and resumes."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from processes import actors_of_this_process
from recorder import Recorder
from remedies import executes
from worlds.graded import RESETS, Graded

import dppo
from dppo.errors import ConfigError, EnvironmentFault
from dppo.tools.replay.episode import replay

ITERATIONS = 8


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    base: dict[str, Any] = {
        "env_id": "worlds.graded:Graded",
        "num_samplers": 3,
        "envs_per_sampler": 2,
    }
    base |= {
        "num_steps": 16,
        "total_timesteps": ITERATIONS * 96,
        "update_epochs": 1,
        "progress": "off",
    }
    return make_config(base | {"run_dir": run_dir} | changes)


class Levels(Recorder):
    """Raises the level after each iteration, and interrupts the run if it is asked to."""

    def on_start(self, run: dppo.RunInfo) -> None:
        super().on_start(run)
        self.found = run.env_options
        run.set_env(level=1, list=[1, 2.5])

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        assert self.run is not None
        self.run.set_env(level=self.run.env_options["level"] + 1)
        return super().on_iteration(row)


def trained(
    run_dir: Path, levels: Levels | None = None, resume: bool = False, **changes: Any
) -> dppo.Result:
    observers = [levels or Levels()]
    return dppo.train(
        settings(run_dir, **changes), resume=run_dir if resume else None, observers=observers
    )


@pytest.mark.parametrize("lag", [0, 2])
def test_a_change_takes_effect_in_an_iteration_that_follows_from_the_one_of_the_call(
    lag: int, tmp_path: Path
) -> None:
    RESETS.clear()
    counts = [0]
    trained(
        tmp_path / "run",
        Levels(after_iteration=lambda _: counts.append(len(RESETS))),
        policy_lag=lag,
    )
    for iteration, (first, end) in enumerate(pairwise(counts), 1):
        # the call before the first iteration sets level 1
        called_after = max(0, iteration - 2 - lag)
        assert {reset["level"] if reset else None for reset in RESETS[first:end]} == {
            1 + called_after
        }
        assert all(reset and reset["list"] == [1, 2.5] for reset in RESETS[first:end])


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("at", [1, 5])
def test_a_run_that_is_resumed_has_equal_weights_and_options(
    lag: int, at: int, tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", policy_lag=lag)
    assert (
        whole.weights_sha256
        != dppo.train(settings(tmp_path / "without", policy_lag=lag)).weights_sha256
    )
    stopped = trained(tmp_path / "run", Levels(interrupt_at=at), policy_lag=lag)
    assert stopped.iterations == at
    levels = Levels()
    result = trained(tmp_path / "run", levels, resume=True, policy_lag=lag)
    assert (result.weights_sha256, result.episodes) == (whole.weights_sha256, whole.episodes)
    assert levels.found == {"level": 1 + at, "list": [1, 2.5]}
    assert "replay_mismatch" not in result.incidents


def kill_an_actor(iteration: int) -> None:
    if iteration == 3:
        os.kill(min(actors_of_this_process()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"policy_lag": 1}, {"env_threads": True}, {"standby_envs": 1}]
)
def test_runs_on_actors_are_equal_also_if_one_is_killed_and_they_are_resumed(
    changes: dict[str, Any], ray_session: None, tmp_path: Path
) -> None:
    learning = {"policy_lag": changes.get("policy_lag", 0)}
    whole = trained(tmp_path / "whole", **learning)
    killed = trained(
        tmp_path / "killed", Levels(after_iteration=kill_an_actor), num_actors=2, **changes
    )
    assert killed.incidents["actor_lost"] == 1
    trained(tmp_path / "run", Levels(interrupt_at=4), num_actors=2, **changes)
    resumed = trained(tmp_path / "run", resume=True, **learning)
    assert killed.weights_sha256 == resumed.weights_sha256 == whole.weights_sha256
    assert "replay_mismatch" not in killed.incidents


def test_an_incident_is_replayed_with_its_options(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "env_kwargs": {"fails_at": 3},
        "on_env_fault": "rebuild",
        "env_faults": "unlimited",
    }
    trained(tmp_path / "run", **changes)
    with pytest.raises(EnvironmentFault, match="level 3"):
        replay(tmp_path / "run" / "incidents" / "001", trust=True)
    assert "equal to the last bit" in replay(tmp_path / "run", "20", trust=True)


def test_a_note_says_once_that_these_are_options_of_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dppo")
    run = dppo.RunInfo(settings(tmp_path), tmp_path, "", (), 1, None)
    run.set_env(level=1)
    run.set_env(level=2)
    assert run.env_options == {"level": 2}
    [note] = caplog.messages
    assert note == (
        'set_env: new episodes start with reset(options={"level": 1}). The environment\'s `reset` has to read them; '
        "arguments of its constructor stay as they are."
    )


class WithoutOptions(Graded):
    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


@executes("envs/repairs.py: Give `reset` the parameter `options`, or leave `set_env` out")
def test_a_reset_that_takes_no_options_is_named_and_one_that_takes_them_or_no_set_env_trains(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"`set_env` sets options of `reset`\. Give `reset`"
    ) as told:
        trained(tmp_path / "refused", env_id=WithoutOptions)
    assert "on_env_fault" not in str(told.value)
    trained(tmp_path / "given", total_timesteps=96)
    dppo.train(settings(tmp_path / "left out", env_id=WithoutOptions, total_timesteps=96))


def test_options_that_are_not_json_are_refused(tmp_path: Path) -> None:
    run = dppo.RunInfo(settings(tmp_path), tmp_path, "", (), 1, None)
    with pytest.raises(ConfigError, match=r"set_env: .* is not JSON"):
        run.set_env(level=object())
