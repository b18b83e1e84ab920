"""Groups of runs in one picture: each group's mean over its seeds, in a band from the lowest to the highest."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo.tools.curves import Band, Curve, CurveGroup, DrawnBaseline, over_seeds
from dppo.tools.pictures.style import (
    COLOURS,
    DASHES,
    DPI,
    GREY,
    INK,
    LABEL_WIDTH,
    LEFT,
    LEGEND,
    STEPS,
    baseline_label,
    draw_baseline,
    save,
    style,
    time_axis,
    two_panels,
)

CAPTION_WIDTH = 125  # characters in a line
LINE_WIDTH = 1.5


def compare_figure(
    groups: Sequence[CurveGroup], path: Path, caption: str, target: float | None
) -> None:
    """Draw a comparison into the PNG `path`: mean episode return over wall time while training, and over env steps.

    Over time, a step is drawn at the mean of the seeds' times, so that a curve ends where its runs ended. The
    legend shows the time to the return `target`; None: to the end of the runs.
    """
    bands = [over_seeds(group.runs) for group in groups]
    scale, time_label = time_axis(*(band.seconds for band in bands))
    figure, (over_time, over_steps) = two_panels(time_label, STEPS, top=0.77, bottom=0.22)
    times = [mean_time_to(group, band, target) for group, band in zip(groups, bands, strict=True)]
    names = [
        group.label + legend_time(time, times[0], target, noise=group.noise)
        for group, time in zip(groups, times, strict=True)
    ]
    _draw_bands(over_time, bands, names, scale, shade=0.15)
    _draw_bands(over_steps, bands, names, None, shade=0.25 / len(groups))
    for index, (band, time) in enumerate(zip(bands, times, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        ends = (band.seconds[-1:] / scale, band.mean[-1:])
        over_time.plot(*ends, "o", color=colour, markersize=5, clip_on=False)
        if target is not None and time is not None:
            over_time.axvline(time / scale, ymax=0.04, color=colour, linewidth=2)
    for axis, title in ((over_time, "Over wall time"), (over_steps, "Over env steps")):
        axis.set_xlim(left=0)
        place = axis.transAxes
        axis.text(0, 1.24, title, transform=place, fontsize=12, fontweight="bold", color=INK)
        if target is not None:
            axis.axhline(target, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    over_time.legend(ncols=1 if len(groups) <= 2 else 2, **LEGEND)
    if len(bands) > 1 and all_equal(bands):
        note = "identical curves,\neach on a wider line"
        place = over_steps.transAxes
        over_steps.text(0.98, 0.06, note, transform=place, color=GREY, fontsize=9, ha="right")
    wrapped = "\n".join(textwrap.wrap(caption, CAPTION_WIDTH))
    figure.text(LEFT, 0.03, wrapped, color=GREY, fontsize=9)
    save(figure, path)


def draw_together(
    groups: Sequence[CurveGroup],
    path: Path,
    title: str,
    label: str,
    *,
    over_time: bool,
    baselines: Sequence[DrawnBaseline],
) -> None:
    """Draw groups into the PNG, SVG or PDF `path`: means over env steps or time; `label` names the values.

    Evaluations are points, and `baselines` horizontal lines, in the colour of their group.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bands = [over_seeds(group.runs) for group in groups]
    scale, time_label = time_axis(*(band.seconds for band in bands))
    names = ["\n".join(textwrap.wrap(str(group), LABEL_WIDTH)) for group in groups]
    labels = [baseline_label(f"baseline {name}", value) for name, value, _ in baselines]
    legend_lines = sum(label.count("\n") + 1.3 for label in (*names, *labels))
    size = (8, 4 + 0.18 * legend_lines)
    with mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "dppo"}):
        figure = Figure(size, DPI, facecolor="white", layout="constrained")
        axis = figure.add_subplot()
        style(axis)
        unit = scale if over_time else None
        _draw_bands(axis, bands, names, unit, shade=0.15)
        if any(len(group.runs) > 1 for group in groups):
            axis.fill_between([], [], color=GREY, alpha=0.3, label="bands: lowest to highest seed")
        _draw_evaluations(axis, groups, unit)
        for name, mean_return, of_group in baselines:
            colour = INK if of_group is None else COLOURS[of_group % len(COLOURS)]
            draw_baseline(axis, mean_return, f"baseline {name}", colour)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axis.set_xlabel(time_label if over_time else STEPS, color=INK, fontsize=9)
        axis.set_ylabel(label, color=INK, fontsize=9)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, labelcolor=INK)
        save(figure, path)


def _draw_evaluations(axis: Any, groups: Sequence[CurveGroup], unit: float | None) -> None:
    labels = set[str]()
    for index, group in enumerate(groups):
        for evaluations in group.evaluations:
            colour = COLOURS[index % len(COLOURS)]
            points = {"color": colour, "markeredgecolor": "white", "markersize": 6}
            name = f"points: {evaluations.evaluations_name}"
            prefix = "_" if name in labels else ""  # names with this prefix are not in a legend
            labels.add(name)
            x = _places(evaluations, unit)
            axis.plot(x, evaluations.values, "o", label=prefix + name, **points)


def mean_time_to(group: CurveGroup, band: Band, target: float | None) -> float | None:
    """Return the mean time over seeds to `target`, or to the end; None if a seed has not reached it."""
    if target is None:
        if len(band.seconds):
            return float(band.seconds[-1])
        return None
    times = [curve.time_to(target) for curve in group.runs]
    reached = [time for time in times if time is not None]
    if not reached or len(reached) < len(times):
        return None
    return fmean(reached)


def legend_time(
    seconds: float | None, first: float | None, target: float | None, *, noise: bool
) -> str:
    """Return the end of a legend's line: the time, and how many times as fast as the first group that is."""
    if seconds is None:
        return "" if target is None else f": {target:g} not reached"
    if seconds >= 60:
        minutes, rest_s = divmod(round(seconds), 60)
        time = f"{minutes} min {rest_s:02} s"
    elif seconds >= 10:
        time = f"{seconds:.0f} s"
    else:
        time = f"{seconds:.1f} s"
    factor = ""
    if first is not None and first != seconds:
        factor = " (noise)"
        if not noise:
            factor = f" ({first / seconds:.1f}×)"
    if target is None:
        return f": {time}{factor}"
    return f": {target:g} after {time}{factor}"


def all_equal(bands: Sequence[Band]) -> bool:
    first, *later = (band[1:] for band in bands)
    if not len(first[0]):
        return False
    return all(all(map(np.array_equal, first, other)) for other in later)


def _line_widths(bands: Sequence[Band]) -> list[float]:
    """Return the width of each line over env steps: the sides of a line that later lines cover stay visible."""
    return [
        LINE_WIDTH + 3 * sum(all_equal([band, later]) for later in bands[index + 1 :])
        for index, band in enumerate(bands)
    ]


def _draw_bands(
    axis: Any, bands: Sequence[Band], names: Sequence[str], unit: float | None, shade: float
) -> None:
    """Draw means and spreads over time, in a unit of so many seconds, or without one over env steps."""
    widths = _line_widths(bands) if unit is None else [LINE_WIDTH for _ in bands]
    for index, (band, name, width) in enumerate(zip(bands, names, widths, strict=True)):
        x = _places(band, unit)
        colour = COLOURS[index % len(COLOURS)]
        line = {
            "linewidth": width,
            "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
            "marker": "o" if len(x) == 1 else None,
            "markersize": 4 + width,
            "clip_on": len(x) > 1,  # a point on an axis is drawn as a whole
        }
        axis.fill_between(x, band.low, band.high, color=colour, alpha=shade, linewidth=0)
        axis.plot(x, band.mean, color=colour, label=name, **line)


def _places(points: Band | Curve, unit: float | None) -> np.ndarray:
    return points.steps if unit is None else points.seconds / unit
