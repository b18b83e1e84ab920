"""Pictures of a run and of a comparison. Uses Matplotlib's object interface only: no global state, no display."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo.log import logger
from dppo.records.files.disk import write_file
from dppo.records.metrics.reading import read_metrics
from dppo.records.observer import Observer
from dppo.records.result import Result

DPI = 200  # 9 inches are 1800 pixels, sharp on a page that shows them 900 wide
INK, GREY, PALE = "#24292f", "#6e7781", "#d8dee4"
COLOURS = ("#d1495b", "#2364aa", "#3a8f5c", "#e09f3e", "#7b5ea7", "#1b9aaa")
LEFT = 0.075  # left edge of the axes, the title and the caption
FEW, MANY = 20, 4000  # fewer values are drawn as points, too; more values are thinned out
LEGEND = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.99), "frameon": False, "fontsize": 8.5, "labelcolor": INK}
LEGEND |= {"handlelength": 1.2, "columnspacing": 1.2, "labelspacing": 0.3}
SMOOTHING = 0.05  # window of the smoothed line, as a share of the run


@dataclass(frozen=True)
class Curve:
    """One run: arrays of the same length, with one element per iteration."""

    wall_s: np.ndarray
    global_step: np.ndarray
    episodic_return: np.ndarray
    """NaN while no episode has finished; such iterations may also be left out."""

    def time_to(self, target: float | None) -> float | None:
        """Return the seconds of training until the mean return reached `target`; None if it never did."""
        reached = [] if target is None else self.wall_s[self.episodic_return >= target].tolist()
        return reached[0] if reached else None


@dataclass(frozen=True)
class CurveGroup:
    """Runs that differ in their seeds only."""

    label: str
    """Such as "8 actors"."""
    curves: tuple[Curve, ...]
    noise: bool = False
    """True if the group's speed-up is measurement noise and must not be shown as a result."""


@dataclass(frozen=True)
class Band:
    """A group at the same steps: mean time, and mean, lowest and highest return over its seeds."""

    wall_s: np.ndarray
    global_step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class LearningCurve(Observer):
    """Draws learning_curve.png when a run has finished or was stopped."""

    def __init__(self, title: str) -> None:
        self._title = title

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Draw the picture; log an error of the disk."""
        if result is None or error is not None:
            return
        try:
            learning_curve(read_metrics(result.run_dir), result.picture, self._title)
        except Exception as problem:  # perhaps of a line that somebody else has written
            logger.warning("%s: cannot be written (%s)", result.picture, problem)


def learning_curve(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw one run into the PNG `path`: mean episode return over env steps, and over training time.

    `rows` are those of metrics.jsonl; the times of a resumed run are joined.
    """
    times = joined_times([row["time/training_s"] for row in rows])
    returns = np.array([row.get("charts/episodic_return", np.nan) for row in rows], dtype=float)
    known = np.isfinite(returns)
    seconds, returns = times[known], returns[known]
    steps = np.array([row["global_step"] for row in rows], dtype=float)[known]
    scale, unit = time_unit(seconds)
    figure, axes = _two_panels(top=0.86, bottom=0.15)
    figure.text(LEFT, 0.92, title, fontsize=12, fontweight="bold", color=INK)
    at, evaluated = thinned(len(returns)), _evaluations(rows, times)
    for axis, x, x_of in zip(axes, (steps, seconds / scale), (evaluated[0], evaluated[1] / scale), strict=True):
        if evaluated.size:
            axis.plot(
                x_of, evaluated[2], color=COLOURS[0], linewidth=1.5, marker="o", markersize=4, label="evaluations"
            )
            axis.legend(**LEGEND | {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99)})
        if len(returns):
            marker = "o" if len(returns) < FEW else None
            axis.plot(x[at], returns[at], color=COLOURS[1], alpha=0.3, linewidth=1, marker=marker, markersize=4)
            axis.plot(x[at], smoothed(returns)[at], color=COLOURS[1], linewidth=2)
        else:
            axis.text(0.5, 0.5, "No episode has finished yet.", transform=axis.transAxes, ha="center", color=GREY)
            axis.set(xticks=[], yticks=[])
        axis.set_xlim(left=0)
    axes[0].set_xlabel("env steps", color=INK)
    axes[1].set_xlabel(f"training time ({unit})", color=INK)
    save(figure, path)


def _evaluations(rows: Sequence[Mapping[str, float]], times: np.ndarray) -> np.ndarray:
    """Return steps, seconds of training and mean returns [3, n] of the policies that were evaluated."""
    at = {int(row["global_step"]): time for row, time in zip(rows, times.tolist(), strict=True)}
    found = {int(row["eval/global_step"]): row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row}
    points = [(steps, at[steps], value) for steps, value in sorted(found.items()) if steps in at]
    return np.array(points, dtype=float).reshape(-1, 3).T


def compare_figure(groups: Sequence[CurveGroup], path: Path, caption: str, target: float | None) -> None:
    """Draw a comparison into the PNG `path`: mean episode return over wall time, and over env steps.

    A group is drawn as the mean over its seeds at each step, within the band from the lowest to the highest. Over wall
    time, a step is drawn at the mean of the seeds' times, so that a curve ends where its runs ended. The legend shows
    the time to the return `target`; None: to the end of the runs.
    """
    assert groups, "nothing to compare"
    bands = [over_seeds(group.curves) for group in groups]
    scale, unit = time_unit(np.concatenate([band.wall_s for band in bands]))
    times = [mean_time_to(group, band, target) for group, band in zip(groups, bands, strict=True)]
    figure, (left, right) = _two_panels(top=0.77, bottom=0.22)
    for index, (group, band, time) in enumerate(zip(groups, bands, times, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        label = group.label + legend_time(time, times[0], target, noise=group.noise)
        _draw_band(left, band.wall_s / scale, band, 0.15, color=colour, linewidth=2, label=label)
        left.plot(band.wall_s[-1:] / scale, band.mean[-1:], "o", color=colour, markersize=5)
        line = _interleaved(index, len(groups))
        _draw_band(right, band.global_step, band, 0.25 / len(groups), color=colour, **line)
        if target is not None and time is not None:
            left.axvline(time / scale, ymax=0.04, color=colour, linewidth=2)
    for axis, title in ((left, "Over wall time"), (right, "Over env steps")):
        axis.set_xlim(left=0)
        axis.text(0, 1.24, title, transform=axis.transAxes, fontsize=12, fontweight="bold", color=INK)
        if target is not None:
            axis.axhline(target, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    left.legend(ncols=1 if len(groups) <= 2 else 2, **LEGEND)
    if len(bands) > 1 and all_equal(bands):
        equal = "identical curves,\ndashed on a wide line"
        right.text(0.98, 0.06, equal, transform=right.transAxes, color=GREY, fontsize=9, ha="right")
    left.set_xlabel(f"training time ({unit})", color=INK)
    right.set_xlabel("env steps", color=INK)
    figure.text(LEFT, 0.03, "\n".join(textwrap.wrap(caption, 125)), color=GREY, fontsize=9)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a PNG or SVG aside and rename it, so that nothing is written through a link of that name."""
    png = BytesIO()
    figure.savefig(png, format=path.suffix.removeprefix(".") or "png")
    write_file(path, png.getvalue())


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the moving mean over a twentieth of the series; the window is shorter at the ends."""
    half = max(1, round(len(values) * SMOOTHING / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, end = np.maximum(0, at - half), np.minimum(len(values), at + half + 1)
    return np.asarray((sums[end] - sums[first]) / (end - first))


def thinned(count: int) -> np.ndarray:
    """Return at most MANY of `count` indices, evenly spaced, with the first and the last."""
    return np.linspace(0, count - 1, min(count, MANY)).round().astype(np.int64)


def joined_times(seconds: Sequence[float]) -> np.ndarray:
    """Return the times of a run, which start at zero again at each resume, as one increasing time."""
    times = np.asarray(seconds, dtype=float)
    ends = np.where(np.diff(times, prepend=0.0) < 0, np.concatenate([[0.0], times])[: len(times)], 0.0)
    return np.asarray(times + np.cumsum(ends))


def over_seeds(curves: Sequence[Curve]) -> Band:
    """Return the group at those steps at which the returns of all seeds are known."""
    finite = [np.isfinite(curve.episodic_return) for curve in curves]
    each = [curve.global_step[known] for curve, known in zip(curves, finite, strict=True)]
    steps = reduce(np.intersect1d, each)
    steps = steps[thinned(len(steps))]
    rows = [np.searchsorted(known, steps) for known in each]
    pick = list(zip(curves, finite, rows, strict=True))
    returns = np.stack([curve.episodic_return[known][at] for curve, known, at in pick])
    wall_s = np.stack([curve.wall_s[known][at] for curve, known, at in pick])
    return Band(wall_s.mean(axis=0), steps, returns.mean(axis=0), returns.min(axis=0), returns.max(axis=0))


def mean_time_to(group: CurveGroup, band: Band, target: float | None) -> float | None:
    """Return the mean time over seeds to `target`, or to the end; None if a seed has not reached it."""
    if target is None:
        return float(band.wall_s[-1]) if len(band.wall_s) else None
    times = [time for curve in group.curves if (time := curve.time_to(target)) is not None]
    return fmean(times) if len(times) == len(group.curves) else None


def legend_time(seconds: float | None, first: float | None, target: float | None, *, noise: bool = False) -> str:
    """Return the end of a legend's line: the time, and how many times as fast as the first group that is."""
    if seconds is None:
        return "" if target is None else f": {target:g} not reached"
    minutes, rest = divmod(round(seconds), 60)
    exact = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    time = f"{minutes} min {rest:02} s" if seconds >= 60 else exact
    factor = "" if first is None or first == seconds else " (noise)" if noise else f" ({first / seconds:.1f}×)"
    return f": {time}{factor}" if target is None else f": {target:g} after {time}{factor}"


def time_unit(seconds: np.ndarray) -> tuple[float, str]:
    """Return the length and the name of a unit for these times."""
    longest = float(seconds.max(initial=0.0))
    return (1.0, "s") if longest < 300 else (60.0, "min") if longest < 3 * 3600 else (3600.0, "h")


def all_equal(bands: Sequence[Band]) -> bool:
    """Return whether all groups have the same returns at the same steps."""
    first, *others = ([band.global_step, band.mean, band.low, band.high] for band in bands)
    return len(first[0]) > 0 and all(all(map(np.array_equal, first, other)) for other in others)


def _two_panels(*, top: float, bottom: float) -> tuple[Any, Any]:
    """Return a figure and its two axes, which share the vertical axis of returns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=LEFT, right=0.98, top=top, bottom=bottom, wspace=0.1)
    for axis in axes:
        style(axis, labelsize=9)
    axes[0].set_ylabel("mean return of the last 100 episodes", color=INK, fontsize=9)
    return figure, axes


def style(axis: Any, *, labelsize: int) -> None:
    """Draw a pale grid, no frame, and large numbers in short form along the horizontal axis."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(PALE)
    axis.grid(color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(colors=GREY, length=0, labelsize=labelsize)
    axis.xaxis.set_major_formatter(short)


def short(value: float, _: float) -> str:
    """Return 1500000 as 1.5M, 20000 as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _draw_band(axis: Any, x: np.ndarray, band: Band, shade: float, *, color: str, **line: Any) -> None:
    axis.fill_between(x, band.low, band.high, color=color, alpha=shade, linewidth=0)
    axis.plot(x, band.mean, color=color, **line)


def _interleaved(index: int, count: int) -> dict[str, Any]:
    """Return line styles that stay visible on top of each other: the first wide and pale, the others dashed."""
    if index == 0:
        return {"linewidth": 6, "alpha": 0.45} if count > 1 else {"linewidth": 2}
    dashes = (-3.0 * index, (3.0, 3.0 * max(1, count - 2)))
    return {"linewidth": 1.8, "linestyle": dashes, "zorder": 2.5 + index}
