"""Measure real simulators: PYTHONPATH=examples/simulators python benchmarks/simulators.py [NAME ...] [--picture].

`dppo doctor` examines each, and a short run gives a learning curve. Each result is a line of simulators.jsonl; names
that are there are left out, so that it can be interrupted. `--picture` draws docs/simulators.png and prints the table
of docs/SIMULATORS.md. Needs the extra `sims`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dppo
from dppo.doctor.diagnosis import iteration_s

HERE = Path(__file__).parent
RESULTS = HERE / "simulators.jsonl"
SECONDS = 12
# Settings of the run, and its env steps.
TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "SimPy factory": ({"env_id": "factory:make"}, 60_000),
    "FMU (a tank)": ({"env_id": "fmu:make", "env_kwargs": {"path": "Tank.fmu"}, "norm_obs": True}, 60_000),
    "Box2D LunarLander": ({"env_id": "LunarLander-v3"}, 60_000),
    "PettingZoo simple_spread": ({"env_id": "agents:make", "envs_per_sampler": 3}, 100_000),
    "MiniGrid DoorKey": ({"env_id": "minigrid:MiniGrid-DoorKey-5x5-v0", "drop_obs": ["mission"]}, 40_000),
    "MuJoCo Humanoid": ({"env_id": "Humanoid-v5"}, 60_000),
    "EnergyPlus office": ({"env_id": "energyplus:make", "norm_obs": True}, 10_000),
    "Grid2Op case 5": ({"env_id": "grid:make"}, 8_000),
    "highway-env": ({"env_id": "highway_env:highway-fast-v0"}, 4_000),
}


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as flags of the command line."""
    words = [settings["env_id"]]
    for name, value in settings.items():
        if name != "env_id":
            shown = (
                [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, list) else [str(value)]
            )
            words += [f"--{name.replace('_', '-')}", *([] if value is True else shown)]
    return words


def examined(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what the doctor finds, and the speed-up that it predicts where each actor has a CPU of its own."""
    command = [sys.executable, "-m", "dppo", "doctor", *flags(settings), "--seconds", str(SECONDS), "--json"]
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
        config = dppo.Config(**settings, total_timesteps=steps, run_dir=Path(folder) / "run", progress="off")
        result = dppo.train(config)
        rows = [row for row in result.metrics if row.get("charts/episodic_return") == row.get("charts/episodic_return")]
        curve = [(row["global_step"], row["charts/episodic_return"]) for row in rows if "charts/episodic_return" in row]
        return {"curve": curve, "steps_per_s": result.steps_per_s}


def measure(names: list[str]) -> None:
    """Measure what is missing, and write a line for each."""
    known = {json.loads(line)["name"] for line in RESULTS.read_text().splitlines()} if RESULTS.exists() else set()
    for name, (settings, steps) in TASKS.items():
        if name in known or (names and name not in names):
            continue
        found: dict[str, Any] = {"name": name, "command": " ".join(["dppo train", *flags(settings)])}
        if not settings.get("envs_per_sampler"):  # the doctor examines single environments
            found |= examined(settings)
        found |= learned(settings, steps)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(name, "done", flush=True)


def picture() -> None:
    """Draw a panel for each simulator, and print the table."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    figure, axes = pyplot.subplots(2, 3, figsize=(9, 4.5), layout="constrained")
    shown = [one for one in found if len(one["curve"]) > 4]
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.plot([step / 1000 for step, _ in one["curve"]], [mean for _, mean in one["curve"]], lw=1.2)
        axis.set_title(one["name"], fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    figure.supxlabel("thousand env steps", fontsize=8)
    figure.supylabel("mean return of the latest episodes", fontsize=8)
    figure.savefig(HERE.parent / "docs" / "simulators.png", dpi=110)
    for one in found:
        of = one.get("speed_up", {})
        ups = " | ".join(f"{of[str(actors)]:.1f}" if of else "-" for actors in (1, 2, 8))
        times = f"{one['step_ms']:.2g} | {one['reset_ms']:.2g}" if of else "- | -"
        print(f"| {one['name']} | {one.get('spaces', '-')} | {times} | {ups} | {one['steps_per_s']:,.0f} |")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    picture() if "--picture" in arguments else measure(arguments)
