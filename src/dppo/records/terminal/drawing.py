"""Draw the panel: progress, returns, speed, losses, and the shares of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rich.box import ROUNDED
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dppo.records.terminal.view import PHASES, View, duration, number, share, speed

LABEL_WIDTH = 10
COLOURS = dict(zip(PHASES, ("blue", "cyan", "yellow", "magenta", "green", "bright_black"), strict=True))
LOSSES = {
    "policy": "policy_loss",
    "value": "value_loss",
    "entropy": "entropy",
    "kl": "approx_kl",
    "clipfrac": "clipfrac",
    "expl_var": "explained_variance",
}
GAP = 2  # columns between items
LATE = 5.0  # silence is shown after this many times the usual iteration (and 5 s at least)


def draw(view: View, width: int, now: float, *, colours: bool = True) -> RenderableType:
    """Return the panel at time `now`, `width` columns wide."""
    room = width - LABEL_WIDTH - 4
    table = Table.grid(padding=0)
    table.add_column(width=LABEL_WIDTH, style="dim")
    table.add_column(width=room)
    for label, content in _lines(view, room, now, colours):
        table.add_row(label, content)
    return Panel(
        table,
        title=Text(view.title, style="bold not dim"),
        title_align="left",
        box=ROUNDED,
        border_style="dim",
        width=width,
    )


def _lines(view: View, room: int, now: float, colours: bool) -> list[tuple[str, Text]]:
    row = view.row
    elapsed = duration(now - view.began)
    if not row and view.progress is None:
        lines = [("steps", Text.assemble("waiting for the first env steps  ", _item("elapsed", elapsed)))]
    elif not row:
        lines = [("steps", _steps(view, room, now)), ("speed", _flow(_pace(view), room))]
    else:
        lines = [
            ("steps", _steps(view, room, now)),
            ("return", _returns(view, room)),
            ("speed", _flow(_speed(view, now), room)),
            ("losses", _flow(_losses(row), room)),
            ("time", _stacked_bar(row, room, colours)),
        ]
    incidents = [Text(f"{row[key]:.0f} x {key[10:]}", "yellow") for key in row if key.startswith("incidents/")]
    if incidents:
        lines.append(("incidents", _flow(incidents, room)))
    lines += [(when, Text(what, style="yellow", overflow="fold")) for when, what in view.notes]
    return lines


def _steps(view: View, room: int, now: float) -> Text:
    """Return steps, a progress bar, and the times."""
    done = share(view.steps, view.total_steps)
    figures = Text.assemble((f"{view.steps:,}", "bold"), f" / {view.total_steps:,}  {math.floor(100 * done):>3}%")
    times = [] if view.finished else [_item("left", duration(view.left_s(now)))]
    times.append(_item("elapsed", duration(now - view.began)))
    inline = room - sum(item.cell_len + GAP for item in (figures, *times))
    width = inline if inline >= 12 else room
    cells = round(done * width)
    bar = Text.assemble(("━" * cells, "green"), ("━" * (width - cells), "bright_black"))
    return _flow([figures, bar, *times] if inline >= 12 else [figures, *times, bar], room)


def _pace(view: View) -> list[Text]:
    """Return the speed of an iteration that takes long, and how far it is."""
    progress = view.under_way
    if progress is None:
        return []
    items = [_item("iteration", f"{progress.iteration}: {progress.steps:,} of {view.batch_size:,} steps")]
    if not view.row:
        items = [
            Text.assemble((speed(view.pace.steps_per_s), "bold"), " steps/s"),
            _item("env step", f"{number(view.pace.step_ms)} ms"),
            *items,
        ]
    return items


def _returns(view: View, room: int) -> Text:
    row = view.row
    episodes = int(row.get("charts/episodes", 0))
    if not episodes:
        return Text("no episode has finished yet", style="dim")
    items = [
        Text(number(row.get("charts/episodic_return")), style="bold"),
        Text(view.returns.sparkline(min(40, max(8, room - 62))), style="green"),
        _item("length", number(row.get("charts/episodic_length"))),
    ]
    if "charts/success_rate" in row:
        items.append(_item("success", f"{row['charts/success_rate']:.0%}"))
    items.append(Text(f"last {min(100, episodes)} of {episodes:,} episodes", style="dim"))
    return _flow(items, room)


def _losses(row: dict[str, float]) -> list[Text]:
    return [_item(name, number(row.get(f"losses/{key}")), 5) for name, key in LOSSES.items()]


def _speed(view: View, now: float) -> list[Text]:
    row = view.row
    items = [
        Text.assemble((speed(row.get("charts/SPS")), "bold"), " steps/s"),
        _item("now", speed(row.get("charts/SPS_iteration"))),
        *(_pace(view) or [_item("iteration", number(row.get("iteration"), digits=0))]),
    ]
    if row.get("actors/alive"):
        items.append(_item("actors", number(row["actors/alive"], digits=0)))
    silent = now - max(view.row_at, view.moved_at)
    if silent > max(5.0, LATE * row.get("perf/iteration_s", 0.0)) and not view.finished:
        items.append(Text(f"nothing new for {duration(silent)}", style="yellow"))
    return items


def _stacked_bar(row: dict[str, float], room: int, colours: bool) -> Text:
    """Return the shares of an iteration's time as a bar, in the phases' first letters without colours."""
    shares = [max(0.0, row.get(f"perf/{phase}_frac", 0.0)) for phase in PHASES]
    bar, legend = Text(), []
    for phase, cells, part in zip(PHASES, cells_of(shares, room), shares, strict=True):
        glyph = "█" if colours else phase[0]
        bar.append(glyph * cells, style=COLOURS[phase])
        legend.append(Text.assemble((glyph, COLOURS[phase]), (f" {phase} ", "dim"), f"{part:3.0%}"))
    return Text.assemble(bar, "\n", _flow(legend, room))


def cells_of(shares: Sequence[float], width: int) -> list[int]:
    """Return `width` cells divided by share; their edges are rounded, so that the bar is always full."""
    total = sum(shares)
    edges = [0, *(round(width * part / total) if total > 0 else 0 for part in accumulate(shares))]
    return [end - start for start, end in pairwise(edges)]


def _item(name: str, value: str, width: int = 0) -> Text:
    """Return a name and its figure, padded so that the next item stays in place."""
    return Text.assemble((f"{name} ", "dim"), value.ljust(width))


def _flow(items: Sequence[Text], room: int) -> Text:
    """Return items side by side, in as many lines as necessary; an item is never split."""
    text, used = Text(), 0
    for item in items:
        if not item.cell_len:
            continue
        if used and used + GAP + item.cell_len > room:
            text.append("\n")
            used = 0
        elif used:
            text.append(" " * GAP)
            used += GAP
        text.append_text(item)
        used += item.cell_len
    return text
