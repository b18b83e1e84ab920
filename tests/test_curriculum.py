"""Observers change options of environments.

tests/test_promise.py shows that a run with them does not depend on the number of actors, kills and resumes.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from matrix import GRADED, sized
from recorder import Recorder, stop_in_episode
from remedies import executes
from worlds.graded import RESETS, Graded, Levels

import dppo
from dppo.errors import ConfigError, EnvironmentFault
from dppo.tools.replay.episode import replay


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return make_config(sized(GRADED, 8) | {"run_dir": run_dir} | changes)


def trained(run_dir: Path, *observers: dppo.Observer, **changes: Any) -> dppo.Result:
    return dppo.train(settings(run_dir, **changes), observers=[Levels(), *observers])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_change_takes_effect_in_an_iteration_that_follows_from_the_one_of_the_call(
    lag: int, tmp_path: Path
) -> None:
    RESETS.clear()
    counts = [0]
    recorder = Recorder(after_iteration=lambda _: counts.append(len(RESETS)))
    trained(tmp_path / "run", recorder, policy_lag=lag)
    for iteration, (first, end) in enumerate(pairwise(counts), 1):
        # the call before the first iteration sets level 1
        called_after = max(0, iteration - 2 - lag)
        assert {reset["level"] if reset else None for reset in RESETS[first:end]} == {
            1 + called_after
        }
        assert all(reset and reset["list"] == [1, 2.5] for reset in RESETS[first:end])


def test_a_run_that_is_resumed_has_the_options_of_the_one_before(tmp_path: Path) -> None:
    trained(tmp_path / "run", Recorder(interrupt_at=5))
    levels = Levels()
    dppo.train(settings(tmp_path / "run"), resume=tmp_path / "run", observers=[levels])
    assert levels.options_at_start == {"level": 6, "list": [1, 2.5]}


def test_a_row_that_is_repeated_for_an_evaluation_changes_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume, a repeated evaluation has a row of its own. The observer raises the level in each row."""
    changes = {"eval_every": 1, "eval_episodes": 2, "trace_hashes": True}
    expected = trained(tmp_path / "whole", **changes)
    stop_in_episode(6, monkeypatch)
    stopped = trained(tmp_path / "run", **changes)
    assert (stopped.stopped_by, stopped.iterations) == ("SIGTERM", 3)
    config = settings(tmp_path / "run", **changes)
    result = dppo.train(config, resume=tmp_path / "run", observers=[Levels()])
    numbers = [row["iteration"] for row in result.metrics]
    assert sorted(numbers) == [4, *range(4, 9)]
    assert result.weights_sha256 == expected.weights_sha256
    traces = [run.run_dir / "trace.jsonl" for run in (result, expected)]
    assert traces[0].read_bytes() == traces[1].read_bytes()


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
    ) as fault:
        trained(tmp_path / "refused", env_id=WithoutOptions)
    assert "on_env_fault" not in str(fault.value)
    trained(tmp_path / "given", total_timesteps=120)
    dppo.train(settings(tmp_path / "left out", env_id=WithoutOptions, total_timesteps=120))


def test_options_that_are_not_json_are_refused(tmp_path: Path) -> None:
    run = dppo.RunInfo(settings(tmp_path), tmp_path, "", (), 1, None)
    with pytest.raises(ConfigError, match=r"set_env: .* is not JSON"):
        run.set_env(level=object())
