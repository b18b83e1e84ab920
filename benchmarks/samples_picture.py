"""Pictures of samples.py: the share of tasks that are learned, over env steps or over simulated time."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from samples_figures import Runs, reached
from samples_tasks import TASKS

LABELS = {
    "dppo": "dppo",
    "reuse": "dppo --reuse 4 --num-steps 32",
    "fast": "dppo --preset fast",
    "sb3": "Stable-Baselines3, defaults",
    "zoo": "Stable-Baselines3, tuned for each task",
}


def learned_at(runs: Runs, side: str, tasks: list[str], step_s: float | None, actors: int) -> list[tuple[float, float]]:
    """Return (env steps or seconds to the good return, weight) of all runs that reach it; all tasks weigh the same.

    Simulated time is that of `actors` environments that work at the same time, and of updates, which they wait for:

        env steps / actors * step_s + env steps * CPU seconds of an update, per env step
    """
    points = []
    for task in tasks:
        steps = reached(runs, side, task, "good")
        each = 1.0 if step_s is None else step_s / actors + update_s(runs, side, task)
        points += [(one * each, 1 / len(steps) / len(tasks)) for one in steps if not math.isinf(one)]
    return sorted(points)


def update_s(runs: Runs, side: str, task: str) -> float:
    """Return the CPU seconds of updates per env step: the median of this task's runs, or else of all of the side."""

    def of(lines: list[dict[str, Any]]) -> list[float]:
        return [line["update_s"] / line["steps"] for line in lines if line.get("steps")]

    own = of(list(runs[side, task].values()))
    others = [rate for (name, _), seeds in runs.items() if name == side for rate in of(list(seeds.values()))]
    if not own and not others:
        raise SystemExit(f"samples.jsonl has no run of {side} with the time of its updates. Run a seed of it again.")
    return median(own or others)


def draw(runs: Runs, sides: list[str], path: Path, step_ms: float | None, actors: int) -> None:
    """Draw the share of learned tasks, on the tasks that all sides have run; over simulated time if steps have one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dppo.records.plots import COLOURS, DPI, INK, style

    tasks = [name for name in TASKS if all(runs.get((side, name)) for side in sides)]
    step_s = None if step_ms is None else step_ms / 1000
    figure = Figure(figsize=(8, 4), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    style(axis, labelsize=9)
    longest = max(TASKS[name].steps for name in tasks)
    for side, colour in zip(sides, COLOURS, strict=False):
        points = learned_at(runs, side, tasks, step_s, actors)
        end = longest * (1.0 if step_s is None else step_s / actors)
        places = np.array([0.0, *(place for place, _ in points), max(end, points[-1][0] if points else 0.0)])
        shares = np.cumsum([0.0, *(weight for _, weight in points), 0.0])
        axis.step(places, 100 * shares, where="post", color=colour, linewidth=2, label=LABELS.get(side, side))
    axis.set_xscale("log")
    axis.set_xlim(left=5000 if step_s is None else 5000 * step_s / actors)
    axis.set_ylim(0, 100)
    axis.set_xlabel("env steps" if step_s is None else "seconds, simulated", color=INK)
    axis.set_ylabel("tasks learned, %", color=INK)
    axis.set_title(_title(runs, sides, tasks, step_ms, actors), fontsize=10, color=INK, loc="left")
    axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path)
    print(f"Written: {path}")


def _title(runs: Runs, sides: list[str], tasks: list[str], step_ms: float | None, actors: int) -> str:
    """Return the number of tasks and of seeds of each side."""
    counts = []
    for side in sides:
        seeds = [len(runs[side, name]) for name in tasks]
        few, many = min(seeds), max(seeds)
        counts.append(f"{few}" if few == many else f"{few} to {many}")
    where = "" if step_ms is None else f", {step_ms:g} ms a step, {actors} environments at once"
    return f"{len(tasks)} tasks{where}; seeds of each: {', '.join(counts)} (in the order of the lines)"
