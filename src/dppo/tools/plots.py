"""Pictures of a run and of several. Uses Matplotlib's object interface only: no global state, no display."""

import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo.log import logger
from dppo.records.files.disk import cause, remedy, write_file
from dppo.records.metrics.reading import read_metrics
from dppo.records.observer import Result
from dppo.records.outside import FileWriter
from dppo.tools.together import RETURN, Band, Group, curve_of, over_seeds, thinned

DPI = 200  # 9 inches are 1800 pixels, sharp on a page that shows them 900 wide
INK, GREY, PALE = "#24292f", "#6e7781", "#d8dee4"
COLOURS = ("#d1495b", "#2364aa", "#3a8f5c", "#e09f3e", "#7b5ea7", "#1b9aaa")
LEFT = 0.075  # left edge of the axes, the title and the caption
FEW = 20  # fewer values are drawn as points, too
LEGEND = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.99), "frameon": False, "fontsize": 8.5, "labelcolor": INK}
LEGEND |= {"handlelength": 1.2, "columnspacing": 1.2, "labelspacing": 0.3}
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
STEPS, MEAN_RETURN = "env steps", "mean return of the last 100 episodes"
SMOOTHING = 0.05  # window of the smoothed line, as a share of the run


class LearningCurve(FileWriter):
    """Draws learning_curve.png when a run has finished or was stopped."""

    def __init__(self, title: str) -> None:
        self._title = title

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Draw the picture; log an error of the disk."""
        if result is None or error is not None:
            return
        try:
            learning_curve(read_metrics(result.run_dir), result.picture, self._title)
        except OSError as problem:
            logger.warning("%s: cannot be written: %s %s", result.picture, cause(problem), remedy(problem))
        except Exception as problem:  # perhaps of a line that somebody else has written
            logger.warning("%s: cannot be written (%s)", result.picture, problem)


def learning_curve(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw a run, the `rows` of metrics.jsonl, into the PNG `path`: mean return over env steps and training time."""
    seconds, steps, returns, _ = curve_of(rows, RETURN)
    scale, over_time = time_axis(seconds)
    figure, axes = _two_panels(STEPS, over_time, top=0.86, bottom=0.15)
    figure.text(LEFT, 0.92, title, fontsize=12, fontweight="bold", color=INK)
    at, evaluated = thinned(len(returns)), curve_of(rows, "eval/episodic_return")
    x_of = evaluated.steps, evaluated.seconds / scale
    blue: dict[str, Any] = {"color": COLOURS[1], "markersize": 4, "marker": "o" if len(returns) < FEW else None}
    red: dict[str, Any] = {"color": COLOURS[0], "markersize": 4, "marker": "o", "linewidth": 1.5}
    for axis, x, x_evaluated in zip(axes, (steps, seconds / scale), x_of, strict=True):
        if len(evaluated.values):
            axis.plot(x_evaluated, evaluated.values, label="evaluations", **red)
        if len(returns):
            axis.plot(x[at], returns[at], alpha=0.3, linewidth=1, label="each iteration", **blue)
            axis.plot(x[at], smoothed(returns)[at], color=COLOURS[1], linewidth=2, label="moving mean")
        else:
            axis.text(0.5, 0.5, "No episode has finished yet.", transform=axis.transAxes, ha="center", color=GREY)
            axis.set(xticks=[], yticks=[])
        axis.set_xlim(left=0)
    if len(returns) or len(evaluated.values):
        axes[1].legend(**LEGEND | {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "ncols": 3})
    save(figure, path)


def compare_figure(groups: Sequence[Group], path: Path, caption: str, target: float | None) -> None:
    """Draw a comparison into the PNG `path`: mean episode return over wall time, and over env steps.

    A group is drawn as the mean over its seeds at each step, within the band from the lowest to the highest. Over wall
    time, a step is drawn at the mean of the seeds' times, so that a curve ends where its runs ended. The legend shows
    the time to the return `target`; None: to the end of the runs.
    """
    bands = [over_seeds(group.runs) for group in groups]
    scale, over_time = time_axis(np.concatenate([band.seconds for band in bands]))
    times = [mean_time_to(group, band, target) for group, band in zip(groups, bands, strict=True)]
    figure, (left, right) = _two_panels(over_time, STEPS, top=0.77, bottom=0.22)
    for index, (group, band, time) in enumerate(zip(groups, bands, times, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        label = group.label + legend_time(time, times[0], target, noise=group.noise)
        _draw_band(left, band.seconds / scale, band, 0.15, color=colour, linewidth=2, label=label)
        left.plot(band.seconds[-1:] / scale, band.mean[-1:], "o", color=colour, markersize=5)
        line = _interleaved(index, len(groups))
        _draw_band(right, band.steps, band, 0.25 / len(groups), color=colour, **line)
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
    figure.text(LEFT, 0.03, "\n".join(textwrap.wrap(caption, 125)), color=GREY, fontsize=9)
    save(figure, path)


def draw_together(groups: Sequence[Group], path: Path, title: str, label: str, *, over_time: bool) -> None:
    """Draw groups into the PNG or SVG `path`: means over env steps or time, each in its band; `label` is of values."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bands = [over_seeds(group.runs) for group in groups]
    scale, time_label = time_axis(np.concatenate([band.seconds for band in bands]))
    labels = ["\n".join(textwrap.wrap(str(group), 96)) for group in groups]
    with mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "dppo"}):
        height = 4 + 0.18 * sum(label.count("\n") + 1.3 for label in labels)
        figure = Figure(figsize=(8, height), dpi=DPI, facecolor="white", layout="constrained")
        axis = figure.add_subplot()
        style(axis, labelsize=9)
        for index, (band, name) in enumerate(zip(bands, labels, strict=True)):
            x, dashes = band.seconds / scale if over_time else band.steps, DASHES[index // len(COLOURS) % len(DASHES)]
            line: dict[str, Any] = {"linestyle": dashes, "marker": "o" if len(x) == 1 else None, "label": name}
            _draw_band(axis, x, band, 0.15, color=COLOURS[index % len(COLOURS)], **line)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axis.set_xlabel(time_label if over_time else STEPS, color=INK, fontsize=9)
        axis.set_ylabel(label, color=INK, fontsize=9)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, labelcolor=INK)
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


def mean_time_to(group: Group, band: Band, target: float | None) -> float | None:
    """Return the mean time over seeds to `target`, or to the end; None if a seed has not reached it."""
    if target is None:
        return float(band.seconds[-1]) if len(band.seconds) else None
    times = [time for curve in group.runs if (time := curve.time_to(target)) is not None]
    return fmean(times) if len(times) == len(group.runs) else None


def legend_time(seconds: float | None, first: float | None, target: float | None, *, noise: bool = False) -> str:
    """Return the end of a legend's line: the time, and how many times as fast as the first group that is."""
    if seconds is None:
        return "" if target is None else f": {target:g} not reached"
    minutes, rest = divmod(round(seconds), 60)
    exact = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    time = f"{minutes} min {rest:02} s" if seconds >= 60 else exact
    factor = "" if first is None or first == seconds else " (noise)" if noise else f" ({first / seconds:.1f}×)"
    return f": {time}{factor}" if target is None else f": {target:g} after {time}{factor}"


def time_axis(seconds: np.ndarray) -> tuple[float, str]:
    """Return the length in seconds of a unit for these times, and the label of their axis."""
    longest = float(seconds.max(initial=0.0))
    unit, name = (1.0, "s") if longest < 300 else (60.0, "min") if longest < 3 * 3600 else (3600.0, "h")
    return unit, f"training time ({name})"


def all_equal(bands: Sequence[Band]) -> bool:
    """Return whether all groups have the same returns at the same steps."""
    first, *others = (band[1:] for band in bands)
    return len(first[0]) > 0 and all(all(map(np.array_equal, first, other)) for other in others)


def _two_panels(*labels: str, top: float, bottom: float) -> tuple[Any, Any]:
    """Return a figure, and two axes over these quantities, which share the vertical axis of returns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=DPI, facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=LEFT, right=0.98, top=top, bottom=bottom, wspace=0.1)
    for axis, label in zip(axes, labels, strict=True):
        style(axis, labelsize=9)
        axis.set_xlabel(label, color=INK)
    axes[0].set_ylabel(MEAN_RETURN, color=INK, fontsize=9)
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
