"""Draw the curves that learning.py stored: mean return of the last 100 episodes over env steps, for each seed.

    python benchmarks/learning.py --only minigrid-doorkey highway-pixels
    python benchmarks/learning_picture.py benchmarks/learning.jsonl docs/learning.png

It draws the rows that TITLES names, where they are stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from learning import stored

from dppo.errors import counted
from dppo.tools.pictures.style import COLOURS, DPI, GREY, INK, style

TITLES = {
    "minigrid-doorkey": "MiniGrid-DoorKey-5x5-v0, image and direction",
    "highway-pixels": "highway-fast-v0, four frames of 84 x 64 pixels",
    "reach-goal": "Reach, a Dict with a goal",
    "doors-masked": "Doors, with an action mask",
    "positions-lstm": "CartPole without velocities, LSTM",
    "positions-gru": "CartPole without velocities, GRU",
}
COLUMNS = 2


def main() -> None:
    """Read the files, draw the rows that have curves and a title."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path, help="where learning.py stored the runs")
    parser.add_argument("picture", type=Path)
    flags = parser.parse_args()
    runs = stored(flags.store)
    draw({name: list(runs[name].values()) for name in TITLES if name in runs}, flags.picture)
    print(f"Written: {flags.picture}")


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw a panel for each row: seeds thin, their mean thick, returns without learning dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-len(rows) // COLUMNS)
    figure = Figure(figsize=(9, 2.9 * lines), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, runs) in enumerate(rows.items(), start=1):
        axis = figure.add_subplot(lines, COLUMNS, place)
        style(axis, labelsize=8)
        axis.set_title(TITLES[name], fontsize=10, fontweight="bold", color=INK, loc="left")
        _curves(axis, runs)
    figure.supxlabel("env steps", color=INK, fontsize=9)
    figure.supylabel("mean return of the last 100 episodes", color=INK, fontsize=9)
    figure.savefig(path)


def _curves(axis: Any, runs: list[dict[str, Any]]) -> None:
    curves = [np.array(one["curve"]) for one in runs]  # [points, (env steps, return)]
    for curve in curves:
        axis.plot(*curve.T, color=COLOURS[1], alpha=0.35, linewidth=1)
    first, last = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    steps = np.linspace(first, last, max(len(curve) for curve in curves))
    mean = np.mean([np.interp(steps, *curve.T) for curve in curves], axis=0)
    axis.plot(
        steps, mean, color=COLOURS[1], linewidth=2, label=f"mean of {counted(len(curves), 'seed')}"
    )
    for (name, value), dash in zip(_without_learning(runs).items(), (2, 6), strict=False):
        axis.axhline(value, color=GREY, linewidth=1.2, linestyle=(0, (dash, 2)), label=name)
    axis.set_xlim(left=0)
    axis.legend(loc="best", frameon=False, fontsize=8, labelcolor=INK, handlelength=1.4)


def _without_learning(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return random actions, and the best that one action alone reaches."""
    played = next((dict(run["trivial"]) for run in runs if "trivial" in run), {})
    if not played:
        return {}
    chance = played.pop("random")
    return {"random actions": chance, "the best single action": max(played.values())}


if __name__ == "__main__":
    main()
