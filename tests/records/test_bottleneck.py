"""The bottleneck of a run is found from its rows of metrics."""

from __future__ import annotations

from typing import Any

import pytest

from dppo.records.words import TimeSplit, bottleneck_line


def said(iteration_s: float, collect_s: float, actors_s: float, update_s: float, rows: int = 5, **changes: Any) -> str:
    split = TimeSplit()
    first = dict.fromkeys(("perf/iteration_s", "perf/collect_s", "perf/slowest_actor_s", "perf/update_s"), 1e6)
    row = dict(zip(first, (iteration_s, collect_s, actors_s, update_s), strict=True))
    for number in range(rows):
        split.add(row if number else first)  # the first iteration, which makes the environments, does not count
    return bottleneck_line(split, **{"num_actors": 2, "num_samplers": 8, "overlap": False} | changes)


def test_without_overlap_the_gain_by_overlap_is_named() -> None:
    assert said(0.100, 0.062, 0.060, 0.038) == (
        "Bottleneck: the actors waited 38% of the time for the learner. overlap=True (--overlap) would be about 1.6 x "
        "as fast; its results differ."
    )
    assert "waited 80% of the time for the learner" in said(0.100, 0.020, 0.020, 0.075)
    assert "about 1.2 x" in said(0.100, 0.020, 0.020, 0.075)


def test_with_overlap_the_slower_side_is_named() -> None:
    assert said(0.033, 0.033, 0.020, 0.031, overlap=True) == (
        "Bottleneck: the learner (updating took 31 ms of 33 ms per iteration). More actors gain nothing."
    )
    assert said(0.100, 0.100, 0.098, 0.030, overlap=True) == (
        "Bottleneck: the actors (collecting took 98 ms of 100 ms per iteration, updating 30 ms). num_actors=8 "
        "(--num-actors 8) would be up to 3.3 x as fast if there are CPUs for them, with the same result."
    )


@pytest.mark.parametrize(
    ("times", "changes"),
    [
        *(((0.100, 0.050, 0.050, 0.050), none) for none in ({"num_actors": 0}, {"rows": 1}, {"rows": 0})),
        ((0.100, 0.050, 0.050, 0.050), {"num_actors": 0, "overlap": True}),
        ((0.100, 0.100, 0.098, 0.030), {"num_actors": 8, "overlap": True}),  # not more actors than samplers
        ((0.100, 0.092, 0.090, 0.008), {}),  # a small gain
        ((0.100, 0.008, 0.007, 0.092), {}),
    ],
)
def test_without_actors_rows_or_gain_nothing_is_reported(times: Any, changes: dict[str, Any]) -> None:
    assert said(*times, **changes) == ""
    assert said(0.100, 0.088, 0.085, 0.012) != ""
