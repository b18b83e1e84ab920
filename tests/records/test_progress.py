"""Displays show true figures, fit the terminal, leave it clean, and never disturb training."""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import finished, make_config
from processes import wait_until
from rich.console import Console

import dppo
from dppo.config import Config
from dppo.ppo.exchange.records import CollectionProgress, Episode
from dppo.records.closing_lines import closing_lines
from dppo.records.observer import Display, RunInfo
from dppo.records.terminal import plain as plain_lines
from dppo.records.terminal import view as views
from dppo.records.terminal.figures import duration, number, sparkline
from dppo.records.terminal.panel import LivePanel, cells_of, draw
from dppo.records.terminal.plain import PlainLines, make_display, plain_line
from dppo.records.terminal.view import View

logger = logging.getLogger("dppo")
HIDE = "\x1b[?25l"
SHOW = "\x1b[?25h"


def row(iteration: int = 48) -> dict[str, float]:
    return {
        "iteration": iteration,
        "global_step": 256 * iteration,
        "actors/alive": 8,
        "charts/episodes": 321,
        "charts/recent_episodes": 100,
        "charts/episodic_return": 34.2,
        "charts/episodic_length": 35,
        "charts/SPS": 12345.6,
        "charts/SPS_iteration": 11000.0,
        "losses/policy_loss": -0.0123,
        "losses/value_loss": 12.3,
        "losses/entropy": 0.68,
        "losses/approx_kl": 0.0041,
        "losses/clipfrac": 0.11,
        "losses/explained_variance": 0.83,
        "perf/env_frac": 0.31,
        "perf/act_frac": 0.12,
        "perf/wait_frac": 0,
        "perf/transfer_frac": 0.01,
        "perf/update_frac": 0.52,
        "perf/other_frac": 0.04,
        "perf/iteration_s": 0.02,
    }


def about(total_steps: int, *lines: str, **changes: Any) -> RunInfo:
    config = Config(**{"env_id": "CartPole-v1", "num_steps": 64, "num_samplers": 1, **changes})
    return RunInfo(config, Path("run"), "title", lines, total_steps, None)


def started(*lines: str, total_steps: int = 1000, stream: Any = None) -> tuple[LivePanel, Any]:
    """Return a panel of a run that has begun, and what it writes to."""
    stream = stream or Terminal()
    live = LivePanel(stream)
    live.on_start(about(total_steps, *lines))
    return live, stream


def finish(display: Display, error: Exception | None = None) -> None:
    display.on_end(None if error else finished(bottleneck="Bottleneck: the learner."), error)
    display.on_end(None, None)  # twice, as after an error while it ends


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A closed terminal, or a pipe without a reader."""

    def write(self, text: str = "") -> int:
        raise BrokenPipeError("gone")

    flush = write  # type: ignore[assignment]


class Clock:
    """The time for displays and views."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (plain_lines, views):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "CI NO_COLOR FORCE_COLOR COLUMNS LINES TTY_COMPATIBLE TTY_INTERACTIVE"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_the_commands_at_the_end_are_not_broken_into_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a broken command runs only its first line."""
    monkeypatch.setenv("COLUMNS", "30")
    live, stream = started()
    finish(live)
    lines = stream.getvalue().splitlines()
    assert any("dppo eval run, or dppo report run" in line for line in lines), lines[-9:]


@pytest.mark.parametrize(
    ("variables", "stream", "kind"),
    [
        ({}, Terminal(), LivePanel),
        ({}, io.StringIO(), PlainLines),
        ({"CI": "true"}, Terminal(), PlainLines),
        ({"TERM": "dumb"}, Terminal(), PlainLines),
    ],
)
def test_auto_is_live_on_a_terminal_and_plain_elsewhere(
    variables: dict[str, str], stream: Any, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert isinstance(make_display("auto", stream), kind)


@pytest.mark.parametrize("end", [lambda live: live.on_start(about(1000)), finish])
def test_what_a_run_waits_for_is_erased_when_it_starts_or_ends(
    end: Callable[[LivePanel], None],
) -> None:
    live = LivePanel(stream := Terminal())
    live.prepare("Starting 8 Ray actors ...")
    assert "Starting 8 Ray actors ..." in stream.getvalue()
    end(live)
    after = stream.getvalue().rpartition("Starting 8 Ray actors ...")[2]
    assert "\x1b[2K" in after, "the line is erased"
    live.on_end(None, None)


@pytest.mark.parametrize(("quiet", "kind"), [("plain", PlainLines), ("off", Display)])
def test_other_displays_do_not_say_what_a_short_start_waits_for(
    quiet: Any, kind: type[Display]
) -> None:
    shown = make_display(quiet, stream := Terminal())
    shown.prepare("Creating CartPole-v1 ...")
    assert (type(shown), stream.getvalue()) == (kind, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", None])
def test_a_terminal_without_unicode_gets_plain_lines(
    encoding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Terminal, "encoding", encoding)
    assert isinstance(make_display("auto", stream := Terminal()), PlainLines)
    assert stream.getvalue() == ""
    assert isinstance(make_display("live", stream), PlainLines)
    assert "progress=live needs a terminal" in stream.getvalue()


def test_a_stream_may_have_no_more_than_write_and_flush() -> None:
    """Such as one that copies standard output to a file."""
    text: list[str] = []
    stream: Any = SimpleNamespace(write=text.append, flush=int, encoding="utf-8")
    for mode in ("live", "auto"):
        display = make_display(mode, stream)
        assert isinstance(display, PlainLines)
    display.note("hello")

    assert "  note: hello\n" in "".join(text)


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (row() | {"perf/other_frac": 0.2}, "update 52% other 20%   left"),
        ({"global_step": 256}, "return       - (no episode of the policy yet)"),
        ({"global_step": 0, "charts/SPS": 0.0}, "left -"),
    ],
)
def test_a_plain_line_shows_progress_return_speed_and_time_split(
    figures: dict[str, float], text: str
) -> None:
    paces = deque([1 / row()["charts/SPS"]] * 2)
    line = plain_line(View(total_steps=500_000, row=row(), paces=paces))
    assert line == (
        " 12,288 / 500,000   2%   return    34.2 (100 episodes)   12,346 steps/s   kl 0.004   "
        "env 31% act 12% wait 0% transfer 1% update 52%   left 0:39"
    )
    assert text in plain_line(View(total_steps=1000, row=figures))


def controlled(*returns: float) -> View:
    """Return a view after one of two iterations of a controller, with these returns."""
    view = View()
    view.start(about(64 * 8, prior="json:dumps", prior_steps=2 * 64, algo="sac"))
    for episode_return in returns:
        view.add_episode(Episode(0, 0, episode_return, 200, None, explored=True))
    view.add_row({"iteration": 1, "global_step": 64, "losses/q_mean": math.nan})
    return view


@pytest.mark.parametrize(
    ("returns", "in_line", "in_panel"),
    [
        ((), "controller acts, no episode yet   ", "the controller acts, no episode yet"),
        (
            (-3, -5),
            "controller acts, return -4.00 (2 episodes)",
            "-4.00 the controller acts, 2 episodes",
        ),
    ],
)
def test_while_a_controller_acts_its_returns_are_shown(
    returns: tuple[float, ...], in_line: str, in_panel: str
) -> None:
    view = controlled(*returns)
    line = plain_line(view)
    assert in_line in line
    assert "Q" not in line, "the critics have no value of the policy yet"
    panel = " ".join(text_at(100, view).split())
    assert in_panel in panel
    assert "Q" not in panel

    view.add_row({"iteration": 3, "global_step": 3 * 64})
    view.add_episode(Episode(0, 0, -1000, 200, None, explored=True))
    assert view.controller.episodes == len(returns), "begun by the controller, ended by the policy"
    assert "return       - (no episode of the policy yet)" in plain_line(view)
    assert "no episode of the policy yet" in text_at(100, view)


@pytest.mark.parametrize(
    ("settings", "name"), [({}, "scaled Q"), ({"norm_reward": False}, "Q value")]
)
def test_values_of_scaled_rewards_are_named_so(settings: dict[str, Any], name: str) -> None:
    view = View()
    view.start(about(64 * 8, algo="sac", **settings))
    view.add_row(row() | {"losses/q_mean": -2.5})
    assert f"   {name} -2.50   " in plain_line(view)
    assert f"{name} -2.50" in " ".join(text_at(100, view).split())


def test_progress_within_an_iteration_names_the_controller(clock: Clock) -> None:
    plain = PlainLines(stream := io.StringIO())
    plain.on_start(about(64 * 8, prior="json:dumps", prior_steps=64))
    for iteration in (1, 2):
        clock.now += 100
        plain.on_progress(CollectionProgress(iteration, 32, 64 * iteration - 32, 1, 50.0))
    first, second = stream.getvalue().splitlines()[-2:]
    assert "iteration 1 (controller): 32 of 64 steps" in first
    assert "iteration 2: 32 of 64 steps" in second


@pytest.mark.parametrize("error", [None, RuntimeError("x")])
def test_first_and_last_iteration_are_always_printed(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_lines, "PLAIN_S", 1000.0)
    plain = PlainLines(stream := io.StringIO())
    plain.on_start(about(256 * 100, "first", "second"))
    for iteration in range(1, 101):
        plain.on_iteration(row(iteration))
    finish(plain, error)

    begins = "title|  first|  second|     256|  25,600"
    if error is None:
        begins += "|Done aft|Mean ret|Checkpoi|Weights:|Bottlene|Next: dp"

    assert [line[:8] for line in stream.getvalue().splitlines()] == begins.split("|")


def test_the_last_iteration_has_one_line_although_several_evaluations_end_with_it(
    clock: Clock,
) -> None:
    plain = PlainLines(stream := io.StringIO())
    plain.on_start(about(64 * 2, total_timesteps=64 * 2))
    for iteration, evaluated in ((1, 0), (2, 0), (2, 64), (2, 128)):
        clock.now += 100
        a_row: dict[str, float] = {"iteration": iteration, "global_step": 64 * iteration}
        evaluation = {"eval/episodes": 5, "eval/global_step": evaluated, "eval/episodic_return": 1}
        plain.on_iteration(a_row | evaluation)
    plain.on_end(None, None)
    first, last = stream.getvalue().splitlines()[1:]
    assert "   64 / 128" in first
    assert "eval 1.00 after 128 steps" in last


def test_iterations_in_between_are_printed_every_two_seconds(clock: Clock) -> None:
    plain = PlainLines(stream := io.StringIO())
    for iteration in range(1, 12):
        clock.now = 100 + 0.5 * iteration
        plain.on_iteration(row(iteration))

    steps = [line.split("/")[0].strip() for line in stream.getvalue().splitlines()]
    assert steps == ["256", "1,280", "2,304"]


def test_letters_that_the_terminal_does_not_have_are_replaced() -> None:
    raw = io.BytesIO()
    plain = PlainLines(io.TextIOWrapper(raw, encoding="ascii"))
    plain.note("Umgebung fällt aus: 环境")
    assert raw.getvalue() == b"  note: Umgebung f?llt aus: ??\n"
    assert plain_line(View(total_steps=10**6, row=row())).isascii()


def reports(
    iteration: int, steps: int, step_s: float, processes: int = 1
) -> list[CollectionProgress]:
    """Return the reports while `processes` make one env step every `step_s`, in batches of 64."""
    before = 64 * (iteration - 1)
    return [
        CollectionProgress(iteration, n, before + n, processes, 0.25 + step_s * n / processes)
        for n in range(processes, steps + 1, processes)
    ]


def test_within_an_iteration_lines_show_steps_speed_and_time_left_less_and_less_often(
    clock: Clock,
) -> None:
    plain = PlainLines(stream := io.StringIO())
    plain.on_start(about(640))
    for report in (*reports(1, 63, 1.0), *reports(2, 63, 1.0)):
        clock.now = 64 * (report.iteration - 1) + report.elapsed_s
        plain.on_progress(report)
        plain.on_progress(report)  # nothing new: nothing is printed
    first, second, *later = (line.strip() for line in stream.getvalue().splitlines()[1:])
    assert first == "1 / 640   0%   iteration 1: 1 of 64 steps", "the speed is not known yet"

    progress = "3 / 640   0%   iteration 1: 3 of 64 steps"

    assert second == f"{progress}   1,000 ms per env step   left 10:37"
    assert [int(line.split("/")[0]) for line in later] == [7, 15, 31, 63, 64 + 59]


def test_the_step_time_is_that_of_one_process_and_is_measured_anew_after_a_loss() -> None:
    pace = View()
    assert math.isnan(pace.steps_per_s)
    assert math.isnan(pace.step_ms)

    its_actors_are_lost = CollectionProgress(3, 4, 132, 0, 0.1)
    pace.add_progress(its_actors_are_lost)
    assert math.isnan(pace.left_s(1.0))

    pace = View()
    for report in reports(3, 32, 0.5, processes=4):
        assert pace.add_progress(report)
        assert not pace.add_progress(report)
    assert pace.steps_per_s == pytest.approx(8)
    assert pace.step_ms == pytest.approx(500)

    # the steps are lost with their actor
    for steps, elapsed_s in ((0, 3.0), (0, 4.0), (10, 5.0)):
        pace.add_progress(CollectionProgress(3, steps, 128 + steps, 2, elapsed_s))
        assert math.isnan(pace.steps_per_s)
    assert pace.add_progress(CollectionProgress(3, 14, 142, 2, 6.0))
    assert pace.steps_per_s == pytest.approx(4)


def test_the_panel_shows_the_first_iteration_from_its_first_env_step_on(clock: Clock) -> None:
    clock.now = 50.0
    live, _ = started(total_steps=64 * 10)
    for report in reports(1, 16, 0.5, processes=2):
        live.on_progress(report)
    live.on_end(None, None)
    view = live.view
    view.batch_size = 64
    view.finished = False

    def assert_shown(seconds: float, *figures: str) -> None:
        text = text_at(100, view, now=clock.now + seconds)
        for figure in figures:
            assert figure in text

    speed = ("16 / 640", "4.00 steps/s", "env step 500.0 ms")
    assert_shown(6.0, *speed, "iteration 1: 16 of 64 steps", "left 2:30")

    view.row = row() | {"iteration": 1, "global_step": 64, "perf/iteration_s": 16.0}
    view.row_at = clock.now
    assert_shown(0.0, "iteration 1 ")  # it is over

    first, *_ = reports(2, 2, 0.5, processes=2)
    live.on_progress(first)
    assert_shown(1.0, "66 / 640", "iteration 2: 2 of 64 steps")


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize(
    ("waited_s", "apart_s", "step_s", "update_s"),
    [(40, 0.1, 1, 0), (40, 0.1, 0.01, 1), (3, 0.1, 0.2, 20), (40, 8, 1, 0)],
)
def test_the_time_left_is_right_within_a_factor_of_two_or_not_shown(
    processes: int, waited_s: float, apart_s: float, step_s: float, update_s: float, clock: Clock
) -> None:
    """The first process makes its first env step after `waited_s`, each other one `apart_s` later than the last."""
    view = View()
    batch = 64 * processes
    view.start(about(10 * batch, num_samplers=processes))
    collect_s = 64 * step_s
    starts_s = waited_s + apart_s * np.arange(processes)
    first_s = starts_s[-1] + collect_s
    end = first_s + update_s + 9 * (collect_s + update_s)
    shown = 0

    def check() -> bool:
        left = view.left_s(clock.now)
        true = max(0.0, end - clock.now)
        assert math.isnan(left) or true / 2 <= left <= 2 * true
        return not math.isnan(left)

    def progress_after(seconds: float, iteration: int) -> CollectionProgress:
        each = np.clip((seconds - starts_s) / step_s, 0, 64).astype(int)
        working = sum(each < 64)
        steps = int(each.sum())
        before = batch * (iteration - 1)
        starting = sum(each == 0)
        return CollectionProgress(iteration, steps, before + steps, working, seconds, starting)

    for iteration in range(1, 11):
        began = clock.now
        is_update_known = iteration > 1 or update_s < collect_s
        for second in range(1, int(first_s)):
            clock.now = began + second
            view.add_progress(progress_after(second, iteration))
            if is_update_known:
                shown += check()
            if not math.isnan(view.step_ms):
                assert view.step_ms == pytest.approx(1e3 * step_s, rel=0.2)
        clock.now = began + first_s + update_s
        starts_s = np.zeros(processes)
        first_s = collect_s
        row = {"iteration": iteration, "global_step": batch * iteration, "perf/update_s": update_s}
        view.add_row(row)
        check()
        if iteration > 1:  # the next one may be late
            later_s = (9 - iteration) * (collect_s + update_s)
            assert view.left_s(clock.now + 1000) >= later_s / 2

    assert shown or collect_s < 4


@pytest.mark.parametrize("stalled", [2, 3, 5, 20])
def test_a_stall_leaves_the_time_left_as_it_is_and_repeated_evaluations_count(
    stalled: int, clock: Clock
) -> None:
    view = View()
    view.start(about(64 * 40))
    for iteration in range(1, 41):
        clock.now += 500.0 if iteration == stalled else 1.0
        if iteration % 5 == 0:
            clock.now += 10.0
        view.add_row({"iteration": iteration, "global_step": 64 * iteration})
        true = 3.0 * (40 - iteration)
        if iteration > 1:
            assert true / 3 <= view.left_s(clock.now) <= true * 3
        if iteration > 15:
            assert view.left_s(clock.now) == pytest.approx(true, rel=0.3)


def test_the_time_left_includes_evaluations_that_end_after_the_training(clock: Clock) -> None:
    view = View()
    view.start(about(64 * 4))
    for iteration in range(1, 5):
        clock.now += 1.0
        view.add_row(
            {"iteration": iteration, "global_step": 64 * iteration, "time/eval_left_s": 60.0}
        )
    assert view.left(clock.now + 10.0) == "0:50"
    assert view.left(clock.now + 70.0) == "0:00"


def test_a_slow_second_iteration_counts_no_more_than_the_first(clock: Clock) -> None:
    view = View()
    view.start(about(64 * 4))
    clock.now += 64.0
    view.add_row({"iteration": 1, "global_step": 64})
    for report in reports(2, 8, 10.0):
        view.add_progress(report)
    assert view.left_s(clock.now) == pytest.approx(3 * 64.0)


@pytest.mark.parametrize(
    "changes", [{"algo": "sac"}, {"prior": "worlds.plants:wide", "prior_steps": 256}], ids=str
)
def test_before_the_policy_learns_the_time_left_is_a_lower_bound(
    changes: dict[str, Any], clock: Clock
) -> None:
    view = View()
    view.start(about(64 * 20, **changes))
    for iteration in range(1, 21):
        learns = iteration > 4
        for report in reports(iteration, 64, 0.01):
            view.add_progress(report)
            if not learns:
                bound = view.left(clock.now)
                assert bound == "-" or bound.startswith("at least 0:")
        clock.now += 5.0 if learns else 0.64
        view.add_row(
            {
                "iteration": iteration,
                "global_step": 64 * iteration,
                "losses/gradient_steps": 64.0 * (learns or "prior" in changes),
                "perf/update_s": 4.36 * learns,
            }
        )
        if learns:
            assert view.left_s(clock.now) == pytest.approx(5.0 * (20 - iteration), rel=0.1)
        else:
            assert view.left_s(clock.now) == pytest.approx(0.64 * (20 - iteration), rel=0.3)
            assert view.left(clock.now).startswith("at least ")


def test_while_actors_start_a_line_says_how_many_are_ready_and_have_environments(
    clock: Clock,
) -> None:
    stream = io.StringIO()
    plain = PlainLines(stream)
    plain.prepare("Starting 8 Ray actors ...")
    assert stream.getvalue() == "Starting 8 Ray actors ...\n"

    plain.on_start(about(5120, num_actors=8, num_samplers=8))
    for second, ready in ((1, 1), (2, 2), (3, 4), (6, 8)):
        clock.now = second
        plain.on_progress(CollectionProgress(1, 0, 0, ready, second, environments=second - 1))
    clock.now = 20
    plain.on_progress(CollectionProgress(1, 9, 9, 8, 20, environments=7))
    clock.now = 40
    plain.on_progress(CollectionProgress(1, 9, 9, 8, 40, environments=8))
    plain.on_end(None, None)
    lines = stream.getvalue().splitlines()[2:]
    assert [line.partition("1: ")[2] for line in lines] == [
        "1 of 8 actors at work, 1 s, no env step yet",
        "4 of 8 actors at work, 2 of 8 environments made, 3 s, no env step yet",
        "9 of 512 steps   7 of 8 environments made",
        "9 of 512 steps",
    ]


@pytest.mark.parametrize(
    ("num_actors", "where"), [(0, ""), (8, "1 of 8 actors at work, ")], ids=["in process", "actors"]
)
def test_a_run_in_this_process_has_no_actors_to_count(
    num_actors: int, where: str, clock: Clock
) -> None:
    stream = io.StringIO()
    plain = PlainLines(stream)
    plain.on_start(about(5120, num_actors=num_actors, num_samplers=8))
    clock.now = 3
    progress = CollectionProgress(1, 0, 0, 1, 3, environments=5)
    plain.on_progress(progress)
    plain.on_end(None, None)
    text = f"iteration 1: {where}5 of 8 environments made, 3 s, no env step yet"
    assert text in stream.getvalue()

    terminal = Terminal()
    live = LivePanel(terminal)
    live.on_start(about(5120, num_actors=num_actors, num_samplers=8))
    live.on_progress(progress)
    live._live.refresh()
    assert ("at work" in terminal.getvalue()) == (num_actors > 0)
    assert "5 of 8 made" in terminal.getvalue()
    live.on_end(None, None)


def test_a_terminal_that_becomes_narrower_is_cleared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "width", 100)
    live, terminal = started()
    for columns, clears in ((100, 0), (60, 1), (60, 1), (90, 1)):
        monkeypatch.setattr(Console, "width", columns)
        live._live.refresh()
        assert terminal.getvalue().count("\x1b[2J\x1b[H") == clears
    live.on_end(None, None)


@pytest.mark.parametrize("stream", [Terminal, Gone])
@pytest.mark.parametrize("mode", ["live", "plain", "off"])
def test_neither_a_closed_terminal_nor_the_order_of_calls_stops_training(
    mode: Any, stream: type[Terminal]
) -> None:
    display = make_display(mode, stream())
    display.on_iteration({})
    display.on_end(None, None)

    display.on_start(about(10_000, "line"))
    display.on_progress(CollectionProgress(1, 3, 3, 1, 2.0))
    display.on_iteration({"iteration": 1, "global_step": 256})
    figures = {"charts/episodic_return": math.nan, "charts/SPS": math.inf}
    display.on_iteration(row(2) | figures)
    logger.warning("a note")
    finish(display)
    display.on_iteration(row())
    finish(display)
    if isinstance(display, LivePanel | PlainLines):
        display.note("after the end")


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_log_records_are_shown_during_the_run_only_and_once(mode: Any) -> None:
    stream = Terminal()
    before = (logger.level, list(logger.handlers))

    for turn in ("first", "second"):
        display = make_display(mode, stream)
        logger.warning("before")
        display.on_start(about(1000))
        logger.warning("during the %s", turn)
        logger.info("information")
        logger.debug("too much")
        display.on_end(None, None)
        logger.warning("after")
        assert (logger.level, logger.handlers) == before

    text = stream.getvalue()
    first, second = (text.count(f"during the {turn}") for turn in ("first", "second"))

    assert first == second, "a run does not show the records of another one"
    assert mode == "live" or first == 1
    assert text.count("information") >= 2
    assert not re.search("before|after|too much", text)


def test_logging_of_the_user_gets_all_records_and_keeps_its_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "dppo")
    shown = PlainLines(stream := io.StringIO())
    shown.on_start(about(1000))
    logger.warning("not wanted")
    logger.error("wanted")
    shown.on_end(None, None)

    assert caplog.messages == ["wanted"]
    assert "not wanted" not in stream.getvalue()
    assert logger.level == logging.ERROR


def test_without_a_run_nothing_is_printed_to_the_terminal() -> None:
    """Without a handler, `logging` writes warnings to the standard error."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class Watched(Terminal):
    """Remembers which threads have written."""

    writers: frozenset[int] = frozenset()

    def write(self, text: str) -> int:
        self.writers |= {threading.get_ident()}
        return super().write(text)


def test_the_panel_is_drawn_by_its_own_thread_while_training_runs() -> None:
    live, stream = started(stream=Watched())
    stream.writers = frozenset()
    for iteration in range(500):
        live.on_iteration(row(iteration))
    written = stream.writers
    live.on_end(None, None)

    assert threading.get_ident() not in written


def text_at(width: int, view: View, now: float = 12.0, colours: bool = True) -> str:
    console = Console(
        width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(draw(view, width, now, colours=colours))
    return console.export_text()


def view_of(figures: dict[str, float]) -> View:
    view = View(title="dppo: PPO", total_steps=500_000, called_at=2.0, row=figures, row_at=11.0)
    view.batch_size = 256
    view.paces.extend([1 / figures["charts/SPS"]] * 2)
    view.returns.extend(range(100))
    return view


NARROW = "left 0:39|elapsed 0:10|length 35.0|now 11,000|expl_var 0.830|clipfrac 0.110"
"""What the panel shows at any width."""
FIGURES = (
    f"{NARROW}|12,288 / 500,000 2%|34.2|success 43%|last 100 of 321 episodes|12,346 steps/s"
    "|actors 8|2 x actor_lost|policy -0.012|value 12.3|entropy 0.680|kl 0.004"
    "|env 31%|act 12%|wait 0%|transfer 1%|update 52%|other 4%"
)


@pytest.mark.parametrize("colours", [True, False])
def test_the_panel_fits_any_terminal_and_splits_no_figure(colours: bool) -> None:
    view = view_of(row() | {"incidents/actor_lost": 2, "charts/success_rate": 0.43})
    for width in (*range(36, 60), *range(60, 120, 4), 160):
        lines = text_at(width, view, colours=colours).splitlines()
        assert {len(line) for line in lines} == {width}
        words = [" ".join(line.split()) for line in lines]
        text = "\n".join(words)
        figures = FIGURES if width >= 40 else NARROW
        for figure in figures.split("|"):
            assert figure in text, f"missing or split at {width}"
        assert re.search("▁.*█", text), "the history of the return"


@pytest.mark.parametrize("width", [44, 60, 68, 72, 80, 100])
def test_the_history_beside_the_return_is_wide_enough_to_show_its_shape(width: int) -> None:
    assert re.search("34.2  [▁▂▃▄▅▆▇█]{16,} ", text_at(width, view_of(row())))


def test_the_panel_before_the_first_step_with_an_almost_empty_row_and_after_a_long_silence() -> (
    None
):
    waiting = text_at(100, View(title="t"), 75.0)
    assert "waiting for the first env steps" in waiting
    assert "elapsed 1:15" in waiting

    almost_empty = View(title="t", total_steps=100, row={"iteration": 1, "global_step": 256})
    first = text_at(100, almost_empty)
    assert "no episode of the policy yet" in first
    assert "100%" in first
    view = View(total_steps=8192, batch_size=512, row={"iteration": 8, "global_step": 3000})
    text = text_at(100, view)
    assert "3,000 / 7,096   42%" in text, "agents had left in 1,096 rows"
    view.row = {"iteration": 16, "global_step": 8190}
    assert "8,190 / 8,190  100%" in text_at(100, view), "faults have cost two steps"
    assert plain_line(view).startswith("8,190 / 8,190 100%")
    assert "nothing new" not in text_at(100, view_of(row()), 15.0)
    assert "nothing new for 1:40" in text_at(100, view_of(row()), 111.0)

    slow = view_of(row() | {"perf/iteration_s": 60.0})
    assert "nothing new for 1:40" in text_at(100, slow, 111.0), "the last iteration had a stall"
    slow.paces.clear()
    assert "nothing new" not in text_at(100, slow, 111.0), "usual for this simulator"


def test_without_colours_the_bar_is_drawn_with_letters() -> None:
    text = text_at(100, view_of(row()), colours=False)
    bar = re.search("e{9,}.*u", text)
    assert bar is not None
    assert re.search("━·{9,}", text), "the bar of steps is not full"
    room = 100 - 4 - 10
    for letter, share in (("u", 0.52), ("e", 0.31)):
        assert abs(bar[0].count(letter) - share * room) <= 1


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_is_honoured(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    live, stream = started()
    live.on_iteration(row())
    live.on_end(None, None)
    assert ("eeee" in stream.getvalue()) is no_color


def test_a_bar_is_always_full_and_in_proportion() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        shares = rng.dirichlet(np.ones(6)).tolist()
        width = int(rng.integers(10, 100))
        cells = cells_of(shares, width)
        assert sum(cells) == width
        assert all(abs(cell - width * part) < 1 for cell, part in zip(cells, shares, strict=True))

    assert cells_of([0.0, 0.0], 10) == [0, 0]
    assert cells_of([0.26, 0.74], 10) == [3, 7], "the larger remainder gets the cell"


@pytest.mark.parametrize("length", [2, 7, 511, 5000])
def test_a_history_of_any_length_keeps_its_shape(length: int) -> None:
    line = sparkline(range(length), 24)
    assert len(line) == min(24, length)
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


def test_a_history_may_be_empty_or_flat() -> None:
    assert sparkline([], 10) == ""
    assert set(sparkline([5.0] * 100, 10)) == {"▁"}


@pytest.mark.parametrize("error", [None, RuntimeError("x")])
def test_the_panel_is_redrawn_loses_no_note_and_restores_the_terminal(
    error: Exception | None,
) -> None:
    threads = threading.active_count()
    stdout = sys.stdout
    live, stream = started("a line with [brackets]")
    live.on_iteration(row())
    wait_until(lambda: "12,288" in stream.getvalue())
    notes = [f"<note {i}>" for i in range(100)]
    with ThreadPoolExecutor(5) as writers:  # notes may come from any thread
        list(writers.map(live.note, notes))
    live.on_end(None if error else finished(Path("folder [ok]")), error)
    live.on_end(None, None)

    text = stream.getvalue()
    expected = ["title", "a line with [brackets]", *notes]
    if error is None:
        expected.append("folder [ok]")
    assert [part for part in expected if part not in text] == []
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert sys.stdout is stdout
    wait_until(lambda: threading.active_count() <= threads)


def test_the_cursor_is_visible_after_ctrl_c() -> None:
    code = """
        import signal, time
        from pathlib import Path
        from dppo.config import Config
        from dppo.records.terminal.plain import make_display
        from dppo.records.observer import RunInfo
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        shown = make_display("auto")
        try:
            config = Config(env_id="CartPole-v1", num_samplers=1, num_steps=256)
            shown.on_start(RunInfo(config, Path("run"), "title", (), 1000, None))
            print("a print of the user's environment")
            while True:
                shown.on_iteration({"iteration": 1, "global_step": 256})
                time.sleep(0.01)
        finally:
            shown.on_end(None, None)
    """
    master, slave = pty.openpty()
    words = [sys.executable, "-c", textwrap.dedent(code)]
    variables = {"PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1", "COLUMNS": "70"}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, env=os.environ | variables
    )
    os.close(slave)
    text = ""
    interrupted = False
    with suppress(OSError):  # the other end is closed
        while select.select([master], [], [], 120)[0]:
            text += os.read(master, 65536).decode(errors="replace")
            if not interrupted and "/ 1,000" in text:
                process.send_signal(signal.SIGINT)
                interrupted = True
    os.close(master)
    process.kill()

    assert process.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in text
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert "a print of the user's environment" in text


def test_figures_have_a_sensible_number_of_digits() -> None:
    values = (0.0, 475.34, 12345.6, -0.0123, 0.00049, 3.14159, math.nan, None, math.inf, 3e-17)
    assert " ".join(map(number, values)) == "0 475.3 12,346 -0.012 4.9e-04 3.14 - - inf 3.0e-17"


def test_durations_are_shown_as_on_a_clock() -> None:
    seconds = (0, 62, 3599.9, 3661, 180_000, math.nan, math.inf)
    assert "|".join(map(duration, seconds)) == "0:00|1:02|59:59|1:01:01|2d 02:00:00|-|-"


def mean_return_line(noise: str, **changes: Any) -> str:
    settings = {"env_id": "E-v0", "algo": "sac", "noise": noise} | changes
    result = finished(config=make_config(settings))
    [line] = [line for line in closing_lines(result) if line.startswith("Mean return")]
    return line


def test_the_last_lines_say_which_episodes_are_left_out() -> None:
    fact = "Mean return of the last 100 episodes: 34.2"
    assert mean_return_line("white") == fact
    assert mean_return_line("white", eval_every=1000) == f"{fact}, with exploration noise"
    line = mean_return_line("wide")
    assert line.startswith(fact)
    assert line.endswith("without episodes of wide exploration")


def test_kinds_of_faults_that_have_no_line_are_named() -> None:
    """The same kind in several environments is one kind."""
    env_faults = {
        f"sampler {sampler}, env 0: {'LicenceError' if sampler == 7 else 'OSError'} in step": 1
        for sampler in range(9)
    }
    lines = closing_lines(finished(env_faults=env_faults))
    assert "  4 more: LicenceError in step, OSError in step" in lines


def test_the_first_of_the_last_lines_tells_the_steps_since_a_resume_from_all_steps() -> None:
    steps: dict[str, Any] = {"global_step": 6144, "iterations": 12, "episodes": 64, "wall_s": 25.9}
    # faults took steps from iterations, so that these have different numbers of steps
    since: dict[str, Any] = {"training_s": 20.0, "steps_per_s": 4010 / 20.0}
    first_line, *_ = closing_lines(finished(**steps, **since, resumed_at=4))
    start = (
        "Done after 6,144 steps and 64 episodes; the 4,010 steps since the resume took 25.9 s, of which training took "
        "20.0 s (200 steps/s)."
    )
    assert first_line == start
    first_line, *_ = closing_lines(finished(**steps, resumed_at=0))
    assert first_line.startswith(
        "Done after 6,144 steps and 64 episodes in 25.9 s, of which training"
    )


@pytest.mark.parametrize("is_stochastic", [False, True])
def test_the_next_command_evaluates_as_the_run_has_done(is_stochastic: bool) -> None:
    config = dppo.Config(env_id="CartPole-v1", eval_every=64, eval_stochastic=is_stochastic)
    *_, following = closing_lines(finished(config=config, env_name="CartPole-v1"))
    assert ("eval" in following, " --stochastic," in following) == (True, is_stochastic)
