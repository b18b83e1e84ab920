"""How long several runs take is estimated during the first one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import finished, tiny_run
from remedies import executes
from rich.console import Console

from dppo.tools import seeds
from dppo.tools.seeds import Seed
from dppo.tools.whole_time import SeveralRuns, WholeTime


class Watched:
    """The time of several runs, whose rows come from a test, and the lines that it shows."""

    def __init__(self, runs: SeveralRuns) -> None:
        self.shown: list[str] = []
        self._watch = WholeTime(runs, self.shown.append)

    def start(self) -> None:
        self._watch.on_start(Any)  # type: ignore[arg-type]

    def iterate(self, wall_s: float, global_step: float, **metrics: float) -> None:
        speed = global_step / wall_s
        row = {"time/wall_s": wall_s, "global_step": global_step, "charts/SPS": speed}
        self._watch.on_iteration(row | metrics)

    def end(self, wall_s: float) -> None:
        self._watch.on_end(finished(wall_s=wall_s), None)


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
    watch.start()
    for iteration, wall_s in enumerate([*seconds, 1000.0, 2000.0], start=1):
        watch.iterate(wall_s, 200.0 * iteration)
        assert len(watch.shown) == (iteration >= shown_at)
    assert watch.shown[0].startswith(line)


def test_iterations_before_the_first_update_are_no_part_of_the_speed() -> None:
    watch = Watched(SeveralRuns(4, 400))
    for iteration, wall_s in enumerate((40, 46, 52, 60), start=1):
        assert not watch.shown
        gradient_steps = 0.0 if iteration < 4 else 200.0
        watch.iterate(wall_s, 200.0 * iteration, **{"losses/gradient_steps": gradient_steps})
    assert "(25 steps/s)" in watch.shown[0]


def test_a_row_of_a_slower_run_that_has_made_no_more_steps_begins_the_estimate_again() -> None:
    """Of several seeds, one has failed, and the next has begun at the same time."""
    watch = Watched(SeveralRuns(4, 400))
    watch.iterate(3, 200.0)
    watch.iterate(9, 200.0)
    assert not watch.shown
    watch.iterate(19, 400.0)
    assert "(20 steps/s)" in watch.shown[0]


def test_a_run_that_was_too_short_for_an_estimate_is_no_part_of_that_of_the_next() -> None:
    watch = Watched(SeveralRuns(4, 400))
    # a search makes a run for each trial, from its first env step
    for iteration_s in (1, 1, 1, 5):
        assert not watch.shown
        watch.start()
        for iteration in (1, 2):
            watch.iterate(iteration_s * iteration, 200.0 * iteration)
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
        watch.start()
        watch.iterate(run_s / 2, 400.0)
        watch.end(run_s)
        if watch.shown and shown_after is None:
            shown_after = run
    assert watch.shown == ([line] if line else [])
    assert shown_after == ended


@executes("tools/whole_time.py: Lower --total-timesteps ({} now) for less.")
def test_runs_at_once_share_the_time_and_short_ones_need_no_advice() -> None:
    runs = SeveralRuns(5, 10_000, "trial", at_once=2, some_stop_early=True)
    assert runs.time_line(1000.0) == (
        "Time: about 0:30 for 5 trials of 10,000 env steps, if each is as fast as the current one so far "
        "(1,000 steps/s) and none stops early."
    )
    assert "Lower --total-timesteps" in replace(runs, steps=10_000_000).time_line(1000.0)


def test_seeds_show_the_time_of_all_also_where_the_first_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row before the resume is not the first row after it: its call had another clock.

    Once the last seed runs, its own line shows the time.
    """
    rows = [(20.0, 9000), (20.0, 9000), (2.0, 9200), (4.0, 9400), (12.0, 9840)]

    class Pretended(Seed):
        looks = 0

        def start(self) -> None:
            self.state = "running"

        def look(self, stopped: object) -> None:
            self.looks += self.state == "running"
            if self.looks > 1 and not rows:
                self.state = "done"

    def row_of(folder: Path) -> dict[str, float]:
        wall_s, global_step = rows.pop(0)
        return {"time/wall_s": wall_s, "global_step": global_step}

    monkeypatch.setattr(seeds, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(seeds, "last_row", row_of)
    monkeypatch.setattr(Pretended, "line", lambda self: "")
    runs = [
        Pretended(tiny_run(tmp_path, samplers=2, steps=64, iterations=5), tmp_path) for _ in "12"
    ]
    seeds._run(runs, 1, Console(soft_wrap=True))
    assert "Time: about 0:20 for 2 runs" in capsys.readouterr().out
