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
    now = [0.0]
    shown: list[str] = []
    watch = WholeTime(SeveralRuns(4, 250_000), shown.append, clock=lambda: now[0])
    watch.on_start(Any)  # type: ignore[arg-type]
    for iteration, now[0] in enumerate([*seconds, 1000.0, 2000.0], start=1):
        watch.on_iteration({"global_step": 200.0 * iteration})
        assert len(shown) == (iteration >= shown_at)
    assert shown[0].startswith(line)


def test_a_run_that_was_too_short_for_an_estimate_is_no_part_of_that_of_the_next() -> None:
    now = [0.0]
    shown: list[str] = []
    watch = WholeTime(SeveralRuns(4, 400), shown.append, clock=lambda: now[0])
    for start in (
        0.0,
        100.0,
        200.0,
    ):  # a search makes a run for each trial, from its first env step
        now[0] = start
        watch.on_start(Any)  # type: ignore[arg-type]
        for iteration in (1, 2):
            now[0] = start + iteration
            watch.on_iteration({"global_step": 200.0 * iteration})
    assert not shown
    now[0] = 300.0
    watch.on_start(Any)  # type: ignore[arg-type]
    for iteration in (1, 2):
        now[0] = 300.0 + 5 * iteration
        watch.on_iteration({"global_step": 200.0 * iteration})
    assert shown == [
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
    now = [0.0]
    shown: list[str] = []
    watch = WholeTime(SeveralRuns(count, 400, "trial"), shown.append, clock=lambda: now[0])
    shown_after = None
    for run in range(1, count + 1):
        watch.on_start(Any)  # type: ignore[arg-type]
        now[0] += run_s / 2
        watch.on_iteration({"global_step": 400.0})
        now[0] += run_s / 2
        watch.on_end(None, None)
        if shown and shown_after is None:
            shown_after = run
    assert shown == ([line] if line else [])
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
