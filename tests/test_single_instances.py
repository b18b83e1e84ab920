"""Simulators of which a process may have few instances: what is refused before a run, what a run says, what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from worlds.single import Engine

import dppo
from dppo.errors import EnvironmentFault
from dppo.records.metrics.reading import read_metrics

ENGINE = {"env_id": "worlds.single:Engine"}


def one_too_many(tmp_path: Path, **changes: Any) -> str:
    """Return the message of a run that makes more instances than its process may have."""
    with pytest.raises(EnvironmentFault) as fault:
        dppo.train(tiny_run(tmp_path / "run", samplers=4, steps=8, **ENGINE | changes))
    assert not Engine.alive
    rows = tmp_path / "run" / "metrics.jsonl"
    assert not rows.exists() or not rows.read_text(), "no iteration was made"
    return fault.value.message


CROWDED: dict[str, tuple[dict[str, Any], str]] = {
    "samplers": (
        {},
        "only 1, use num_actors=4 (--num-actors 4), samplers_per_actor=1 (--samplers-per-actor 1).",
    ),
    "three": (
        {"env_kwargs": {"most": 3}},
        "only 3, use num_actors=2 (--num-actors 2), samplers_per_actor=3 (--samplers-per-actor 3).",
    ),
    "environments of a sampler": (
        {"envs_per_sampler": 2},
        "only 1, use envs_per_sampler=1 (--envs-per-sampler 1), num_samplers=8 (--num-samplers 8), num_actors=8 (",
    ),
    "copies for resets": (
        {"num_samplers": 1, "standby_envs": 1},
        "only 1, use standby_envs=0 (--standby-envs 0), samplers_per_actor=1 (--samplers-per-actor 1).",
    ),
    "threads": (
        {"env_threads": True},
        "only 1, use num_actors=4 (--num-actors 4), samplers_per_actor=1 (",
    ),
}


@pytest.mark.proves("raises in its constructor beside another instance, at the start")
@pytest.mark.parametrize(("changes", "words"), CROWDED.values(), ids=CROWDED)
def test_a_second_instance_in_this_process_ends_the_run_with_the_settings_that_work(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.transports.in_process.WAITS_S", (0, 0))
    message = one_too_many(tmp_path, **changes)
    assert "there should be only one engine in a process" in message
    assert words in message
    assert ("With fewer licences, use num_samplers=2" in message) == (
        changes.get("num_samplers") != 1
    )


def test_an_evaluation_in_this_process_says_where_it_can_play(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated: dict[str, Any] = ENGINE | {"eval_every": 8, "eval_episodes": 1}
    result = dppo.train(tiny_run(tmp_path / "run", steps=8, iterations=2, **evaluated))
    assert result.incidents == {"evaluation_fault": 2}
    assert (
        "The samplers have environments of their own in this process; num_actors=1 (--num-actors 1) evaluates in "
        "another process" in caplog.text
    )


@pytest.mark.slow
def test_actors_with_one_sampler_each_train_and_evaluate_with_equal_results(
    ray_session: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One process is slow: without the setting, its sampler moves to the other, which cannot make it, and goes back."""
    weights = []
    for name, limit in (
        ("known", {"samplers_per_actor": 1, "eval_every": 640, "eval_episodes": 2}),
        ("found", {}),
    ):
        slow = {"env_kwargs": {"slow": str(tmp_path / f"{name}.slow")}, "num_actors": 2}
        changes: dict[str, Any] = ENGINE | slow | limit
        config = tiny_run(tmp_path / name, samplers=2, steps=32, iterations=40, **changes)
        result = dppo.train(config)
        weights.append(result.weights_sha256)
        assert result.incidents == ({} if limit else {"actor_lost": 1})
    assert "From now on a process gets at most 1 sampler" in caplog.text
    assert weights[0] == weights[1]
    assert [
        row["eval/episodes"] for row in read_metrics(tmp_path / "known") if "eval/episodes" in row
    ] == [2] * 4
