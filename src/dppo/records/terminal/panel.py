"""The live panel: progress, returns, speed, losses and the shares of time, redrawn by a thread while training runs."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dppo.errors import counted
from dppo.ppo.exchange.records import CollectionProgress, Episode
from dppo.records.closing_lines import closing_lines
from dppo.records.differences import Difference
from dppo.records.metrics.reading import Row
from dppo.records.observer import Display, Result, RunInfo
from dppo.records.terminal.figures import (
    deviation,
    duration,
    number,
    share,
    signed,
    sparkline,
    speed,
)
from dppo.records.terminal.streams import PatientStream, ShowLog
from dppo.records.terminal.view import PHASES, View

REFRESH_HZ = 4.0
MAX_WIDTH = 110
LABEL_WIDTH = 10
COLOURS = {
    "env": "blue",
    "act": "cyan",
    "wait": "yellow",
    "transfer": "magenta",
    "update": "green",
    "other": "bright_black",
}
VERDICT_COLOURS = {"better": "green", "worse": "red", "not clearly different": "yellow"}
Q_MEAN = "q_mean"
LOSSES = {  # names and keys; a row has the keys of its algorithm
    "policy": "policy_loss",
    "value": "value_loss",
    "critic": "critic_loss",
    "Q value": Q_MEAN,
    "entropy": "entropy",
    "temp": "temperature",
    "std": "action_std",
    "kl": "approx_kl",
    "clipfrac": "clipfrac",
    "expl_var": "explained_variance",
}
GAP = 2  # columns between items
# columns of the bar of steps beside its figures; a narrower bar gets a line of its own
MIN_STEPS_BAR = 12
# columns of the curve of returns beside other items; a narrower curve shows little
MIN_RETURN_BARS = 16
MAX_RETURN_BARS = 40
MIN_SILENCE_S = 5.0
LATE = 5.0  # silence is shown after this many times the usual iteration


class LivePanel(Display):
    """Redraws a panel four times a second in a thread of its own; training only passes it the rows."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=cast(TextIO, PatientStream(stream)), highlight=False)
        self.view = View(called_at=time.monotonic())
        self._preparing = ExitStack()
        self._width = 0  # columns of the terminal when the panel was drawn last
        self._live = Live(
            console=self._console, get_renderable=self._draw, refresh_per_second=REFRESH_HZ
        )
        self._log = ShowLog(self.note)

    def prepare(self, text: str) -> None:
        """Show `text` with a spinner; `on_start` or `on_end` erases it."""
        self._log.hold()
        spinner = Spinner("dots", Text(text, style="dim"))
        live = Live(spinner, console=self._console, refresh_per_second=REFRESH_HZ, transient=True)
        self._preparing.enter_context(live)

    def on_start(self, run: RunInfo) -> None:
        """Print the first lines of the run, and draw the panel below them."""
        self._preparing.close()
        self.view.start(run)
        self._console.print(*(Padding.indent(Text(line, style="dim"), 2) for line in run.lines))
        self._live.start()
        self._log.start()

    def on_progress(self, progress: CollectionProgress) -> None:
        """Show the progress of a long iteration."""
        self.view.add_progress(progress)

    def on_episode(self, episode: Episode) -> None:
        """Count an episode of the controller."""
        self.view.add_episode(episode)

    def on_iteration(self, row: Row) -> None:
        """Show the row when the panel is drawn next."""
        self.view.add_row(row)

    def note(self, text: str) -> None:
        """Print a note above the panel. From any thread."""
        self._console.print(Text(f"  {time.strftime('%H:%M:%S')} {text}", style="yellow"))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Draw the panel for the last time, restore the terminal, and print the result."""
        self._preparing.close()
        self._log.close(error)
        self.view.finished = True
        self._live.stop()
        if result is not None:
            # commands and paths stay whole when they are copied
            self._console.print(Text("\n".join(closing_lines(result, error))), soft_wrap=True)

    def _draw(self) -> RenderableType:
        colours = self._console.color_system is not None and not self._console.no_color
        # the terminal has wrapped the lines of the panel, into any number
        if self._console.width < self._width:
            self._console.control(Control.clear(), Control.home())
            self._live._live_render._shape = None  # nothing to erase
        self._width = self._console.width
        width = min(MAX_WIDTH, self._width - 2)  # room for the ^C that the terminal echoes
        return draw(self.view, width, time.monotonic(), colours=colours)


def draw(view: View, width: int, now: float, *, colours: bool = True) -> RenderableType:
    room = width - LABEL_WIDTH - 4
    table = Table.grid(padding=0)
    table.add_column(width=LABEL_WIDTH, style="dim")
    table.add_column(width=room)
    for label, content in _lines(view, room, now, colours):
        table.add_row(label, content)
    title = Text(view.title, style="bold not dim")
    return Panel(table, title=title, title_align="left", border_style="dim", width=width)


def _lines(
    view: View, room: int, now: float, colours: bool
) -> Iterator[tuple[str, RenderableType]]:
    row = view.row
    if row or view.progress is not None:
        yield "steps", _steps(view, room, now, colours)
    else:
        yield "steps", _waiting(view, now)
    if row:
        yield "return", _returns(view, room)
        if view.evaluation:
            yield "eval", _evaluation(view.evaluation)
            if "eval/baseline_return" in view.evaluation:
                yield "baseline", _baseline(view.evaluation)
        yield "speed", _Flow(_speed(view, now))
        yield "losses", _Flow(list(_losses(view)))
        yield "time", _stacked_bar(row, room, colours)
    elif view.progress is not None:
        yield "speed", _Flow(_pace(view))
    incidents = [
        Text(f"{count:.0f} x {key.removeprefix('incidents/')}", "yellow")
        for key, count in row.items()
        if key.startswith("incidents/")
    ]
    if incidents:
        yield "incidents", _Flow(incidents)


def _waiting(view: View, now: float) -> RenderableType:
    items = [
        Text("waiting for the first env steps"),
        _item("elapsed", duration(now - view.called_at)),
    ]
    if view.busy_processes and view.actors:
        items.append(_item("actors", f"{view.busy_processes} of {view.actors} at work"))
    return _Flow([*items, *_environments(view)])


def _environments(view: View) -> list[Text]:
    if not view.environments_made:
        return []
    return [_item("environments", f"{view.environments_made} made")]


def _steps(view: View, room: int, now: float, colours: bool) -> RenderableType:
    done = share(view.steps, view.expected_steps)
    percent = math.floor(100 * done)
    total = f" / {view.expected_steps:,}  {percent:>3}%"
    figures = Text.assemble((f"{view.steps:,}", "bold"), total)
    times = []
    if not view.finished:
        times.append(_item("left", view.left(now)))
    times.append(_item("elapsed", duration(now - view.called_at)))
    width = _columns_left([figures, *times], room)
    if width >= MIN_STEPS_BAR:
        return _Flow([figures, _bar(done, width, colours), *times])
    return Group(_Flow([figures, *times]), _bar(done, room, colours))


def _bar(done: float, width: int, colours: bool) -> Text:
    cells = round(done * width)
    unfinished = "━" if colours else "·"  # without colours, a line would look full
    return Text.assemble(("━" * cells, "green"), (unfinished * (width - cells), "bright_black"))


def _pace(view: View) -> list[Text]:
    progress = view.current_progress
    if progress is None:
        return []
    items = []
    if not view.row:
        items.append(Text.assemble((speed(view.steps_per_s), "bold"), " steps/s"))
        items.append(_item("env step", f"{number(view.step_ms)} ms"))
    items.append(
        _item("iteration", f"{progress.iteration}: {progress.steps:,} of {view.batch_size:,} steps")
    )
    return items + _environments(view)


def _returns(view: View, room: int) -> RenderableType:
    row = view.row
    episodes = int(row.get("charts/episodes", 0))
    recent = int(row.get("charts/recent_episodes", 0))
    if not recent:
        return _controller_returns(view)
    mean = Text(number(row.get("charts/episodic_return")), style="bold")
    items = [_item("length", number(row.get("charts/episodic_length")))]
    if "charts/success_rate" in row:
        items.append(_item("success", f"{row['charts/success_rate']:.0%}"))
    items.append(Text(f"last {recent} of {episodes:,} episodes", style="dim"))
    width = _columns_left([mean, *items], room)
    if width < MIN_RETURN_BARS:  # the line below has room for the other items
        width = _columns_left([mean], room)
    bars = Text(sparkline(view.returns, min(MAX_RETURN_BARS, width)), style="green")
    return _Flow([mean, bars, *items])


def _controller_returns(view: View) -> RenderableType:
    """Return the mean return of the controller while it acts, as the policy has none yet."""
    if not view.controller_acts:
        return Text("no episode of the policy yet", style="dim")
    controller = view.controller
    if not controller.episodes:
        return Text("the controller acts, no episode yet", style="dim")
    mean = Text(number(controller.mean_return), style="bold")
    count = counted(controller.episodes, "episode")
    return _Flow([mean, Text(f"the controller acts, {count}", style="dim")])


def _evaluation(row: Row) -> RenderableType:
    mean = row.get("eval/episodic_return", math.nan)
    items = [
        Text(number(mean), style="bold"),
        _item("+-", deviation(row.get("eval/return_std", math.nan), mean)),
        _item("after", f"{row['eval/global_step']:,.0f} steps"),
        _item("length", number(row.get("eval/episodic_length"))),
        Text(counted(int(row["eval/episodes"]), "episode"), style="dim"),
    ]
    return _Flow(items)


def _baseline(row: Row) -> RenderableType:
    items = [Text(number(row["eval/baseline_return"]), style="bold")]
    difference = Difference.from_row(row)
    if difference is not None:
        items.append(_item("difference", signed(difference.mean)))
        if difference.interval:
            interval = (difference.interval, VERDICT_COLOURS[difference.verdict])
            items.append(Text.assemble(("95 % ", "dim"), interval))
        compared = f"{difference.episodes:.0f} pairs" if difference.paired else "unpaired"
        items.append(Text(compared, style="dim"))
    return _Flow(items)


def _speed(view: View, now: float) -> list[Text]:
    row = view.row
    items = [
        Text.assemble((speed(row.get("charts/SPS")), "bold"), " steps/s"),
        _item("now", speed(row.get("charts/SPS_iteration"))),
    ]
    items += _pace(view) or [_item("iteration", number(row.get("iteration"), digits=0))]
    for phase in ("collect", "update"):
        items.append(_item(phase, f"{number(row.get(f'perf/{phase}_s'))} s", 6))
    if row.get("actors/alive"):
        items.append(_item("actors", number(row["actors/alive"], digits=0)))
    silent_s = now - max(view.row_at, view.moved_at)
    usual_s = min(row.get("perf/iteration_s", 0.0), view.usual_s)
    if silent_s > max(MIN_SILENCE_S, LATE * usual_s) and not view.finished:
        items.append(Text(f"nothing new for {duration(silent_s)}", style="yellow"))
    return items


def _losses(view: View) -> Iterator[Text]:
    for name, key in LOSSES.items():
        is_known = key != Q_MEAN or not view.controller_acts
        if is_known and f"losses/{key}" in view.row:
            label = view.q_name if key == Q_MEAN else name
            yield _item(label, number(view.row[f"losses/{key}"]), 5)


def _stacked_bar(row: Row, room: int, colours: bool) -> RenderableType:
    """Return the shares of an iteration's time as a bar, in the phases' first letters without colours."""
    shares = [max(0.0, row.get(f"perf/{phase}_frac", 0.0)) for phase in PHASES]
    bar = Text()
    legend = []
    for phase, cells, part in zip(PHASES, cells_of(shares, room), shares, strict=True):
        glyph = "█" if colours else phase[0]
        bar.append(glyph * cells, style=COLOURS[phase])
        legend.append(Text.assemble((glyph, COLOURS[phase]), (f" {phase} ", "dim"), f"{part:3.0%}"))
    return Group(bar, _Flow(legend))


def cells_of(shares: Sequence[float], width: int) -> list[int]:
    """Return `width` cells divided by share; their edges are rounded, so that the bar is always full."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    edges = [0, *(round(width * part / total) for part in accumulate(shares))]
    return [end - start for start, end in pairwise(edges)]


def _item(name: str, value: str, width: int = 0) -> Text:
    """Return a name and its figure, padded so that the next item stays in place."""
    return Text.assemble((f"{name} ", "dim"), value.ljust(width))


def _columns_left(items: Sequence[Text], room: int) -> int:
    """Return the columns that are left for another item in a line with these items."""
    return room - sum(item.cell_len + GAP for item in items)


class _Flow:
    """Items side by side, in as many lines as necessary; an item is never split, unlike by `rich.columns`."""

    def __init__(self, items: Sequence[Text]) -> None:
        self._items = [item for item in items if item.cell_len]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, each filled from the left."""
        line = Text()
        for item in self._items:
            if line.cell_len and line.cell_len + GAP + item.cell_len > options.max_width:
                yield line
                line = Text()
            if line.cell_len:
                line.append(" " * GAP)
            line.append_text(item)
        yield line
