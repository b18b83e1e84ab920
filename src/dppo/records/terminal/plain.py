"""Choose the display of a run: a live panel on a terminal, plain lines as in a log file, or nothing."""

import math
import os
import sys
import threading
import time
from typing import Literal, TextIO

from dppo.errors import counted
from dppo.ppo.exchange.records import CollectionProgress, Episode
from dppo.records.closing_lines import closing_lines
from dppo.records.differences import Difference
from dppo.records.metrics.reading import Row
from dppo.records.observer import Display, Result, RunInfo
from dppo.records.terminal.figures import number, share, signed, speed
from dppo.records.terminal.streams import PatientStream, ShowLog
from dppo.records.terminal.view import PHASES, View

PLAIN_S = 2.0  # shortest interval between two plain lines
FIRST_S = 1.0  # the interval between lines within an iteration doubles from this one ...
LAST_S = 60.0  # ... to this one
GAP = "   "


class PlainLines(Display):
    """Prints a line for the first and the last iteration, and between them every 2 s at most.

    During long iterations it prints their progress: after some seconds, then less and less often.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = PatientStream(stream)
        self._lock = threading.Lock()
        self._log = ShowLog(self.note)
        self._view = View()
        self._printed_at = -math.inf
        self._unprinted = False
        self._progress_s = FIRST_S
        self._last_iteration = 0

    def prepare(self, text: str) -> None:
        """Hold back notes until `on_start`; print `text` if actors are started, which takes seconds."""
        self._log.hold()
        if "actor" in text:
            self._print(text)

    def on_start(self, run: RunInfo) -> None:
        """Print the title and the first lines of the run."""
        self._view.start(run)
        self._last_iteration = run.config.iterations
        self._print(run.title, *(f"  {line}" for line in run.lines))
        self._log.start()

    def on_progress(self, progress: CollectionProgress) -> None:
        """Print the progress of a long iteration, if env steps have been made and the last line is old enough."""
        view = self._view
        moved = view.add_progress(progress)
        starting = not view.row and view.progress is None
        if (moved or starting) and time.monotonic() - self._printed_at >= self._progress_s:
            line = _starting_line(view, progress) if starting else _progress_line(view, progress)
            iteration = f"iteration {progress.iteration}"
            if progress.iteration <= view.prior_iterations:
                iteration += " (controller)"
            self._print(f"  {_steps(view.steps, view)}{GAP}{iteration}: {line}")
            self._printed_at = time.monotonic()
            self._progress_s = min(2 * self._progress_s, LAST_S)

    def on_episode(self, episode: Episode) -> None:
        """Count an episode of the controller."""
        self._view.add_episode(episode)

    def on_iteration(self, row: Row) -> None:
        """Print the row, unless the last one was printed less than 2 s ago, or more rows of its iteration may follow.

        The last iteration has a row for each evaluation that ends with it, of which `on_end` prints the last.
        """
        self._view.add_row(row)
        self._unprinted = True
        is_last = row.get("iteration") == self._last_iteration
        if time.monotonic() - self._printed_at >= PLAIN_S and not is_last:
            self._print_row()

    def note(self, text: str) -> None:
        """Print a note. From any thread."""
        self._print(f"  note: {text}")

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Print the last row and the result."""
        self._log.close(error)
        self._print_row()
        if result is not None:
            self._print(*closing_lines(result, error))

    def _print_row(self) -> None:
        if self._unprinted:
            self._unprinted = False
            self._print("  " + plain_line(self._view))
            self._printed_at = time.monotonic()

    def _print(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        encoding = getattr(self._stream, "encoding", None) or "utf8"
        with self._lock:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def plain_line(view: View) -> str:
    row = view.row
    parts = [_steps(row.get("global_step", 0), view), _returns(view)]
    if view.evaluation:
        parts.append(_evaluation(view.evaluation))
    parts += [
        f"{speed(row.get('charts/SPS'))} steps/s",
        _learning(view),
        _time_split(row),
        f"left {view.left(view.row_at)}",
    ]
    return GAP.join(filter(None, parts))


def _returns(view: View) -> str:
    """Return the mean return of the policy's last training episodes, or of the controller's while it acts."""
    episodes = int(view.row.get("charts/recent_episodes", 0))
    if episodes:
        mean_return = number(view.row.get("charts/episodic_return"))
        return f"return {mean_return:>7} ({counted(episodes, 'episode')})"
    if not view.controller_acts:
        return "return       - (no episode of the policy yet)"
    controller = view.controller
    if not controller.episodes:
        return "controller acts, no episode yet"
    mean_return = number(controller.mean_return)
    return f"controller acts, return {mean_return} ({counted(controller.episodes, 'episode')})"


def _evaluation(row: Row) -> str:
    """Return `eval -20.1 after 512 steps`; with a baseline also `baseline -26.7, difference +6.60 (95 % ...)`."""
    text = (
        f"eval {number(row.get('eval/episodic_return'))} after {row['eval/global_step']:,.0f} steps"
    )
    difference = Difference.from_row(row)
    if difference is None:
        return text
    text += f", baseline {number(row.get('eval/baseline_return'))}"
    text += f", difference {signed(difference.mean)}"
    if difference.interval:
        text += f" (95 % {difference.interval})"
    return text


def _learning(view: View) -> str:
    """Return how far the policy has moved, or the values that its critics estimate; "" while a controller acts."""
    row = view.row
    if view.controller_acts:
        return ""
    if "losses/q_mean" in row:
        return f"{view.q_name} {number(row['losses/q_mean'])}"
    return f"kl {number(row.get('losses/approx_kl'))}"


def _time_split(row: Row) -> str:
    shares = []
    for phase in PHASES:
        part = row.get(f"perf/{phase}_frac", 0.0)
        if phase != "other" or part >= 0.05:
            shares.append(f"{phase} {part:.0%}")
    return " ".join(shares)


def _starting_line(view: View, progress: CollectionProgress) -> str:
    who = f"{view.busy_processes} of {view.actors} actors at work, " if view.actors else ""
    if view.environments_made:
        who += f"{view.environments_made} environments made, "
    return f"{who}{progress.elapsed_s:.0f} s, no env step yet"


def _progress_line(view: View, progress: CollectionProgress) -> str:
    parts = [f"{progress.steps:,} of {view.batch_size:,} steps"]
    if not math.isnan(view.step_ms):
        parts.append(f"{number(view.step_ms)} ms per env step")
    time_left = view.left(view.moved_at)
    if time_left != "-":
        parts.append(f"left {time_left}")
    if view.environments_made:
        parts.append(f"{view.environments_made} environments made")
    return GAP.join(parts)


def _steps(steps: float, view: View) -> str:
    total = f"{view.expected_steps:,}"
    return f"{int(steps):{len(total)},} / {total} {share(steps, view.expected_steps):4.0%}"


def make_display(
    mode: Literal["auto", "live", "plain", "off"], stream: TextIO | None = None
) -> Display:
    """Return the display for `mode` on `stream` (default: standard output); auto is live on a terminal."""
    stream = stream or sys.stdout
    if mode == "off" or stream is None:  # a daemon may have no standard output
        return Display()
    wants_panel = mode == "live" or (mode == "auto" and not os.environ.get("CI"))
    if wants_panel and _can_draw(stream):
        from dppo.records.terminal.panel import LivePanel

        return LivePanel(stream)
    lines = PlainLines(stream)
    if mode == "live":
        lines.note(
            "progress=live needs a terminal that shows Unicode; printing plain lines instead."
        )
    return lines


def _can_draw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that shows Unicode and moves its cursor."""
    is_terminal = getattr(stream, "isatty", bool)()
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return (
        is_terminal and encoding == "utf8" and os.environ.get("TERM", "") not in ("dumb", "unknown")
    )
