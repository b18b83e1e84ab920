"""Charts as inline SVG: no script, no style attribute, and text that keeps its size on a narrow screen.

Places are shares of a chart, in percent, so that it is as wide as the page; only its lines are stretched.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dppo.errors import printable
from dppo.tools.pictures.style import short

MAX_LINE_POINTS = 240  # each is the mean of neighboring rows
MAX_AREA_POINTS = 80
FEW_POINTS = 20  # fewer are drawn as dots, too
MAX_MARKS = 60
MAX_VALUE = 1e30  # larger values are drawn as this one
TICK_STEPS = (0.1, 0.2, 0.25, 0.5, 1)
MAX_TICKS = 6
LANE_HEIGHT = 22  # pixels
MIN_BAR_WIDTH = 0.4  # percent of the width of a chart
BAR_GAP = 0.1  # percent, between a bar and the next
ROUNDING = 1e-9  # relative differences up to this are due to rounding
MIN_MARGIN = 1e-12  # keeps the range of an axis from being empty


class Mark(NamedTuple):
    """A vertical line in a chart."""

    x: float
    kind: str
    """Name of its class in the style sheet."""
    text: str


class Bar(NamedTuple):
    """A bar in a lane."""

    begin: float
    end: float
    text: str


class Tick(NamedTuple):
    """A label of an axis, at a position in percent."""

    place: float
    label: str


class Axis(NamedTuple):
    """The range of an axis."""

    low: float
    high: float
    label: str = ""

    def percent(self, values: float | np.ndarray) -> np.ndarray:
        return np.asarray(100 * (values - self.low) / (self.high - self.low))

    def ticks(self) -> Iterator[Tick]:
        """Yield place and label of some round numbers."""
        span = self.high - self.low
        decade = 10.0 ** math.ceil(math.log10(span / 2))
        steps = (decade * part for part in TICK_STEPS)
        step = next(step for step in steps if span / step < MAX_TICKS)
        first = math.ceil(self.low / step - ROUNDING)
        last = math.floor(self.high / step + ROUNDING)
        for number in range(first, last + 1):
            value = number * step
            label = short(float(f"{value:.6g}"), 0)
            yield Tick(float(self.percent(value)), label)


class Entry(NamedTuple):
    """A name in a legend, with its value."""

    name: str
    value: str
    colour: int = 0
    """Number of its colour in the style sheet."""
    unit: str = ""


@dataclass(frozen=True)
class Figure:
    """The parts of a figure around its drawing."""

    title: str
    across: Axis
    ticks: Sequence[Tick]
    """Along the vertical axis."""
    legend: Sequence[Entry] = ()
    lanes: int = 0
    """Number of lanes of a figure that has lanes."""

    def around(self, drawing: str) -> str:
        """Put `drawing`, in percent of both axes, inside of the figure; return HTML."""
        kind = ""
        height = ""
        if self.lanes:
            kind = ' class="lanes"'
            height = f' height="{LANE_HEIGHT * self.lanes}"'
        return (
            f'<figure{kind}><figcaption>{text(self.title)}</figcaption><p class="legend">{self._legend()}</p>'
            f'<svg class="plot"{height} role="img" aria-label="{text(self.title)}"><g>{self._grid()}</g>'
            f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{drawing}</svg></svg>'
            f'<p class="unit">{text(self.across.label)}</p></figure>'
        )

    def _legend(self) -> str:
        return "".join(
            f'<span class="k{entry.colour}">{text(entry.name)} <b>{entry.value}</b> {text(entry.unit)}</span>'
            for entry in self.legend
        )

    def _grid(self) -> str:
        grid = ""
        for place, label in self.across.ticks():
            grid += f'<line x1="{place:.2f}%" x2="{place:.2f}%" y2="100%"/>'
            grid += f'<text x="{place:.2f}%" y="100%" dy="1.3em">{text(label)}</text>'
        for place, label in self.ticks:
            y = 100 - place
            if not self.lanes:
                grid += f'<line x2="100%" y1="{y:.2f}%" y2="{y:.2f}%"/>'
            grid += f'<text class="end" x="-0.5em" y="{y:.2f}%" dy="0.35em">{text(label)}</text>'
        return grid


def text(value: object) -> str:
    """Return text for a page: markup and control characters escaped, long parts left out."""
    return escape(printable(str(value)))


class Line(NamedTuple):
    """The line of a chart: mean values over x, with the lower and the upper end of their spread, each [n]."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    band: str = ""
    """The name of the spread in a legend."""


class Points(NamedTuple):
    """Single points in a chart, [n] each, all finite."""

    name: str
    x: np.ndarray
    y: np.ndarray


NO_POINTS = Points("", np.empty(0), np.empty(0))


class Level(NamedTuple):
    """A horizontal line in a chart."""

    name: str
    value: float


class Overlay(NamedTuple):
    """Parts of a chart in addition to its line."""

    marks: Sequence[Mark] = ()
    level: Level | None = None
    points: Points = NO_POINTS


NOTHING = Overlay()


def chart(
    title: str,
    line: Line,
    label: str,
    *,
    name: str = "last",
    unit: str = "",
    overlay: Overlay = NOTHING,
) -> str:
    """Return a figure of a line with its spread and its last value in a `unit`; "" if none is finite."""
    marks, level, points = overlay
    values = np.array(line[:4])
    x, mean, low, high = _binned(values, MAX_LINE_POINTS)
    if not len(x):
        return ""
    last = values[1, np.isfinite(values).all(axis=0)][-1]
    across = _axis(np.concatenate([x, points.x]), 0.0, label)
    ends = [low, high, points.y]
    if level is not None:
        ends.append(np.array([level.value]))
    up = _axis(np.concatenate(ends), 0.05)
    places = across.percent(x)
    middle, bottom, top = 100 - up.percent(np.array([mean, low, high]))
    drawing = ""
    for mark in marks[:MAX_MARKS]:
        path = f"M{across.percent(mark.x):.2f} 0V100"
        title_of_mark = f"<title>{text(mark.text)}</title>"
        drawing += f'<path class="mark {mark.kind}" d="{path}">{title_of_mark}</path>'
    drawing += f'<path class="band f0" d="{_area_path(places, bottom, top)}"/>'
    legend = [Entry(name, f"{last:.4g}", unit=unit)]
    if line.band and (high > low).any():
        legend.append(Entry(f"band: {line.band}", ""))
    if level is not None:
        drawing += f'<path class="level" d="M0 {100 - up.percent(level.value):.2f}H100"/>'
        legend.append(Entry(level.name, f"{level.value:.4g}", 6))
    if len(points.y):
        dots = _dots(across.percent(points.x), 100 - up.percent(points.y))
        drawing += f'<path class="points" d="{dots}"/>'
        legend.append(Entry(points.name, f"{points.y[-1]:.4g}", 2))
    path = _line_path(places, middle)
    if len(x) < FEW_POINTS:
        drawing += f'<path class="line few" d="{path}{_dots(places, middle)}"/>'
    else:
        drawing += f'<path class="line" d="{path}"/>'
    return Figure(title, across, list(up.ticks()), legend).around(drawing)


def stacked(title: str, x: np.ndarray, parts: Mapping[str, np.ndarray], label: str) -> str:
    """Return a figure of the share of each part in their sum, on top of each other; "" without any."""
    columns = np.array([x, *parts.values()])
    columns = np.nan_to_num(columns)
    x, *heights = _binned(columns, MAX_AREA_POINTS, spread=False)
    if not len(x) or not heights:
        return ""
    across = _axis(x, 0.0, label)
    places = across.percent(x)
    sums = np.cumsum([0 * x, *heights], axis=0)
    edges = 100 * (1 - np.clip(sums / np.maximum(sums[-1], MIN_MARGIN), 0, 1))
    drawing = ""
    for number, (bottom, top) in enumerate(pairwise(edges)):
        path = _area_path(places, bottom, top)
        drawing += f'<path class="f{number}" d="{path}"/>'
    totals = np.clip(columns[1:], 0, MAX_VALUE).sum(axis=1)
    shares = totals / max(totals.sum(), MIN_MARGIN)
    legend = [
        Entry(name, f"{share:.0%}", number)
        for number, (name, share) in enumerate(zip(parts, shares, strict=True))
    ]
    return Figure(title, across, list(Axis(0, 1).ticks()), legend).around(drawing)


def lanes(title: str, rows: Mapping[str, Sequence[Bar]], label: str) -> str:
    """Draw a lane of bars for each of `rows`, by their names; return HTML."""
    ends = [bar.end for bars in rows.values() for bar in bars]
    across = _axis(np.array([0.0, *ends]), 0.0, label)
    height = 100 / len(rows)
    drawing = ""
    for lane, bars in enumerate(rows.values()):
        for turn, bar in enumerate(bars):
            begin = across.percent(bar.begin)
            end = across.percent(bar.end) - BAR_GAP
            width = max(MIN_BAR_WIDTH, end - begin)
            drawing += (
                f'<rect class="f{turn % 2}" x="{begin:.2f}" y="{(lane + 0.2) * height:.3f}" width="{width:.2f}" '
                f'height="{0.6 * height:.3f}"><title>{text(bar.text)}</title></rect>'
            )
    names = []
    for lane, name in enumerate(rows):
        middle = 100 - (lane + 0.5) * height
        names.append(Tick(middle, name))
    return Figure(title, across, names, lanes=len(rows)).around(drawing)


def _binned(rows: np.ndarray, max_columns: int, *, spread: bool = True) -> np.ndarray:
    """Return `rows` [k, m] with at most `max_columns` columns, each the mean of neighboring finite ones.

    With `spread`, `rows` is a `Line`: the lowest is kept of `low`, and the highest of `high`.
    """
    is_finite = np.isfinite(rows).all(axis=0)
    rows = np.clip(rows[:, is_finite], -MAX_VALUE, MAX_VALUE)
    count = rows.shape[1]
    if not count:
        return rows
    num_bins = min(max_columns, count)
    edges = np.linspace(0, count, num_bins, endpoint=False)
    starts = np.unique(edges.astype(np.int64))
    sizes = np.diff(starts, append=count)
    means = np.add.reduceat(rows, starts, axis=1) / sizes
    if spread:
        means[2] = np.minimum.reduceat(rows[2], starts)
        means[3] = np.maximum.reduceat(rows[3], starts)
    return np.asarray(means)


def _axis(values: np.ndarray, margin: float, label: str = "") -> Axis:
    """Return an axis for `values`, longer at both ends by `margin`, a share of the range; it may start at zero.

    The range includes zero if all values are equal, or if the lowest is positive and less than half the highest. There
    is no margin below a range that starts at zero.
    """
    low = float(values.min())
    high = float(values.max())
    is_near_zero = 0 <= low < high / 2
    are_equal = high - low <= ROUNDING * abs(high)
    if is_near_zero or are_equal:
        low = min(0.0, low)
        high = max(0.0, high)
    if low == high:  # all are zero
        high = 1.0
    margin_added = max(margin * (high - low), MIN_MARGIN)
    if low != 0:
        low -= margin_added
    return Axis(low, high + margin_added, label)


def _line_path(x: np.ndarray, y: np.ndarray) -> str:
    return "M" + "L".join(_points(x, y))


def _points(x: np.ndarray, y: np.ndarray) -> Iterable[str]:
    return [f"{across:.2f} {up:.2f}" for across, up in zip(x, y, strict=True)]


def _dots(x: np.ndarray, y: np.ndarray) -> str:
    """Return lines of length zero, which the style sheet draws with round ends."""
    return "".join(f"M{point}h0" for point in _points(x, y))


def _area_path(x: np.ndarray, bottom: np.ndarray, top: np.ndarray) -> str:
    return f"{_line_path(x, bottom)}L{_line_path(x[::-1], top[::-1])[1:]}Z"
