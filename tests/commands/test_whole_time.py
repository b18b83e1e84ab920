"""How long several runs take is estimated during the first one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remedies import executes
from rich.console import Console

from dppo.tools import seeds
from dppo.tools.whole_time import SeveralRuns, WholeTime


class Watched:
    """The time of several runs, by a clock that a test sets, and the lines that it shows."""

    def __init__(self, runs: SeveralRuns) -> None:
        self.now = 0.0
        self.shown: list[str] = []
        self._watch = WholeTime(runs, self.shown.append, clock=lambda: self.now)

    def start(self, at: float) -> None:
        self.now = at
        self._watch.on_start(Any)  # type: ignore[arg-type]

    def iterate(self, at: float, global_step: float) -> None:
        self.now = at
        self._watch.on_iteration({"global_step": global_step})

    def end(self, at: float) -> None:
        self.now = at
        self._watch.on_end(None, None)


@pytest.mark.parametrize(
    ("seconds", "shown_at", "line"),
    [
        # the first iteration takes longer, because environments are made
        ([20, 22, 24, 26], 4, "Time: about 2:46:40 for 4 runs of 250,000 env steps, if each is as fast as the current "
         "one so far (100 steps/s). Lower --total-timesteps (250,000 now) for less."),
        ([40, 44], 1, "Time: about 2d 07:33:20 for 4 runs"),
        ([0.1, 3.1, 5.2], 3, "Time: about 3:32:30 for 4 runs"),
    ],
)  # fmt: skip
def test_the_time_is_shown_once_the_speed_is_known(
    seconds: list[float], shown_at: int, line: str
) -> None:
    watch = Watched(SeveralRuns(4, 250_000))
    watch.start(0.0)
    for iteration, now in enumerate([*seconds, 1000.0, 2000.0], start=1):
        watch.iterate(now, 200.0 * iteration)
        assert len(watch.shown) == (iteration >= shown_at)
    assert watch.shown[0].startswith(line)


def test_a_run_that_was_too_short_for_an_estimate_is_no_part_of_that_of_the_next() -> None:
    watch = Watched(SeveralRuns(4, 400))
    # a search makes a run for each trial, from its first env step
    for start, iteration_s in ((0.0, 1), (100.0, 1), (200.0, 1), (300.0, 5)):
        assert not watch.shown
        watch.start(start)
        for iteration in (1, 2):
            watch.iterate(start + iteration_s * iteration, 200.0 * iteration)
    assert watch.shown == [
        "Time: about 0:40 for 4 runs of 400 env steps, if each is as fast as the current one so far (40 steps/s)."
    ]


@pytest.mark.parametrize(
    ("count", "run_s", "ended", "line"),
    [
        (50, 2.0, 3, "Time: about 1:40 for 50 trials of 400 env steps, if each takes as long as the first 3 (2.0 s "
         "each)."),
        (50, 6.0, 1, "Time: about 5:00 for 50 trials of 400 env steps, if each takes as long as the first (6.0 s "
         "each)."),
        # the rest is over at once
        (4, 2.0, None, ""),
        (3, 1.0, None, ""),
    ],
)  # fmt: skip
def test_the_time_of_short_runs_is_shown_once_some_of_them_have_ended(
    count: int, run_s: float, ended: int | None, line: str
) -> None:
    watch = Watched(SeveralRuns(count, 400, "trial"))
    shown_after = None
    for run in range(1, count + 1):
        start = watch.now
        watch.start(start)
        watch.iterate(start + run_s / 2, 400.0)
        watch.end(start + run_s)
        if watch.shown and shown_after is None:
            shown_after = run
    assert watch.shown == ([line] if line else [])
    assert shown_after == ended


@executes("tools/whole_time.py: Lower --total-timesteps ({} now) for less.")
def test_runs_at_once_share_the_time_and_short_ones_need_no_advice() -> None:
    runs = SeveralRuns(5, 10_000, "trial", at_once=2, some_stop_early=True)
    assert runs.time_line(1000.0) == (
        "Time: at most about 0:30 for 5 trials of 10,000 env steps, if each is as fast as the current one so far "
        "(1,000 steps/s)."
    )
    assert "Lower --total-timesteps" in replace(runs, steps=10_000_000).time_line(1000.0)


@pytest.mark.parametrize(
    ("iteration", "speed", "is_known", "is_shown"),
    [(1, 100.0, False, False), (2, 100.0, True, True), (2, 1e6, True, False)],
)
def test_seeds_show_the_time_of_all_if_it_is_long(
    iteration: int,
    speed: float,
    is_known: bool,
    is_shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"iteration": iteration, "charts/SPS": speed}
    monkeypatch.setattr(seeds, "last_row", lambda folder: row)
    console = Console(file=io.StringIO(), width=200)
    running: Any = [SimpleNamespace(folder=tmp_path)]
    assert seeds._show_time(SeveralRuns(3, 10_000), running, console) == is_known
    assert ("Time: about 5:00 for 3 runs" in console.file.getvalue()) == is_shown  # type: ignore[attr-defined]
