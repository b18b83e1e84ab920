"""Measure real simulators: PYTHONPATH=examples/simulators python benchmarks/simulators.py WHAT [NAME ...].

WHAT is `examine` (by `dppo doctor`), `race` (env steps per second in process and with 1, 2 and 8 actors; `race:0,8`
with those numbers), `learn` (a short run, for a learning curve), `table` (prints that of results/simulators.md) or
`picture` (draws docs/simulators.png). Each result is a line of simulators.jsonl; of several for a simulator, the last
one counts. Needs the extras `sims` and `atari`; `robotics` and EnvPool in a venv of their own (see .ci/run); and
Tank.fmu, by `pythonfmu build`.
"""

from __future__ import annotations

import atexit
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dppo
from dppo.tools.doctor.speed import iteration_s

HERE = Path(__file__).parent
RESULTS = HERE / "simulators.jsonl"
SECONDS = 12
ACTORS = (0, 1, 2, 8)
# Settings of the run, its env steps, the steps of a segment where speeds are measured, and the iterations.
TASKS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "SimPy factory": ({"env_id": "factory:make"}, 60_000, 128, 5),
    "FMU (a tank)": (
        {"env_id": "fmu:make", "env_kwargs": {"path": "Tank.fmu"}, "norm_obs": True},
        60_000,
        128,
        5,
    ),
    "EnvPool CartPole": (
        {"env_id": "vectors:pool", "env_kwargs": {"task": "CartPole-v1"}, "envs_per_sampler": 8},
        100_000,
        64,
        4,
    ),
    "Box2D LunarLander": ({"env_id": "LunarLander-v3"}, 60_000, 128, 5),
    "PettingZoo simple_spread": ({"env_id": "agents:make", "envs_per_sampler": 3}, 100_000, 64, 4),
    "MiniGrid DoorKey": (
        {"env_id": "minigrid:MiniGrid-DoorKey-5x5-v0", "drop_obs": ["mission"]},
        40_000,
        64,
        3,
    ),
    "MuJoCo Humanoid": ({"env_id": "Humanoid-v5"}, 60_000, 128, 4),
    "gymnasium-robotics FetchReach": (
        {"env_id": "gymnasium_robotics:FetchReach-v4"},
        30_000,
        64,
        4,
    ),
    "ale_py Pong": (
        {"env_id": "vectors:atari", "envs_per_sampler": 2, "update_epochs": 1},
        40_000,
        16,
        2,
    ),
    "EnergyPlus office": ({"env_id": "energyplus:make", "norm_obs": True}, 10_000, 32, 2),
    "Grid2Op case 5": ({"env_id": "grid:make"}, 8_000, 16, 4),
    "highway-env": ({"env_id": "highway_env:highway-fast-v0"}, 4_000, 8, 3),
    "a step that waits 5 ms": ({"env_id": "dppo/SlowCartPole-v0"}, 0, 32, 4),
    "a step that waits 50 ms": (
        {"env_id": "dppo/SlowCartPole-v0", "env_kwargs": {"step_s": 0.05}},
        0,
        16,
        2,
    ),
}
SLOW_TO_IMPORT = ("Grid2Op case 5", "highway-env", "EnergyPlus office")


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags of the command line."""
    words = [settings["env_id"]]
    for name, value in settings.items():
        if name != "env_id":
            shown = (
                [json.dumps(value)]
                if isinstance(value, dict)
                else value
                if isinstance(value, list)
                else [str(value)]
            )
            words += [f"--{name.replace('_', '-')}", *([] if value is True else shown)]
    return words


def examined(settings: dict[str, Any], seconds: int) -> dict[str, Any]:
    """Return what the doctor finds, and the speed-up that it predicts where each actor has a CPU of its own."""
    command = [
        sys.executable,
        "-m",
        "dppo",
        "doctor",
        *flags(settings),
        "--seconds",
        str(seconds),
        "--json",
    ]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    facts = report["facts"]
    if "update_s" not in facts:
        return {"error": report["findings"]}
    facts, config = facts | {"cpus": 64}, dppo.Config(**settings)
    alone = iteration_s(facts, config, 0)
    return {
        "spaces": facts["spaces"],
        "step_ms": 1e3 * facts["step"]["median"],
        "reset_ms": 1e3 * facts["reset"]["median"],
        "mb": facts["env_mb"],
        "speed_up": {actors: alone / iteration_s(facts, config, actors) for actors in (1, 2, 8)},
        "findings": report["findings"],
    }


def learned(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return env steps and mean returns of a run in this process, and its env steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        config = dppo.Config(
            **settings, total_timesteps=steps, run_dir=Path(folder) / "run", progress="off"
        )
        result = dppo.train(config)
        rows = [
            row
            for row in result.metrics
            if row.get("charts/episodic_return") == row.get("charts/episodic_return")
        ]
        curve = [
            (row["global_step"], row["charts/episodic_return"])
            for row in rows
            if "charts/episodic_return" in row
        ]
        return {"curve": curve, "steps_per_s": result.steps_per_s}


def raced(settings: dict[str, Any], num_steps: int, iterations: int, actors: int) -> dict[str, Any]:
    """Return env steps per second with so many actors; the first iteration makes environments, and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        batch = 8 * settings.get("envs_per_sampler", 1) * num_steps
        sizes = {
            "num_steps": num_steps,
            "num_actors": actors,
            "total_timesteps": batch * (1 + iterations),
        }
        config = dppo.Config(**settings | sizes, run_dir=Path(folder) / "run", progress="off")
        rows = dppo.train(config).metrics[1:]
    return {"raced": {actors: batch * len(rows) / sum(row["perf/iteration_s"] for row in rows)}}


def measure(what: str, names: list[str]) -> None:
    """Measure, and write a line for each simulator."""
    race, _, wanted = what.partition(":")
    numbers = tuple(map(int, wanted.split(","))) if wanted else ACTORS if race == "race" else (0,)
    if race == "race":  # one Ray for all runs, whose starts would take longer than they do
        from dppo.config import Actors, Learners
        from dppo.transports.ray.session import RaySession, demand_of

        ray_actors = Actors(num_actors=8)
        demand = demand_of(ray_actors, Learners())
        session = RaySession(ray_actors, demand, store_bytes=2**28, notify=print)
        atexit.register(session.close)
    for name, actors in itertools.product(names or TASKS, numbers):
        settings, steps, num_steps, iterations = TASKS[name]
        found: dict[str, Any] = {
            "name": name,
            "command": " ".join(["dppo train", *flags(settings)]),
        }
        began = time.monotonic()
        if race == "race":
            found |= raced(settings, num_steps, iterations, actors)
        elif what == "examine":
            found |= examined(settings, SECONDS * (1 + (name in SLOW_TO_IMPORT)))
        elif steps:
            found |= learned(settings, steps)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        shown = {key: value for key, value in found.items() if key in ("raced", "step_ms", "error")}
        print(name, shown, f"{time.monotonic() - began:.0f} s", flush=True)


def results() -> list[dict[str, Any]]:
    """Return what was measured of each simulator."""
    found: dict[str, dict[str, Any]] = {name: {"name": name, "curve": []} for name in TASKS}
    for line in RESULTS.read_text().splitlines():
        one = json.loads(line)
        speeds = found[one["name"]].get("raced", {}) | one.get("raced", {})
        found[one["name"]] |= one | ({"raced": speeds} if speeds else {})
    return list(found.values())


def table() -> None:
    """Print the rows of results/simulators.md."""
    for one in results():
        raced, times = one.get("raced", {}), "- | -"
        if "step_ms" in one:
            times = f"{one['step_ms']:.2g} | {one['reset_ms']:.2g}"
        ups = [
            f"{raced[actors] / raced['0']:.2g}" if actors in raced else "-"
            for actors in ("1", "2", "8")
        ]
        expected = f"{one['speed_up']['8']:.2g}" if "speed_up" in one else "-"
        speed = f"{raced['0']:,.0f}" if raced else "-"
        print(
            "|",
            " | ".join([one["name"], one.get("spaces", "-"), times, speed, *ups, expected]),
            "|",
        )


def picture() -> None:
    """Draw a panel for each simulator."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(9, 6.5), layout="constrained")
    shown = [one for one in results() if len(one["curve"]) > 4]
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.plot(
            [step / 1000 for step, _ in one["curve"]], [mean for _, mean in one["curve"]], lw=1.2
        )
        axis.set_title(one["name"], fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    figure.supxlabel("thousand env steps", fontsize=8)
    figure.supylabel("mean return of the latest episodes", fontsize=8)
    figure.savefig(HERE.parent / "docs" / "simulators.png", dpi=110)


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    {"table": table, "picture": picture}[what]() if what in ("table", "picture") else measure(
        what, names
    )
