"""Learn to control the flow of examples/simulators/openfoam.py, and draw it: 2,880 env steps, 5 minutes on a core.

    python benchmarks/openfoam_picture.py --run runs/openfoam --picture docs/openfoam.png

Left: returns of evaluations, beside the controllers `Steady` and `Best`. Right: the velocity in three episodes of the
trained policy. A run that is in the folder is continued, or drawn if it has ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dppo
from dppo.slots.slots import Slots
from dppo.tools.pictures.style import COLOURS, DPI, GREY, PALE

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "simulators"
EPISODES = 8  # of an evaluation
SETTINGS: dict[str, Any] = {
    "env_id": "openfoam:make",
    "critic_obs": ("field",),
    "algo": "sac",
    "noise": "white",
    "gradient_steps": 4,
    "learning_starts": 240,
    "num_samplers": 4,
    "num_steps": 12,
    "gamma": 0.9,
    "total_timesteps": 2880,
    "eval_every": 480,
    "eval_episodes": EPISODES,
    "info_keys": ("velocity",),
}
SHOWN = (3, 0, 4)  # seeds of the episodes on the right


def evaluations_of(run_dir: Path) -> np.ndarray:
    """Return env steps and mean return of each evaluation, [evaluations, 2]."""
    dppo.train(dppo.Config(**SETTINGS, run_dir=run_dir), resume="auto")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    keys = ("eval/global_step", "eval/episodic_return")
    return np.array([[row[key] for key in keys] for row in rows if keys[0] in row])


def play(act: Callable[[Any], np.ndarray], seed: int) -> tuple[float, np.ndarray, float]:
    """Return target, velocities and return of an episode."""
    openfoam = importlib.import_module("openfoam")
    with tempfile.TemporaryDirectory() as folder:
        env = openfoam.make(folder, Slots())
        observation, info = env.reset(seed=seed)
        velocities = [0.0]
        rewards = []
        is_over = False
        while not is_over:
            observation, reward, _, is_over, info = env.step(act(observation))
            velocities.append(info["velocity"])
            rewards.append(reward)
    return info["target"], np.array(velocities), float(np.sum(rewards))


def draw(run_dir: Path, path: Path) -> None:
    """Draw the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    openfoam = importlib.import_module("openfoam")
    evaluations = evaluations_of(run_dir)
    figure = Figure(figsize=(9, 3.6), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE)
        axes.tick_params(colors=GREY, length=0, labelsize=9)

    left.plot(*evaluations.T, color=COLOURS[0], marker="o", markersize=3, label="policy")
    for controller, style in ((openfoam.Best, "-"), (openfoam.Steady, ":")):
        name = controller.__name__
        played = dppo.evaluate(controller(), env="openfoam:make", episodes=EPISODES)
        mean = float(np.mean(played.returns))
        print(f"{name}: {mean:.3f}")
        left.axhline(mean, color=GREY, linestyle=style, linewidth=1.2, label=f"{name} ({mean:.2f})")
    left.set_xlabel("env steps", color=GREY)
    left.set_ylabel(f"mean return of {EPISODES} episodes", color=GREY)
    left.legend(frameon=False, loc="lower right", fontsize=9)

    policy = dppo.load_policy(run_dir, trust=True)
    for seed, colour in zip(SHOWN, COLOURS, strict=False):
        target, velocities, total = play(policy.act, seed)
        print(f"target {target:.2f}: return {total:.3f}")
        right.plot(velocities, color=colour, marker="o", markersize=3)
        right.axhline(target, color=colour, linestyle=(0, (2, 2)), linewidth=1)
    right.set_xlabel("step of the episode", color=GREY)
    right.set_ylabel("velocity, and its target (dashed)", color=GREY)
    figure.savefig(path)
    print(f"policy: {evaluations[-1, 1]:.3f} after {evaluations[-1, 0]:,.0f} env steps")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--picture", type=Path, required=True)
    words = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(EXAMPLES), os.getenv("PYTHONPATH")])
    )
    draw(words.run, words.picture)


if __name__ == "__main__":
    main()
