"""The bottleneck of a run and the times of its iterations are found from its rows of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_config, tiny_run

import dppo
from dppo.records.bottleneck import (
    TimeSplit,
    bottleneck_line,
    evaluations_line,
    longest_usual,
    times_line,
)
from dppo.run import runner
from dppo.run.iteration_row import iteration_row
from dppo.tools.doctor.run_findings import findings_of_run

NOTHING = TimeSplit.of([])


def line_of(*times: float, **changes: Any) -> str:
    """Return the bottleneck by the times of an iteration, of collecting, of the slowest actor and of updating."""
    config = make_config({"env_id": "E-v0", "num_actors": 2} | changes)
    return bottleneck_line(TimeSplit(*times), config)


UPDATING: list[tuple[tuple[float, ...], dict[str, Any], str]] = [
    # times, settings, words of the line
    ((0.75, 0.5, 0.5, 0.22), {}, "An iteration took 750 ms: collecting 500 ms, updating 220 ms."),
    (
        (2.5, 1.0, 0.9, 1.05),
        {"update_epochs": 1},
        "An iteration took 2.5 s: collecting 1 s, updating 1.05 s.",
    ),
    (
        (0.75, 0.2, 0.2, 0.53),
        {"update_epochs": 10},
        "updating 530 ms. update_epochs=5 (--update-epochs 5) would make about 1.5 x as many env steps per second, "
        "and need more of them to learn the same.",
    ),
    (
        (1.0, 0.4, 0.4, 0.6),
        {"update_epochs": 10},
        "update_epochs=6 (--update-epochs 6) would make about 1.3 x ",
    ),
    (
        (0.61, 0.6, 0.25, 0.6),
        {"update_epochs": 4, "overlap": True},
        "collecting 250 ms, updating 600 ms. update_epochs=2 (--update-epochs 2) would make about 2.0 x ",
    ),
    (
        (1.0, 0.39, 0.39, 0.61),
        {"update_epochs": 4, "overlap": True, "num_actors": 0},
        "=2 (--update-epochs 2) would make about 1.4 x ",
    ),
    # a small gain
    ((1.0, 0.48, 0.48, 0.5), {"update_epochs": 10}, "updating 500 ms."),
    ((1.0, 0.5, 0.5, 0.0), {}, "updating 0 ms."),
]


@pytest.mark.parametrize(("times", "changes", "line"), UPDATING)
def test_both_times_are_printed_and_fewer_epochs_where_updating_takes_the_longest(
    times: Any, changes: dict[str, Any], line: str
) -> None:
    config = make_config({"env_id": "E-v0", "num_actors": 2} | changes)
    epochs = changes.get("update_epochs", 10)
    printed = times_line(TimeSplit(*times), config, epochs)
    assert line in printed
    assert ("would" in printed) == ("would" in line)
    assert times_line(NOTHING, config, epochs) == ""


def test_without_overlap_the_gain_by_overlap_is_named() -> None:
    assert line_of(0.100, 0.062, 0.060, 0.038) == (
        "Bottleneck: the actors were idle for 38% of the time, during updates. overlap=True (--overlap) would be "
        "up to 1.6 x as fast if the learner has a core of its own; its results differ."
    )
    line = line_of(0.100, 0.020, 0.020, 0.075)
    assert "idle for 80% of the time, during updates" in line
    assert "up to 1.2 x" in line


def test_with_overlap_the_slower_side_is_named() -> None:
    line = line_of(0.033, 0.033, 0.020, 0.031, overlap=True)
    assert line == "Bottleneck: the learner. More actors gain nothing."
    assert line_of(0.100, 0.100, 0.098, 0.030, overlap=True) == (
        "Bottleneck: the actors. num_actors=8 (--num-actors 8) would be up to 3.3 x as fast if there are CPUs for "
        "them, with the same result."
    )


HALF = (0.100, 0.050, 0.050, 0.050)
COLLECTING = (0.100, 0.100, 0.098, 0.030)


@pytest.mark.parametrize(
    ("times", "changes"),
    [
        (HALF, {"num_actors": 0}),
        (NOTHING, {}),
        (HALF, {"num_actors": 0, "overlap": True}),
        # not more actors than samplers
        (COLLECTING, {"num_actors": 8, "overlap": True}),
        # whose samplers do not take turns
        (COLLECTING, {"overlap": True, "env_threads": True}),
        ((0.100, 0.092, 0.090, 0.008), {}),  # a small gain
        ((0.100, 0.008, 0.007, 0.092), {}),
    ],
)
def test_without_actors_rows_or_gain_nothing_is_reported(
    times: Any, changes: dict[str, Any]
) -> None:
    assert line_of(*times, **changes) == ""
    assert line_of(0.100, 0.088, 0.085, 0.012) != ""


@pytest.mark.parametrize(
    ("usual", "times", "advice"),
    [
        (TimeSplit(20.0, 5.0, 5.0, 15.0), "20 s: collecting 5 s, updating 15 s.", True),
        (TimeSplit(2.0, 0.5, 0.5, 1.5), "2 s: collecting 500 ms, updating 1.5 s.", False),
    ],
)
def test_a_stall_turns_no_advice(
    usual: TimeSplit, times: str, advice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped counts the time as that of an update."""
    stalled = {2: usual._replace(iteration_s=999.0, update_s=984.0), 5: TimeSplit(900.0, 899.0)}

    def row_of(iteration: Any, *parts: Any) -> dict[str, float]:
        split = stalled.get(iteration.number, usual)
        named = {f"perf/{name}": value for name, value in split._asdict().items()}
        return iteration_row(iteration, *parts) | named

    monkeypatch.setattr(runner, "row_maker", lambda keys: row_of)
    result = dppo.train(tiny_run(tmp_path / "run", iterations=8, update_epochs=4))
    assert times in result.times
    assert ("update_epochs=2 " in result.times) == advice, "seven iterations are the time to save"
    lines = [text for _, text in findings_of_run(tmp_path / "run")]
    assert any(times in line for line in lines)


@pytest.mark.parametrize(
    ("times", "longest"),
    [([], 0), ([3], 3), ([9, 1], 1), ([9, 2, 1], 2), ([4, 3, 9, 9, 1], 4), (range(101), 95)],
)
def test_the_longest_usual_time_is_not_among_the_longest_twentieth(
    times: Any, longest: float
) -> None:
    assert longest_usual(times) == longest


@pytest.mark.parametrize(
    ("waited_s", "eval_actors", "advice"),
    [
        (59.0, 1, None),
        (61.0, 1, None),  # 1.09 x as long
        (330.0, 1, "Use eval_actors=2 (--eval-actors 2) if there are CPUs for them, a larger eval"),
        (
            6600.0,
            1,
            "Use eval_actors=4 (--eval-actors 4) if there are CPUs for them, a larger eval",
        ),
        (6600.0, 4, "Use a larger eval_every (--eval-every), or fewer eval_episodes"),
    ],
)
def test_advice_follows_from_a_long_wait_for_evaluations(
    waited_s: float, eval_actors: int, advice: str | None
) -> None:
    playing = {"num_actors": 2, "eval_every": 64, "eval_episodes": 4, "eval_actors": eval_actors}
    training_s = 660.0 if waited_s > 60 else 1.0
    line = evaluations_line(waited_s, training_s, make_config({"env_id": "E-v0"} | playing))
    assert (advice in line) if advice else (line == "")
