"""Measure what a run gains that starts from a controller (`--prior`): returns of the first evaluations, and env steps.

    python benchmarks/prior.py run [--tasks pendulum tanks lander office] [--seeds 2] [--set reuse=4 num_steps=32]
    python benchmarks/prior.py table

A run is stored in prior.jsonl as it ends, and is left out when the command is repeated. Each task has a controller that
an engineer would write; it plays the episodes of the evaluations, too. The sides are `prior` and `none`, with equal
settings otherwise. The office is EnergyPlus (pip install pyenergyplus-lbnl), and runs only if it is named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
STORE = HERE / "prior.jsonl"
sys.path.insert(0, str(HERE.parent / "examples"))
sys.path.insert(0, str(HERE.parent / "examples" / "simulators"))


@dataclass(frozen=True)
class Task:
    """An environment, its controller, and the return from which on it is learned."""

    env_id: str
    controller: str | Callable[..., Any]
    good: float
    total: int
    """Env steps of a run."""
    every: int = 2048
    """Env steps between evaluations."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Where the task itself needs them."""


def swing_up(obs: np.ndarray) -> np.ndarray:
    """Pump energy into the pendulum, and hold it at the top."""
    cosine, sine, speed = obs
    angle = np.arctan2(sine, cosine)
    if cosine > 0.9 and abs(speed) < 4:
        torque = -10 * angle - 2.5 * speed
    else:
        energy = speed**2 / 6 + 5 * (cosine - 1)
        torque = -2 * energy * (1 if speed >= 0 else -1)
    return np.clip([torque], -2, 2).astype(np.float32)


def land(obs: np.ndarray) -> np.ndarray:
    """Land as Gymnasium's heuristic does."""
    lander = importlib.import_module("gymnasium.envs.box2d.lunar_lander")

    class Lander:
        continuous = True
        unwrapped: Any

    Lander.unwrapped = Lander
    return np.clip(lander.heuristic(Lander, obs), -1, 1).astype(np.float32)


def thermostat(obs: np.ndarray) -> np.ndarray:
    """Heat to 20 and cool from 26 degrees while people are at work, and in the two hours before; save otherwise."""
    sine, cosine, at_work = obs[6:]
    hour = np.arctan2(sine, cosine) * 24 / (2 * np.pi) % 24
    if at_work or 6 <= hour < 8:
        return np.array([20.5, 5.0], np.float32)
    return np.array([15.0, 10.0], np.float32)


TASKS = {
    "tanks": Task("tanks:make", "pi:PI", -30.0, 60_000),
    "pendulum": Task("Pendulum-v1", swing_up, -250.0, 40_000),
    "lander": Task("LunarLanderContinuous-v3", land, 200.0, 150_000, 4096),
    "office": Task("energyplus:make", thermostat, -25.0, 40_000, 2048, {"num_actors": 8}),
}
WITHOUT_ENERGYPLUS = ["tanks", "pendulum", "lander"]


def main() -> int:
    """Run what is missing, or show what is stored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=WITHOUT_ENERGYPLUS)
    parser.add_argument("--sides", nargs="+", choices=["prior", "none"], default=["prior", "none"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--store", type=Path, default=STORE)
    options = parser.parse_args()
    if options.command == "run":
        settings = {}
        for pair in options.set:
            name, _, value = pair.partition("=")
            settings[name] = json.loads(value)
        done = [run_of(line) for line in stored(options.store)]
        for seed in range(1, options.seeds + 1):
            for task, side in product(options.tasks, options.sides):
                if (task, side, seed, settings) in done:
                    continue
                line = measured(task, side, seed, settings)
                with options.store.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
        return 0
    print_table(stored(options.store))
    return 0


def stored(store: Path) -> list[dict[str, Any]]:
    """Read the lines of the runs that have ended."""
    if not store.exists():
        return []
    return [json.loads(line) for line in store.read_text().splitlines()]


def run_of(line: dict[str, Any]) -> tuple[str, str, int, dict[str, Any]]:
    """Return what tells a run from the others of its store."""
    return line["task"], line["side"], line["seed"], line["settings"]


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print a row for each run: the first evaluation, the worst and the last one, and env steps to the good return."""
    print(
        "| task | side | seed | controller | first evaluation | worst | last | env steps to good |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        returns = [value for _, value in line["evaluations"]]
        good = next((steps for steps, value in line["evaluations"] if value >= line["good"]), None)
        reached = "never" if good is None else f"{good:,}"
        run = f"| {line['task']} | {line['side']} | {line['seed']} | {line['controller']}"
        print(f"{run} | {returns[0]} | {min(returns)} | {returns[-1]} | {reached} |")


def measured(name: str, side: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the evaluations beside the return of the controller on the same episodes."""
    import dppo

    task = TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "env_id": task.env_id,
            "total_timesteps": task.total,
            "num_actors": 0,
            "eval_every": task.every,
            "seed": seed,
            "run_dir": folder,
            "progress": "off",
            **task.settings,
            **settings,
        }
        if side == "prior":
            config["prior"] = task.controller
        result = dppo.train(dppo.Config(**config))
        rows = [row for row in result.metrics if "eval/episodic_return" in row]
    controller = dppo.evaluate(task.controller, env=task.env_id, episodes=20, seed=seed)
    evaluations = [(row["eval/global_step"], round(row["eval/episodic_return"], 1)) for row in rows]
    return {
        "task": name,
        "side": side,
        "seed": seed,
        "good": task.good,
        "settings": settings,
        "controller": round(controller.mean_return, 1),
        "evaluations": evaluations,
    }


if __name__ == "__main__":
    sys.exit(main())
