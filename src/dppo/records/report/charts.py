"""Charts as HTML and inline SVG: no script, no style attribute, and text that keeps its size on a narrow screen.

Places are shares of a chart, in percent, so that it is as wide as the page; only its lines are stretched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from dppo.errors import printable
from dppo.records.plots import short

BINS, WIDE_BINS = 240, 80  # points of a line, and of areas; each is the mean of as many rows as it takes
MOST_MARKS = 60
LARGEST = 1e30
Bars = Mapping[str, Sequence[tuple[float, float, str]]]


class Mark(NamedTuple):
    """A vertical line at `x`, of a kind that style sheet and legend know."""

    x: float
    kind: str
    text: str


class Series(NamedTuple):
    """Values with a spread around them; without `low` and `high`, that of neighboring rows is drawn."""

    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class Axis(NamedTuple):
    """The range of an axis."""

    low: float
    high: float

    def percent(self, values: np.ndarray) -> np.ndarray:
        """Return places along the axis."""
        return np.asarray(100 * (values - self.low) / (self.high - self.low))

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield place and label of some round numbers."""
        step = 10.0 ** math.ceil(math.log10((self.high - self.low) / 2))
        step *= next(part for part in (0.1, 0.2, 0.25, 0.5, 1) if (self.high - self.low) / (part * step) < 6)
        for count in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield float(self.percent(np.array(count * step))), short(float(f"{count * step:.6g}"), 0)


def text(value: object) -> str:
    """Return text for a page: markup and control characters escaped, long parts left out."""
    return escape(printable(str(value)))


def chart(
    title: str, x: np.ndarray, series: Series, x_label: str, *, name: str = "last", marks: Sequence[Mark] = ()
) -> str:
    """Return a figure of a line with its spread and the last value under its `name`; "" without any finite value."""
    px, mean, low, high = _binned(x, series, BINS)
    if not len(px):
        return ""
    across, up = _axis(px, 0.0), _axis(np.concatenate([low, high]), 0.05)
    at, y, dots = across.percent(px), 100 - up.percent(np.array([mean, low, high])), len(px) < 20
    paths = [_mark(mark, across) for mark in marks[:MOST_MARKS]]
    paths.append(f'<path class="band f0" d="{_path(at, y[1])}L{_path(at[::-1], y[2][::-1])[1:]}Z"/>')
    paths.append(f'<path class="line s0{" few" * dots}" d="{_path(at, y[0], dots=dots)}"/>')
    return _figure(title, {name: f"{mean[-1]:.4g}"}, paths, across, x_label, up=up)


def stacked(title: str, x: np.ndarray, parts: Mapping[str, np.ndarray], x_label: str) -> str:
    """Return a figure of parts that add up to 1, on top of each other; "" without any."""
    drawn = [_binned(x, Series(np.nan_to_num(y)), WIDE_BINS) for y in parts.values()]
    if not drawn or not drawn[0].size:
        return ""
    across, tops = _axis(drawn[0][0], 0.0), np.clip(np.cumsum([bins[1] for bins in drawn], axis=0), 0, 1)
    at, y = across.percent(drawn[0][0]), 100 * (1 - np.vstack([np.zeros(tops.shape[1]), tops]))
    paths = [
        f'<path class="f{color}" d="{_path(at, y[color])}L{_path(at[::-1], y[color + 1][::-1])[1:]}Z"/>'
        for color in range(len(drawn))
    ]
    mean = {name: f"{np.nan_to_num(part).mean():.0%}" for name, part in parts.items()}
    return _figure(title, mean, paths, across, x_label, up=Axis(0, 1))


def lanes(title: str, rows: Bars, unit: float, x_label: str) -> str:
    """Return a figure with a lane for each of `rows`: bars from and to a time in seconds, with the words about each."""
    across, bars = _axis(np.array([0.0, *(bar[1] / unit for bars in rows.values() for bar in bars)]), 0.0), []
    for lane, of_lane in enumerate(rows.values()):
        for turn, (begin, end, said) in enumerate(of_lane):
            left, right = across.percent(np.array([begin, end]) / unit)
            bars.append(
                f'<rect class="f{turn % 2}" x="{left:.2f}" y="{100 * (lane + 0.2) / len(rows):.3f}" '
                f'width="{max(0.4, right - left - 0.1):.2f}" height="{60 / len(rows):.3f}"><title>{text(said)}</title>'
                "</rect>"
            )
    labels = [((lane + 0.5) * 100 / len(rows), name) for lane, name in enumerate(rows)]
    return _figure(title, {}, bars, across, x_label, lanes=labels)


def _figure(
    title: str,
    legend: Mapping[str, str],
    inside: Sequence[str],
    across: Axis,
    x_label: str,
    *,
    up: Axis | None = None,
    lanes: Sequence[tuple[float, str]] = (),
) -> str:
    ticks, levels = list(across.ticks()), [(100 - at, label) for at, label in (() if up is None else up.ticks())]
    keys = "".join(
        f'<span class="k{i}">{text(name)} <b>{value}</b></span>' for i, (name, value) in enumerate(legend.items())
    )
    grid = "".join(f'<line x1="{at:.2f}%" x2="{at:.2f}%" y2="100%"/>' for at, _ in ticks)
    grid += "".join(f'<line x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>' for at, _ in levels)
    grid += "".join(
        f'<text x="{at:.2f}%" y="100%" dy="1.3em" class="middle">{text(label)}</text>' for at, label in ticks
    )
    grid += "".join(
        f'<text x="-0.5em" y="{at:.2f}%" dy="0.35em" class="end">{text(label)}</text>'
        for at, label in (*levels, *lanes)
    )
    height = f' height="{22 * len(lanes)}"' if lanes else ""
    return (
        f'<figure{" class=lanes" if lanes else ""}><figcaption>{text(title)}</figcaption><p class="legend">{keys}</p>'
        f'<svg class="plot"{height} role="img" aria-label="{text(title)}"><g class="grid">{grid}</g><svg '
        f'viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(inside)}</svg></svg><p class="unit">{x_label}</p>'
        "</figure>"
    )


def _binned(x: np.ndarray, series: Series, most: int) -> np.ndarray:
    """Return [4, n <= most]: x, mean, low and high of groups of neighbors with finite values."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(series.y))
    if not len(known):
        return np.zeros((4, 0))
    starts = np.unique(np.linspace(0, len(known), min(most, len(known)), endpoint=False).astype(np.int64))
    each = (series.y if one is None else np.where(np.isfinite(one), one, series.y) for one in series)
    of = np.clip([x, *each], -LARGEST, LARGEST)[:, known]
    means = np.add.reduceat(of, starts, axis=1) / np.diff(starts, append=len(known))
    if series.low is None:
        means[2:] = np.minimum.reduceat(of[2], starts), np.maximum.reduceat(of[3], starts)
    return np.asarray(means)


def _axis(values: np.ndarray, margin: float) -> Axis:
    """Return a range that contains `values`; and zero, if they are not far from it, or all equal."""
    low, high = float(values.min()), float(values.max())
    if 0 <= low < high / 2 or high - low <= 1e-9 * abs(high):
        low, high = min(0.0, low), max(0.0, high)
    more = max(margin * (high - low), 1e-12)
    return Axis(low - more * (low != 0), high + more)


def _path(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Return a line; with `dots`, its points too, as lines without a length, which have round ends."""
    points = [f"{a:.2f} {b:.2f}" for a, b in zip(x, y, strict=True)]
    return f"M{'L'.join(points)}{''.join(f'M{one}h0' for one in points) if dots else ''}"


def _mark(mark: Mark, across: Axis) -> str:
    at = float(across.percent(np.array(mark.x)))
    return f'<path class="mark {mark.kind}" d="M{at:.2f} 0V100"><title>{text(mark.text)}</title></path>'
