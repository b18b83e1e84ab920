"""Measure the effect of the policy lag of `overlap` on learning: the same seeds with and without it.

    python benchmarks/overlap_learning.py                      all four environments: about half an hour on one core
    python benchmarks/overlap_learning.py --only cartpole --seeds 3

LunarLander needs `gymnasium[box2d]`, HalfCheetah `dppo[mujoco]`. The figures depend only on the seeds, not
on the number of actors, so this trains in process. docs/RESULTS.md shows the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from learning import HERE, commit, learned

SB3_DEFAULTS = {"num_samplers": 8, "num_steps": 256, "minibatch_size": 64, "update_epochs": 10, "learning_rate": 3e-4}
ROWS: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1", "total_timesteps": 200_000, "num_samplers": 8, "num_steps": 128},
    "pendulum": {
        "env_id": "Pendulum-v1",
        "total_timesteps": 100_000,
        "num_samplers": 4,
        "num_steps": 512,
        "minibatch_size": 64,
        "update_epochs": 10,
        "learning_rate": 1e-3,
        "gamma": 0.9,
        "ent_coef": 0.0,
    },
    "lunarlander": {"env_id": "LunarLander-v3", "total_timesteps": 300_000, **SB3_DEFAULTS, "ent_coef": 0.01},
    "halfcheetah": {
        "env_id": "HalfCheetah-v5",
        "total_timesteps": 300_000,
        **SB3_DEFAULTS,
        "ent_coef": 0.0,
        "norm_obs": True,
        "norm_reward": True,
    },
}


def main() -> int:
    """Train every row on its seeds, with and without overlap; print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ROWS), nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=HERE / "overlap_learning.json")
    flags = parser.parse_args()
    report: dict[str, Any] = {"commit": commit(), "rows": {}}
    for name in flags.only:
        runs: dict[str, list[dict[str, Any]]] = {"in turns": [], "overlap": []}
        for seed in range(1, flags.seeds + 1):  # in turns, so that an interrupted run has both
            for how, one in runs.items():
                one.append(learned({**ROWS[name], "overlap": how == "overlap"}, seed))
                print(
                    f"  {name}, {how}, seed {seed}: train {one[-1]['train']:.1f}, eval {one[-1]['eval']:.1f}",
                    flush=True,
                )
        report["rows"][name] = {"settings": ROWS[name], "runs": runs}
        print(f"{name}: " + "; ".join(f"{how}: {summary(one)}" for how, one in runs.items()), flush=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def summary(runs: list[dict[str, Any]]) -> str:
    """Return mean and standard error over the seeds, of training and of evaluation."""
    parts = []
    for figure in ("train", "eval"):
        values = [run[figure] for run in runs]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        parts.append(f"{figure} {fmean(values):.1f} +- {error:.1f}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
