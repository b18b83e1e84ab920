"""Colours and axes of all pictures, and the function that writes a picture."""

import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dppo.records.files.disk import write_file

DPI = 200  # 9 inches are 1,800 pixels, sharp on a page that shows them 900 pixels wide
INK = "#24292f"
GREY = "#6e7781"
PALE = "#d8dee4"
COLOURS = ("#d1495b", "#2364aa", "#3a8f5c", "#e09f3e", "#7b5ea7", "#1b9aaa")
LEFT = 0.075  # left edge of the axes, the title and the caption, as a share of the width
LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (-0.02, 0.99),
    "frameon": False,
    "fontsize": 8.5,
    "labelcolor": INK,
    "handlelength": 1.2,
    "columnspacing": 1.2,
    "labelspacing": 0.3,
}
ON_EVALUATIONS = "on the evaluations' episodes"
MEAN_OF_EPISODE = "mean return (training: of up to 100 episodes)"
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
STEPS = "env steps"
MEAN_RETURN = "mean training return with noise (up to 100 episodes)"
LABEL_WIDTH = 96  # characters in a line of a legend
MAX_SECONDS_IN_S = 300  # longer times are shown in minutes
MAX_SECONDS_IN_MIN = 3 * 3600  # longer times are shown in hours


def two_panels(
    left_label: str, right_label: str, top: float, bottom: float, y_label: str = MEAN_RETURN
) -> tuple[Any, Any]:
    """Return a figure, and two axes with these labels that share the vertical axis, of returns.

    `top` and `bottom` are margins, as shares of the height.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=DPI, facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=LEFT, right=0.98, top=top, bottom=bottom, wspace=0.1)
    for axis, label in zip(axes, (left_label, right_label), strict=True):
        style(axis)
        axis.set_xlabel(label, color=INK)
    axes[0].set_ylabel(y_label, color=INK, fontsize=9)
    return figure, axes


def style(axis: Any, *, labelsize: int = 9) -> None:
    """Draw a pale grid, no frame, and large numbers in short form along the horizontal axis."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(PALE)
    axis.grid(color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(colors=GREY, length=0, labelsize=labelsize)
    axis.xaxis.set_major_formatter(short)


def baseline_label(name: str, mean_return: float) -> str:
    """Return the entry of a controller in a legend, in lines of LABEL_WIDTH."""
    return textwrap.fill(f"{name}, {ON_EVALUATIONS}: {mean_return:.4g}", LABEL_WIDTH)


def draw_baseline(axis: Any, mean_return: float, name: str = "baseline", colour: str = INK) -> None:
    """Draw the return of the user's controller as a dashed horizontal line, with its figure in the legend."""
    label = baseline_label(name, mean_return)
    axis.axhline(mean_return, color=colour, linewidth=1.2, linestyle=DASHES[1], label=label)


def short(value: float, _: float) -> str:
    """Format 1500000 as 1.5M, 20000 as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def time_axis(*seconds: np.ndarray) -> tuple[float, str]:
    """Return the seconds in the unit that suits these times, and the label of their axis."""
    longest = np.concatenate(seconds).max(initial=0.0)
    if longest < MAX_SECONDS_IN_S:
        return 1.0, "wall time while training (s)"
    if longest < MAX_SECONDS_IN_MIN:
        return 60.0, "wall time while training (min)"
    return 3600.0, "wall time while training (h)"


def save(figure: Any, path: Path) -> None:
    """Write a picture aside and rename it, so that nothing is written through a link of that name."""
    data = BytesIO()
    figure.savefig(data, format=path.suffix.removeprefix(".") or "png")
    write_file(path, data.getvalue())
