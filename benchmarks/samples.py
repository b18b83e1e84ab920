"""Measure env steps to a given return: dppo beside Stable-Baselines3, with its defaults and with tuned settings.

    python benchmarks/samples.py run                            what is missing, two runs at a time: many hours
    python benchmarks/samples.py run --sides dppo --seeds 2 --tasks CartPole Acrobot
    python benchmarks/samples.py run --name long --set num_steps=256 --seeds 2    a side of your own: dppo with settings
    python benchmarks/samples.py table [--sides dppo sb3] [--all-tasks]
    python benchmarks/samples.py picture docs/samples.png

A run is stored in samples.jsonl as it ends, so that the command can be interrupted and repeated. Sides: `dppo` (its
defaults), `reuse` (--reuse 4 --num-steps 32), `fast` (--preset fast: CleanRL's settings), `sb3` (the defaults of PPO,
MaskablePPO and RecurrentPPO) and `zoo` (rl-baselines3-zoo's settings in Stable-Baselines3).
Tasks are in samples_tasks.py; packages that dppo does not install are MuJoCo, Box2D and MiniGrid, and tasks without
theirs are skipped.

A return is the mean of the last 20 training episodes, on every side; dppo's episodes count from the end of their
iteration on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from measure import HERE, MeasurementError, ours_environment, run_json, sb3_python
from samples_tasks import TASKS, ZOO, Task

from dppo.config import presets

STORE = HERE / "samples.jsonl"
WINDOW = 20  # episodes
POINTS = 50  # of a curve
SIDES = ("dppo", "reuse", "fast", "sb3", "zoo")
LONGEST_S = 7200.0
OURS: dict[str, dict[str, Any]] = {"reuse": {"reuse": 4, "num_steps": 32}, "fast": presets()["fast"]}
Runs = dict[tuple[str, str], dict[int, dict[str, Any]]]
"""By side and task, and by seed."""


def main() -> int:
    """Run what is missing, or show what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table", "picture", "one"])
    parser.add_argument("path", nargs="?", help="the picture to write")
    parser.add_argument("--sides", nargs="+", default=None)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--name", help="of a side of your own")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of that side, as JSON")
    parser.add_argument("--store", type=Path, default=STORE)
    options = parser.parse_args()
    if options.command == "one":
        print(json.dumps(train_dppo(**json.loads(options.path))))
        return 0
    settings = {pair.partition("=")[0]: _value(pair.partition("=")[2]) for pair in options.set}
    if options.command == "run":
        sides = [options.name] if options.name else options.sides or list(SIDES)
        return run(sides, options.tasks, options.seeds, options.jobs, settings, options.store)
    runs = stored(options.store)
    sides = options.sides or [side for side in SIDES if any(key[0] == side for key in runs)]
    if options.command == "picture":
        draw(runs, sides, Path(options.path or "samples.png"))
    else:
        print_table(runs, sides, options.tasks)
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---------------------------------------------------------------------------------------------- runs


def run(sides: list[str], tasks: list[str], seeds: int, jobs: int, settings: dict[str, Any], store: Path) -> int:
    """Run what is not stored yet, `jobs` runs at a time; return 1 if one of them failed."""
    known = stored(store)
    wanted = [
        (side, name, seed)
        for seed in range(1, seeds + 1)
        for name in tasks
        for side in sides
        if _possible(name) and (side != "zoo" or name in ZOO) and seed not in known.get((side, name), {})
    ]
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one_run, *one, settings) for one in wanted]):
            line = done.result()
            if "error" in line:
                failed += 1
                print(f"{line['side']} {line['task']} {line['seed']}: {line['error']}", flush=True)
                continue
            with store.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = {key: line[key] for key in ("side", "task", "seed", "final", "modest", "good", "seconds")}
            print(json.dumps(shown), flush=True)
    return int(failed > 0)


def _possible(name: str) -> bool:
    return all(importlib.util.find_spec(module) for module in TASKS[name].needs)


def one_run(side: str, name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of its own, and return what is stored of it."""
    line: dict[str, Any] = {"side": side, "task": name, "seed": seed}
    if settings:
        line["settings"] = settings
    try:
        if side in ("sb3", "zoo"):
            work = json.dumps({"task": name, "zoo": side == "zoo", "seed": seed})
            command = [sb3_python(), str(HERE / "samples_sb3.py"), work]
        else:
            work = json.dumps({"name": name, "seed": seed, "settings": OURS.get(side, {}) | settings})
            command = [sys.executable, str(HERE / "samples.py"), "one", work]
        environment = ours_environment() | {"OMP_NUM_THREADS": "1"}
        result = run_json(command, environment, LONGEST_S)
    except MeasurementError as error:
        return line | {"error": str(error)}
    return line | figures(TASKS[name], result["episodes"]) | {"seconds": round(result["wall_s"], 1)}


def train_dppo(name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with dppo in this process; return the episodes: env steps at the end of their iteration, return."""
    import dppo

    class Episodes(dppo.Observer):
        ended: list[tuple[int, float]] = []  # noqa: RUF012  there is one run in this process
        open: list[float] = []  # noqa: RUF012

        def on_episode(self, episode: Any) -> None:
            self.open.append(episode.episode_return)

        def on_iteration(self, row: dict[str, float]) -> None:
            self.ended += [(int(row["global_step"]), one) for one in self.open]
            self.open.clear()

    task, episodes = TASKS[name], Episodes()
    given = task.settings | settings | {"total_timesteps": task.steps, "seed": seed, "progress": "off"}
    with tempfile.TemporaryDirectory() as folder:
        config = dppo.Config(env_id=task.env_id, run_dir=Path(folder) / "run", **given)
        dppo.train(config, observers=[episodes])
    return {"episodes": episodes.ended}


# ---------------------------------------------------------------------------------------------- figures


def figures(task: Task, episodes: list[tuple[int, float]]) -> dict[str, Any]:
    """Return the curve, env steps to both thresholds (None: not reached), the area under the curve and the end.

    `final` is the mean return of the episodes that ended in the last tenth of the run.
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
    at = np.searchsorted(steps, grid, side="right") - 1
    curve = [None if index < 0 else round(float(means[index]), 4) for index in at]
    late = returns[steps > 0.9 * task.steps]
    return {
        "curve": curve,
        "modest": steps_to(task.modest),
        "good": steps_to(task.good),
        "area": round(fmean(point for point in curve if point is not None), 4) if any(curve) else None,
        "final": round(float(late.mean() if len(late) else means[-1]), 4),
    }


def stored(store: Path) -> Runs:
    """Return all stored runs."""
    runs: Runs = {}
    for text in store.read_text().splitlines() if store.exists() else ():
        line = json.loads(text)
        runs.setdefault((line["side"], line["task"]), {})[line["seed"]] = line
    return runs


def typical(runs: Runs, side: str, task: str, threshold: str) -> float:
    """Return the median over seeds of the env steps to a threshold; inf if half of the seeds do not reach it."""
    found = [line[threshold] for line in runs.get((side, task), {}).values()]
    return median(math.inf if one is None else one for one in found) if found else math.nan


def print_table(runs: Runs, sides: list[str], tasks: list[str]) -> None:
    """Print env steps to both thresholds and the end, in Markdown; and the ratio to `sb3`, or else the last side."""
    peer = "sb3" if "sb3" in sides else sides[-1]
    print("| task (modest, good) | " + " | ".join(sides) + " |\n|---" * 1 + "|---" * len(sides) + "|")
    for name in tasks:
        cells = [_cell(runs, side, name) for side in sides]
        if any(cells):
            held = ", held out" if TASKS[name].held_out else ""
            print(f"| {name}{held} ({TASKS[name].modest:g}, {TASKS[name].good:g}) | " + " | ".join(cells) + " |")
    for side in sides:
        if side != peer:
            print(f"\n{side}: {_against(runs, side, peer, tasks)}")


def _cell(runs: Runs, side: str, name: str) -> str:
    lines = list(runs.get((side, name), {}).values())
    if not lines:
        return ""
    modest, good = (_thousands(typical(runs, side, name, which)) for which in ("modest", "good"))
    return f"{modest}, {good}; {fmean(line['final'] for line in lines):.4g} ({len(lines)})"


def _thousands(steps: float) -> str:
    return "-" if math.isinf(steps) else f"{steps / 1000:.0f}k"


def _against(runs: Runs, side: str, peer: str, tasks: list[str]) -> str:
    """Return how a side compares with a peer on the tasks that both have run."""
    both = [name for name in tasks if runs.get((side, name)) and runs.get((peer, name))]
    if not both:
        return "no task in common"
    ratios, ends = {}, []
    for name in both:
        own, other = typical(runs, side, name, "good"), typical(runs, peer, name, "good")
        if not (math.isinf(own) and math.isinf(other)):
            ratios[name] = own / min(other, TASKS[name].steps)
        own_end, other_end = (fmean(line["final"] for line in runs[which, name].values()) for which in (side, peer))
        if own_end < other_end:
            ends.append(f"{name} ({own_end:.4g} against {other_end:.4g})")
    more = [name for name, ratio in ratios.items() if ratio > 1]
    areas = fmean(_normalized(runs, side, name) - _normalized(runs, peer, name) for name in both)
    return (
        f"env steps to the good threshold, of those of {peer}: median {median(ratios.values() or [math.nan]):.2f} over "
        f"{len(ratios)} of {len(both)} tasks (neither learns the others; where only {peer} does not, its "
        f"whole run counts); more on {', '.join(more) or 'none'}. "
        f"Ends lower on {', '.join(ends) or 'none'}. Area under the curve: {areas:+.2f} of the good return on average."
    )


def _normalized(runs: Runs, side: str, name: str) -> float:
    """Return the area under the curve, where 0 is the lowest point of any stored curve and 1 the good threshold."""
    low = min(
        point for (_, task), seeds in runs.items() if task == name
        for line in seeds.values() for point in line["curve"] if point is not None
    )  # fmt: skip
    areas = [line["area"] for line in runs[side, name].values() if line["area"] is not None]
    return (fmean(areas) - low) / (TASKS[name].good - low) if areas else 0.0


# ---------------------------------------------------------------------------------------------- picture


def solved(runs: Runs, side: str, tasks: list[str]) -> Iterator[tuple[float, float]]:
    """Yield (env steps, share of all tasks and seeds at the good threshold by then)."""
    lines = [line for task in tasks for line in runs.get((side, task), {}).values()]
    reached = sorted(line["good"] for line in lines if line["good"] is not None)
    yield 1000.0, 0.0
    for number, steps in enumerate(reached, start=1):
        yield steps, (number - 1) / len(lines)
        yield steps, number / len(lines)
    yield float(max(task.steps for task in TASKS.values())), len(reached) / max(1, len(lines))


def draw(runs: Runs, sides: list[str], path: Path) -> None:
    """Draw the share of tasks that are learned over env steps, on the tasks that all sides have run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dppo.errors import counted
    from dppo.records.plots import COLOURS, DPI, INK, style

    names = {
        "dppo": "dppo",
        "reuse": "dppo, reuse",
        "fast": "dppo --preset fast",
        "sb3": "Stable-Baselines3",
        "zoo": "SB3, tuned for each task",
    }
    tasks = [name for name in TASKS if all(runs.get((side, name)) for side in sides)]
    figure = Figure(figsize=(8, 4.2), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    style(axis, labelsize=9)
    for side, colour in zip(sides, COLOURS, strict=False):
        steps, shares = np.array(list(solved(runs, side, tasks))).T
        axis.plot(steps, 100 * shares, color=colour, linewidth=2, label=names.get(side, side))
    axis.set_xscale("log")
    axis.set_xlim(left=5000)
    axis.set_ylim(0, 100)
    axis.set_xlabel("env steps", color=INK)
    axis.set_ylabel("tasks learned, %", color=INK)
    seeds = min(len(runs[side, name]) for side in sides for name in tasks)
    axis.set_title(f"{len(tasks)} tasks, {counted(seeds, 'seed')} of each or more", fontsize=10, color=INK, loc="left")
    axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path)
    print(f"Written: {path}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
