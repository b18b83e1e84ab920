"""Charts as HTML and inline SVG: no script, no style attribute, and text that keeps its size on a narrow screen.

Places are shares of a chart, in percent, so that it is as wide as the page; only its lines are stretched.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from dppo.errors import printable
from dppo.records.plots import short

LINE, AREA, FEW = 240, 80, 20  # points, each the mean of neighboring rows; fewer are drawn as dots, too
MOST_MARKS, LARGEST = 60, 1e30
Mark = tuple[float, str, str]
"""A vertical line: place, kind as in the style sheet, text."""


class Axis(NamedTuple):
    """The range of an axis."""

    low: float
    high: float
    label: str = ""

    def percent(self, values: float | np.ndarray) -> np.ndarray:
        """Return places along the axis."""
        return np.asarray(100 * (values - self.low) / (self.high - self.low))

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield place and label of some round numbers."""
        span = self.high - self.low
        step = 10.0 ** math.ceil(math.log10(span / 2))
        step *= next(part for part in (0.1, 0.2, 0.25, 0.5, 1) if span / (part * step) < 6)
        for count in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield float(self.percent(count * step)), short(float(f"{count * step:.6g}"), 0)


def text(value: object) -> str:
    """Return text for a page: markup and control characters escaped, long parts left out."""
    return escape(printable(str(value)))


def chart(
    title: str, x: np.ndarray, y: np.ndarray, label: str, *, name: str = "last", marks: Sequence[Mark] = ()
) -> str:
    """Return a figure of a line with its spread and its last value; "" if none is finite.

    `y` is [3, n]: values, and the ends of the spread around them.
    """
    px, mean, low, high = _binned(np.array([x, *y]), LINE)
    if not len(px):
        return ""
    across, up, dots = _axis(px, 0.0, label), _axis(np.concatenate([low, high]), 0.05), len(px) < FEW
    at, (line, bottom, top) = across.percent(px), 100 - up.percent(np.array([mean, low, high]))
    inside = "".join(
        f'<path class="mark {kind}" d="M{across.percent(place):.2f} 0V100"><title>{text(said)}</title></path>'
        for place, kind, said in marks[:MOST_MARKS]
    )
    inside += f'<path class="band f0" d="{_area(at, bottom, top)}"/>'
    inside += f'<path class="line{" few" * dots}" d="{_line(at, line, dots=dots)}"/>'
    return _figure(title, {name: f"{mean[-1]:.4g}"}, inside, across, up.ticks())


def stacked(title: str, x: np.ndarray, parts: Mapping[str, np.ndarray], label: str) -> str:
    """Return a figure of parts that add up to 1, on top of each other; "" without any."""
    px, *heights = _binned(np.nan_to_num(np.array([x, *parts.values()])), AREA, spread=False)
    if not len(px) or not heights:
        return ""
    across, edges = _axis(px, 0.0, label), 100 * (1 - np.clip(np.cumsum([0 * px, *heights], axis=0), 0, 1))
    at, shares = across.percent(px), {name: f"{np.nan_to_num(part).mean():.0%}" for name, part in parts.items()}
    areas = (f'<path class="f{one}" d="{_area(at, *edges[one : one + 2])}"/>' for one in range(len(heights)))
    return _figure(title, shares, "".join(areas), across, Axis(0, 1).ticks())


def lanes(title: str, rows: Mapping[str, Sequence[tuple[float, float, str]]], label: str) -> str:
    """Return a figure with a lane for each of `rows`, which holds bars: begin, end, and a text about each."""
    ends, height = [bar[1] for bars in rows.values() for bar in bars], 100 / len(rows)
    across = _axis(np.array([0.0, *ends]), 0.0, label)
    inside = "".join(
        f'<rect class="f{turn % 2}" x="{across.percent(begin):.2f}" y="{(lane + 0.2) * height:.3f}" '
        f'width="{max(0.4, across.percent(end) - across.percent(begin) - 0.1):.2f}" height="{0.6 * height:.3f}">'
        f"<title>{text(said)}</title></rect>"
        for lane, bars in enumerate(rows.values())
        for turn, (begin, end, said) in enumerate(bars)
    )
    names = [(100 - (lane + 0.5) * height, name) for lane, name in enumerate(rows)]
    return _figure(title, {}, inside, across, names, 22 * len(rows))


def _figure(
    title: str, keys: Mapping[str, str], inside: str, across: Axis, up: Iterable[tuple[float, str]], size: int = 0
) -> str:
    legend = "".join(f'<span class="k{one}">{text(key)} <b>{keys[key]}</b></span>' for one, key in enumerate(keys))
    grid = ""
    for at, said in across.ticks():
        grid += f'<line x1="{at:.2f}%" x2="{at:.2f}%" y2="100%"/>'
        grid += f'<text x="{at:.2f}%" y="100%" dy="1.3em">{text(said)}</text>'
    for at, said in up:
        grid += f'<line x2="100%" y1="{100 - at:.2f}%" y2="{100 - at:.2f}%"/>' if not size else ""
        grid += f'<text class="end" x="-0.5em" y="{100 - at:.2f}%" dy="0.35em">{text(said)}</text>'
    kind, height = (" class=lanes", f' height="{size}"') if size else ("", "")
    return (
        f'<figure{kind}><figcaption>{text(title)}</figcaption><p class="legend">{legend}</p><svg class="plot"{height} '
        f'role="img" aria-label="{text(title)}"><g>{grid}</g><svg viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'{inside}</svg></svg><p class="unit">{text(across.label)}</p></figure>'
    )


def _binned(rows: np.ndarray, most: int, *, spread: bool = True) -> np.ndarray:
    """Return [k, n <= most] of [k, m]: means of neighboring finite columns; of `spread`, the lowest and highest."""
    rows = np.clip(rows[:, np.isfinite(rows).all(axis=0)], -LARGEST, LARGEST)
    count = rows.shape[1]
    if not count:
        return rows
    starts = np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))
    means = np.add.reduceat(rows, starts, axis=1) / np.diff(starts, append=count)
    if spread:
        means[2:] = np.minimum.reduceat(rows[2], starts), np.maximum.reduceat(rows[3], starts)
    return np.asarray(means)


def _axis(values: np.ndarray, margin: float, label: str = "") -> Axis:
    """Return a range that contains `values`; and zero, if they are not far from it, or all equal."""
    low, high = float(values.min()), float(values.max())
    if 0 <= low < high / 2 or high - low <= 1e-9 * abs(high):
        low, high = min(0.0, low), max(0.0, high)
    more = max(margin * (high - low), 1e-12)
    return Axis(low - more * (low != 0), high + more, label)


def _line(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Return a path; with `dots`, its points too, as lines without a length, which have round ends."""
    points = [f"{a:.2f} {b:.2f}" for a, b in zip(x, y, strict=True)]
    return f"M{'L'.join(points)}{''.join(f'M{one}h0' for one in points) if dots else ''}"


def _area(x: np.ndarray, bottom: np.ndarray, top: np.ndarray) -> str:
    return f"{_line(x, bottom)}L{_line(x[::-1], top[::-1])[1:]}Z"
