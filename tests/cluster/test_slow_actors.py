"""One slow actor on Ray: samplers move away from it, idle actors help, and the result is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from recorder import Notes, Recorder

import dppo

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.slow]


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    changes |= {"env_id": "worlds.slow:slow_in_one_process"}
    return tiny_run(run_dir, samplers=6, steps=16, iterations=24, **changes)


THREADS = {"env_threads": True}


@pytest.mark.proves("is slower on one node")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"overlap": True},
        {"backup_requests": True},
        {"policy_lag": 3},
        THREADS,
        THREADS | {"backup_requests": True},
    ],
    ids=str,
)
def test_a_slow_actor_does_not_change_the_result_and_is_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    lag = {name: value for name, value in changes.items() if name in ("overlap", "policy_lag")}
    expected = dppo.train(settings(tmp_path / "expected", env_kwargs={"step_s": 0.0}, **lag))
    recorder = Recorder()
    slow = {"step_s": 0.01, "slow": 10.0, "mark": str(tmp_path / "mark")}
    with Notes() as notes:
        result = dppo.train(
            settings(tmp_path / "found", env_kwargs=slow, num_actors=3, **changes),
            observers=[recorder],
        )
    assert result.weights_sha256 == expected.weights_sha256
    assert sum(row["replay/steps"] for row in result.metrics) > 0, "samplers have moved"

    named = any("s for a segment, a typical actor" in text for text in notes.texts)
    assert named or "env_threads" in changes, (
        "an actor that has given all of its samplers away at once costs little"
    )
    assert any(line.startswith("Backup requests:") for line in recorder.ending) == (
        "backup_requests" in changes
    )
