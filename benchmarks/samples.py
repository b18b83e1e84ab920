"""Measure env steps to a given return: dppo beside Stable-Baselines3, with its defaults and with tuned settings.

    python benchmarks/samples.py run                            what is missing, two runs at a time: many hours
    python benchmarks/samples.py run --sides dppo --seeds 2 --tasks CartPole Acrobot
    python benchmarks/samples.py run --name long --set num_steps=256 --seeds 2    a side of your own: dppo with settings
    python benchmarks/samples.py table [--sides dppo zoo]
    python benchmarks/samples.py picture docs/samples.png
    python benchmarks/samples.py picture docs/samples_continuous.png --sides dppo reuse sb3 sac
    python benchmarks/samples.py picture docs/samples_time.png --step-ms 10 --actors 8    over simulated time

A run is stored in samples.jsonl as it ends, so that the command can be interrupted and repeated. Sides: `dppo` (its
defaults), `reuse` (--reuse 4 --num-steps 32), `fast` (--preset fast: CleanRL's settings), `sb3` (the defaults of PPO,
MaskablePPO and RecurrentPPO) and `zoo` (rl-baselines3-zoo's settings in Stable-Baselines3). For continuous actions:
`sac` (--algo sac), `sb3-sac` and `crossq` (SAC and sb3-contrib's CrossQ with their defaults, 8 environments, and a
gradient step for each env step), and `sb3-sac-segments` (512 gradient steps after segments of 64 steps). On tasks with
sensors: `sensors` (its critic sees as little as its policy) and `critic-obs` (its critic sees the state).
Tasks are in samples_tasks.py; packages that dppo does not install are MuJoCo, Box2D and MiniGrid, and tasks without
theirs are skipped.

With `--until good` a run ends where it reaches the good return, and otherwise goes on for four times the steps of its
task, or for `--at-most`. Such runs say so, and count for env steps only, never for ends of runs or areas.

A return is the mean of the last 20 training episodes, on every side; dppo's episodes count from the end of their
iteration on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import HERE, MeasurementError, ours_environment, run_all, run_json, sb3_python
from samples_figures import figures, first_good, print_table, stored
from samples_picture import draw
from samples_tasks import (
    EVALUATE_EVERY,
    EVALUATED_EPISODES,
    TASKS,
    ZOO,
    Task,
    counted,
    learned,
    most_steps,
)

from dppo.config.presets import presets

STORE = HERE / "samples.jsonl"
SIDES = ("dppo", "reuse", "fast", "sb3", "zoo", "sac", "sb3-sac", "sb3-sac-segments", "crossq")
PEERS = ("sb3", "zoo", "sb3-sac", "sb3-sac-segments", "crossq")  # of Stable-Baselines3
OFF_POLICY = ("sac", "sb3-sac", "sb3-sac-segments", "crossq")  # for tasks with continuous actions
OF_SENSORS = ("sensors", "critic-obs")  # for tasks with sensors, and no other sides for these
SHOWN = ("dppo", "reuse", "sb3")  # unless others are named: these have run most of the tasks
OURS: dict[str, dict[str, Any]] = {
    "reuse": {"reuse": 4, "num_steps": 32},
    "fast": presets()["fast"],
    "sac": {"algo": "sac"},
    "sensors": {},
    "critic-obs": {"drop_obs": [], "critic_obs": ["state"]},
}


@dataclass(frozen=True)
class Work:
    """What each run does."""

    settings: dict[str, Any]
    until: str | None
    """`good`: until the good return."""
    at_most: int | None
    """Env steps, after which a run ends that has not reached the good return."""
    greedy: bool
    """Evaluate the policy without noise beside the training."""
    limit_s: float
    """Wall time after which a run is ended as failed."""

    def most_steps(self, task: Task) -> int:
        """Return the env steps of a run that does not end earlier."""
        return self.at_most or most_steps(task, self.until)


def main() -> int:
    """Run what is missing, or show what is stored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "table", "picture", "one"])
    parser.add_argument("path", nargs="?", help="the picture to write")
    parser.add_argument("--sides", nargs="+", default=None)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--name", help="of a side of your own")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of that side, as JSON"
    )
    parser.add_argument(
        "--until", choices=["good"], help="end each run where it reaches this return"
    )
    parser.add_argument(
        "--at-most", type=int, metavar="STEPS", help="end runs until the good return after these"
    )
    parser.add_argument(
        "--step-ms", type=float, help="picture: draw over simulated time, with such steps"
    )
    parser.add_argument(
        "--actors", type=int, default=8, help="picture: that collect in simulated time"
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="evaluate the policy without noise beside the training",
    )
    parser.add_argument(
        "--limit-s", type=float, default=7200.0, help="end each run after this wall time, as failed"
    )
    parser.add_argument("--store", type=Path, default=STORE)
    options = parser.parse_args()
    if options.at_most and not options.until:
        parser.error("--at-most needs `--until good`: other runs have the steps of their task")
    if options.command == "one":
        given = json.loads(options.path)
        task, seed = given.pop("task"), given.pop("seed")
        print(json.dumps(train_dppo(task, seed, Work(**given))))
        return 0
    settings = {pair.partition("=")[0]: _value(pair.partition("=")[2]) for pair in options.set}
    if options.command == "run":
        sides = [options.name] if options.name else options.sides or list(SIDES)
        work = Work(settings, options.until, options.at_most, options.greedy, options.limit_s)
        return run(sides, options.tasks, options.seeds, options.jobs, options.store, work)
    runs = stored(options.store)
    sides = options.sides or list(SHOWN)
    if options.command == "picture":
        draw(runs, sides, Path(options.path or "samples.png"), options.step_ms, options.actors)
    else:
        print_table(runs, sides, options.tasks)
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---------------------------------------------------------------------------------------------- runs


def run(sides: list[str], tasks: list[str], seeds: int, jobs: int, store: Path, work: Work) -> int:
    """Run what is not stored yet, `jobs` runs at a time; return 1 if one of them failed."""
    known = stored(store)

    def missing(side: str, name: str, seed: int) -> bool:
        line = known.get((side, name), {}).get(seed)
        if line is None:
            return True
        if work.until is None:
            return line["final"] is None
        return line["good"] is None and line["steps"] < work.most_steps(TASKS[name])

    wanted = [
        (side, name, seed)
        for seed in range(1, seeds + 1)
        for name in tasks
        for side in sides
        if _possible(name, side) and missing(side, name, seed)
    ]
    failed = 0
    for line in run_all([partial(one_run, *one, work) for one in wanted], jobs, store):
        failed += "error" in line
        shown = (
            "side",
            "task",
            "seed",
            *(["error"] if "error" in line else ["final", "modest", "good", "seconds"]),
        )
        print(json.dumps({key: line[key] for key in shown}), flush=True)
    return int(failed > 0)


def _possible(name: str, side: str) -> bool:
    if side == "zoo" and name not in ZOO:
        return False
    if side in OFF_POLICY and not TASKS[name].continuous:
        return False
    if ("Sensors" in name) != (side in OF_SENSORS):
        return False
    return all(importlib.util.find_spec(module) for module in TASKS[name].needs)


def one_run(side: str, name: str, seed: int, work: Work) -> dict[str, Any]:
    """Train in a process of its own, and return what is stored of it."""
    line: dict[str, Any] = {"side": side, "task": name, "seed": seed}
    if work.settings:
        line["settings"] = work.settings
    if work.until:
        line["until"] = work.until
    given = asdict(work) | {"task": name, "seed": seed}
    try:
        if side in PEERS:
            given["side"] = side
            command = [sb3_python(), str(HERE / "samples_sb3.py"), json.dumps(given)]
        else:
            given["settings"] = OURS.get(side, {}) | work.settings
            command = [sys.executable, str(HERE / "samples.py"), "one", json.dumps(given)]
        environment = ours_environment() | {"OMP_NUM_THREADS": "1"}
        result = run_json(command, environment, work.limit_s)
    except MeasurementError as error:
        return line | {"error": str(error)}
    line |= figures(TASKS[name], result["episodes"], work.until)
    if work.greedy:
        line["greedy"] = first_good(TASKS[name], result["evaluations"])
    enough = min(TASKS[name].steps, work.most_steps(TASKS[name]))
    if result["steps"] < enough and line["good"] is None:
        return line | {"error": f"ended after {result['steps']:,} env steps"}
    line |= {key: round(result[key], 1) for key in ("steps", "update_s")}
    return line | {"seconds": round(result["wall_s"], 1)}


def train_dppo(name: str, seed: int, work: Work) -> dict[str, Any]:
    """Train with dppo in this process.

    Returns: the episodes, with env steps at the end of their iteration and their return; all env steps; the CPU
        seconds of all updates; and with `greedy` the evaluations, with env steps and their mean return.
    """
    import dppo
    from dppo.learners.trainers import LocalTrainer

    task = TASKS[name]

    class Episodes(dppo.Observer):
        """Keeps the episodes of the one run of this process, and stops it where it has learned."""

        ended: list[tuple[int, float]] = []  # noqa: RUF012
        open: list[float] = []  # noqa: RUF012
        evaluations: list[tuple[int, float]] = []  # noqa: RUF012
        steps = 0

        def on_episode(self, episode: Any) -> None:
            if not episode.explored:  # else its return is not the policy's
                self.open.append(episode.episode_return)

        def on_iteration(self, row: dict[str, float]) -> bool:
            self.steps, before = int(row["global_step"]), len(self.ended)
            self.ended += [(self.steps, one) for one in self.open]
            self.open.clear()
            if "eval/episodic_return" in row:
                self.evaluations.append((self.steps, row["eval/episodic_return"]))
            returns = [one for _, one in self.ended]
            ends = range(before + 1, len(returns) + 1)
            return work.until is not None and any(learned(returns[:end], task.good) for end in ends)

    episodes, seconds = Episodes(), [0.0]
    LocalTrainer.update = counted(LocalTrainer.update, seconds)  # type: ignore[method-assign]
    steps = work.most_steps(task)
    given = (
        task.settings | work.settings | {"total_timesteps": steps, "seed": seed, "progress": "off"}
    )
    if work.greedy:
        given |= {"eval_every": EVALUATE_EVERY, "eval_episodes": EVALUATED_EPISODES}
    with tempfile.TemporaryDirectory() as folder:
        config = dppo.Config(env_id=task.env_id, run_dir=Path(folder) / "run", **given)
        dppo.train(config, observers=[episodes])
    return {
        "episodes": episodes.ended,
        "evaluations": episodes.evaluations,
        "steps": episodes.steps,
        "update_s": sum(seconds),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
