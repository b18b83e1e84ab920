"""Figures of samples.py: of one run, of the seeds of a task, and of all tasks with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from samples_tasks import TASKS, WINDOW, Task

POINTS = 50  # of a curve
RESAMPLES = 2000
Runs = dict[tuple[str, str], dict[int, dict[str, Any]]]
"""By side and task, and by seed."""


def figures(
    task: Task, episodes: list[tuple[int, float]], until: str | None = None
) -> dict[str, Any]:
    """Return the curve, env steps to both thresholds (None: not reached), the area under the curve and the end.

    `final` is the mean return of the episodes that ended in the last tenth of the run. A run that may end early has
    neither area nor end, and its curve ends with it.
    """
    steps = np.array([step for step, _ in episodes] or [task.steps], float)
    returns = np.array([one for _, one in episodes] or [math.nan], float)
    sums = np.cumsum(np.insert(returns, 0, 0.0))
    first = np.maximum(np.arange(1, len(returns) + 1) - WINDOW, 0)
    means = (sums[1:] - sums[first]) / (np.arange(1, len(returns) + 1) - first)

    def steps_to(threshold: float) -> int | None:
        reached = np.flatnonzero((means >= threshold) & (np.arange(len(means)) >= WINDOW - 1))
        return int(steps[reached[0]]) if len(reached) else None

    grid = np.linspace(task.steps / POINTS, task.steps, POINTS)
    good = steps_to(task.good)
    if until:
        grid = grid[grid <= (good or steps[-1])]
    at = np.searchsorted(steps, grid, side="right") - 1
    curve = [None if index < 0 else round(float(means[index]), 4) for index in at]
    found: dict[str, Any] = {
        "curve": curve,
        "modest": steps_to(task.modest),
        "good": good,
        "area": None,
        "final": None,
    }
    if not until:
        late = returns[steps > 0.9 * task.steps]
        found["area"] = (
            round(fmean(point for point in curve if point is not None), 4) if any(curve) else None
        )
        found["final"] = round(float(late.mean() if len(late) else means[-1]), 4)
    return found


def first_good(task: Task, evaluations: list[tuple[int, float]]) -> int | None:
    """Return the env steps before the first evaluation without noise that is good; None if none is."""
    for step, mean_return in evaluations:
        if mean_return >= task.good:
            return step
    return None


def stored(store: Path) -> Runs:
    """Return all stored runs. Of two of one seed, one gives the end, and the one that went further the rest."""
    runs: Runs = {}
    for text in store.read_text().splitlines() if store.exists() else ():
        line = json.loads(text)
        line.setdefault("steps", TASKS[line["task"]].steps)
        seeds = runs.setdefault((line["side"], line["task"]), {})
        seeds[line["seed"]] = _merged(seeds[line["seed"]], line) if line["seed"] in seeds else line
    return runs


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    whole, further = (one, other) if one["final"] is not None else (other, one)
    known = ("modest", "good", "steps", "update_s") if whole["good"] is None else ()
    return whole | {key: further[key] for key in known if key in further}


def ends(runs: Runs, side: str, task: str) -> list[float]:
    """Return the means at the end of the runs that went to their end."""
    return [
        line["final"] for line in runs.get((side, task), {}).values() if line["final"] is not None
    ]


def reached(runs: Runs, side: str, task: str, threshold: str) -> list[float]:
    """Return the env steps to a threshold of each seed; inf where it was not reached."""
    lines = runs.get((side, task), {}).values()
    return [math.inf if line[threshold] is None else line[threshold] for line in lines]


def peer_steps(runs: Runs, side: str, task: str, threshold: str) -> list[float]:
    """Return `reached`, with the length of the run where a seed did not get there: it needs at least as many."""
    lines = runs.get((side, task), {}).values()
    return [float(line["steps"] if line[threshold] is None else line[threshold]) for line in lines]


def print_table(runs: Runs, sides: list[str], tasks: list[str]) -> None:
    """Print env steps to both thresholds and the end, in Markdown; and the ratio to `sb3`, or else the last side."""
    peer = "sb3" if "sb3" in sides else sides[-1]
    print(
        "| task (modest, good) | " + " | ".join(sides) + " |\n|---" * 1 + "|---" * len(sides) + "|"
    )
    for name in tasks:
        cells = [describe_runs(runs, side, name) for side in sides]
        if any(cells):
            held = ", held out" if TASKS[name].held_out else ""
            print(
                f"| {name}{held} ({TASKS[name].modest:g}, {TASKS[name].good:g}) | "
                + " | ".join(cells)
                + " |"
            )
    for side in sides:
        if side != peer:
            print(f"\n{side}: {_against(runs, side, peer, tasks)}")


def describe_runs(runs: Runs, side: str, name: str) -> str:
    """Return medians of env steps, the mean end with the number of its seeds, and the number of seeds."""
    seeds, final = runs.get((side, name), {}), ends(runs, side, name)
    if not seeds:
        return ""
    modest, good = (
        _thousands(median(reached(runs, side, name, which))) for which in ("modest", "good")
    )
    end = (
        f"; {fmean(final):.4g}" + (f" of {len(final)}" if len(final) < len(seeds) else "")
        if final
        else ""
    )
    return f"{modest}, {good}{end} ({len(seeds)})"


def _thousands(steps: float) -> str:
    return "-" if math.isinf(steps) else f"{steps / 1000:.0f}k"


def _against(runs: Runs, side: str, peer: str, tasks: list[str]) -> str:
    """Return how a side compares with a peer on the tasks that both have run."""
    both = [name for name in tasks if runs.get((side, name)) and runs.get((peer, name))]
    if not both:
        return "no task in common"
    parts = []
    for threshold in ("good", "modest"):
        found = {name: _ratio(runs, side, peer, name, threshold) for name in both}
        ratios = {name: ratio for name, ratio in found.items() if not math.isnan(ratio)}
        more = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio > 1]
        low, high = interval(runs, side, peer, both, threshold)
        parts.append(
            f"env steps to the {threshold} threshold, of those of {peer}: median "
            f"{median(ratios.values() or [math.nan]):.2f} [{low:.2f}, {high:.2f}] over {len(ratios)} of {len(both)} "
            f"tasks; more on {', '.join(more) or 'none'}."
        )
    lower = []
    for name in both:
        own, other = ends(runs, side, name), ends(runs, peer, name)
        if own and other and fmean(own) < fmean(other):
            lower.append(f"{name} ({fmean(own):.4g} against {fmean(other):.4g})")
    whole = [name for name in both if ends(runs, side, name) and ends(runs, peer, name)]
    areas = [_normalized(runs, side, name) - _normalized(runs, peer, name) for name in whole]
    area = (
        f" Area under the curve: {fmean(areas):+.2f} of the good return on average."
        if areas
        else ""
    )
    return " ".join(parts) + f" Ends lower on {', '.join(lower) or 'none'}, of {len(whole)}.{area}"


def median_ratio(runs: Runs, side: str, peer: str, tasks: list[str], threshold: str) -> float:
    """Return the median over tasks of the ratio of env steps; tasks that neither side learns are left out."""
    ratios = [_ratio(runs, side, peer, name, threshold) for name in tasks]
    return median([ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan])


def _ratio(runs: Runs, side: str, peer: str, name: str, threshold: str) -> float:
    """Return the ratio of the median env steps; NaN if neither learns. The peer counts its whole run at most."""
    own, other = (median(reached(runs, which, name, threshold)) for which in (side, peer))
    if math.isinf(own) and math.isinf(other):
        return math.nan
    return own / median(peer_steps(runs, peer, name, threshold))


def interval(
    runs: Runs, side: str, peer: str, tasks: list[str], threshold: str
) -> tuple[float, float]:
    """Return the 95 % interval of the median ratio over tasks: percentiles of a bootstrap over tasks and their seeds.

    Source: rliable's StratifiedBootstrap with task_bootstrap (Agarwal et al., arXiv:2108.13264): tasks are drawn with
    replacement, then seeds of each, of either side on its own. A task with one seed varies with the drawn tasks only.
    """
    rng, size = np.random.default_rng(1), (RESAMPLES, len(tasks))

    def drawn(*columns: list[float]) -> list[np.ndarray]:
        """Return the medians [resamples, tasks] of seeds drawn with replacement, the same ones for each column."""
        seeds = rng.integers(len(columns[0]), size=(*size, len(columns[0])))
        return [np.median(np.array(column)[seeds], axis=2) for column in columns]

    ratios = []
    for name in tasks:
        (own,) = drawn(reached(runs, side, name, threshold))
        other, most = drawn(
            reached(runs, peer, name, threshold), peer_steps(runs, peer, name, threshold)
        )
        ratios.append(np.where(np.isinf(own) & np.isinf(other), np.nan, own / most))
    chosen = np.take_along_axis(
        np.array(ratios), rng.integers(len(tasks), size=size)[None], axis=0
    )[0]
    chosen = chosen[~np.isnan(chosen).all(axis=1)]
    if not len(chosen):
        return math.nan, math.nan
    low, high = np.quantile(np.nanmedian(chosen, axis=1), [0.025, 0.975], method="nearest")
    return float(low), float(high)


def _normalized(runs: Runs, side: str, name: str) -> float:
    """Return the area under the curve, where 0 is the lowest point of any stored curve and 1 the good threshold."""
    low = min(
        point for (_, task), seeds in runs.items() if task == name
        for line in seeds.values() for point in line["curve"] if point is not None
    )  # fmt: skip
    areas = [line["area"] for line in runs[side, name].values() if line["area"] is not None]
    return (fmean(areas) - low) / (TASKS[name].good - low) if areas else 0.0
