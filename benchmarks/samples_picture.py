"""Pictures of samples.py: the share of tasks that are learned, over env steps or over simulated time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from samples_figures import Runs, reached
from samples_tasks import TASKS

from dppo.errors import counted

LABELS = {
    "dppo": "dppo",
    "reuse": "dppo --reuse 4 --num-steps 32",
    "sac": "dppo --algo sac",
    "fast": "dppo --preset fast",
    "sb3": "PPO of Stable-Baselines3, defaults",
    "zoo": "PPO of Stable-Baselines3, tuned for each task",
}


@dataclass(frozen=True)
class Clock:
    """The unit of the horizontal axis: env steps, or seconds of a simulated run."""

    step_s: float | None = None
    """Of an env step; None to count env steps."""
    actors: int = 1
    """Environments that work at the same time."""

    def of(self, runs: Runs, side: str, task: str, steps: float) -> float:
        """Return where a run is after so many env steps.

        Seconds are those of the steps, and of the updates, which all actors wait for:

            env steps / actors * step_s + env steps * CPU seconds of updates per env step
        """
        if self.step_s is None:
            return steps
        return steps * (self.step_s / self.actors + update_s(runs, side, task))


def learned_at(
    runs: Runs, side: str, tasks: list[str], threshold: str, clock: Clock
) -> list[tuple[float, float]]:
    """Return (place on the axis, weight) of all runs that reach the threshold; all tasks weigh the same."""
    points = []
    for task in tasks:
        steps = reached(runs, side, task, threshold)
        weight = 1 / len(steps) / len(tasks)
        points += [
            (clock.of(runs, side, task, one), weight) for one in steps if not math.isinf(one)
        ]
    return sorted(points)


def update_s(runs: Runs, side: str, task: str) -> float:
    """Return the CPU seconds of updates per env step: the median of this task's runs, or else of all of the side."""

    def of(lines: list[dict[str, Any]]) -> list[float]:
        return [line["update_s"] / line["steps"] for line in lines if "update_s" in line]

    own = of(list(runs[side, task].values()))
    others = [
        rate
        for (name, _), seeds in runs.items()
        if name == side
        for rate in of(list(seeds.values()))
    ]
    if not own and not others:
        raise SystemExit(
            f"samples.jsonl has no run of {side} with the time of its updates. Run a seed of it again."
        )
    return median(own or others)


def draw(runs: Runs, sides: list[str], path: Path, step_ms: float | None, actors: int) -> None:
    """Draw the share of learned tasks, on the tasks that all sides have run; over simulated time if steps have one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dppo.tools.pictures.style import DPI, INK

    tasks = [name for name in TASKS if all(runs.get((side, name)) for side in sides)]
    clock = Clock() if step_ms is None else Clock(step_ms / 1000, actors)
    figure = Figure(figsize=(9, 3.8), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, threshold in zip(axes, ("modest", "good"), strict=True):
        _panel(axis, runs, sides, tasks, threshold, clock)
        axis.set_title(
            f"a {threshold} return", fontsize=10, fontweight="bold", color=INK, loc="left"
        )
    first = min(
        place for side in sides for place, _ in learned_at(runs, side, tasks, "modest", clock)
    )
    axes[0].set_xlim(left=0.8 * first)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=len(sides) if len(sides) < 4 else 2,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    axes[0].set_ylabel(f"{len(tasks)} tasks that reach it, %", fontsize=9, color=INK)
    unit = (
        "env steps"
        if step_ms is None
        else f"seconds of a simulator with {step_ms:g} ms a step, {actors} at once"
    )
    figure.supxlabel(unit, fontsize=9, color=INK)
    figure.savefig(path)
    print(f"Written: {path}, of {', '.join(tasks)}")


def steps_of(runs: Runs, task: str, threshold: str) -> list[float]:
    """Return the env steps of a task, and of all runs that reached the threshold."""
    sides = [side for side, name in runs if name == task]
    found = [
        one for side in sides for one in reached(runs, side, task, threshold) if not math.isinf(one)
    ]
    return [TASKS[task].steps, *found]


def _panel(
    axis: Any, runs: Runs, sides: list[str], tasks: list[str], threshold: str, clock: Clock
) -> None:
    """Draw one threshold; lines end with the longest run."""
    from dppo.tools.pictures.style import COLOURS, style

    style(axis, labelsize=8)
    for side, colour in zip(sides, COLOURS, strict=False):
        points = learned_at(runs, side, tasks, threshold, clock)
        end = max(
            clock.of(runs, side, name, max(steps_of(runs, name, threshold))) for name in tasks
        )
        places = [0.0, *(place for place, _ in points), max(end, *(place for place, _ in points))]
        shares = np.cumsum([0.0, *(weight for _, weight in points), 0.0])
        axis.step(
            places,
            100 * shares,
            where="post",
            color=colour,
            linewidth=2,
            label=_label(runs, side, tasks),
        )
    steps = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
    ticks = steps if clock.step_s is None else (2, 5, 10, 20, 50, 100, 200, 500, 1000)
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick // 1000}k" if tick >= 1000 else f"{tick}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, 100)


def _label(runs: Runs, side: str, tasks: list[str]) -> str:
    """Return the name of a side, with the seeds of each task."""
    seeds = [len(runs[side, name]) for name in tasks]
    count = (
        counted(max(seeds), "seed")
        if min(seeds) == max(seeds)
        else f"{min(seeds)} to {max(seeds)} seeds"
    )
    return f"{LABELS.get(side, side)} ({count})"
