"""Measure what a policy lag costs in learning: the same seeds with several lags, and otherwise the default settings.

    python benchmarks/overlap_learning.py                      all environments: hours on one core
    python benchmarks/overlap_learning.py --only cartpole --seeds 3 --lags 0 1

LunarLander needs `gymnasium[box2d]`, HalfCheetah `dppo[mujoco]`. The figures depend on the seeds, not on the number
of actors, so this trains in process. Runs that the JSON file holds are not repeated.
results/policy_lag.md shows the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from learning import commit, learned
from measure import HERE

ROWS: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1", "total_timesteps": 50_000, "update_epochs": 10},
    "lunarlander": {"env_id": "LunarLander-v3", "total_timesteps": 150_000, "update_epochs": 10},
    "halfcheetah": {"env_id": "HalfCheetah-v5", "total_timesteps": 300_000},
}
FIGURES = {"curve": "whole run", "train": "last 100", "eval": "greedy"}


def main() -> int:
    """Train every row on its seeds, with every lag; print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(ROWS), nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--json", type=Path, default=HERE / "overlap_learning.json")
    flags = parser.parse_args()
    runs = json.loads(flags.json.read_text())["runs"] if flags.json.exists() else {}
    for name in flags.only:
        for seed in range(1, flags.seeds + 1):  # lags in turn, so that an interrupted run has all
            for lag in flags.lags:
                key = f"{name} {lag} {seed}"
                if key not in runs:
                    runs[key] = learned({**ROWS[name], "policy_lag": lag}, seed, preset=None)
                    flags.json.write_text(
                        json.dumps({"commit": commit(), "rows": ROWS, "runs": runs}, indent=1)
                        + "\n"
                    )
                    print(
                        f"  {key}: "
                        + ", ".join(f"{one} {figure(runs[key], one):.1f}" for one in FIGURES),
                        flush=True,
                    )
        print(
            f"{name}, {', '.join(f'{title}: mean +- standard error' for title in FIGURES.values())}"
        )
        for lag in flags.lags:
            seeds = [runs[f"{name} {lag} {seed}"] for seed in range(1, flags.seeds + 1)]
            print(
                f"| {lag} | {' | '.join(summary([figure(run, one) for run in seeds]) for one in FIGURES)} |",
                flush=True,
            )
    return 0


def figure(run: dict[str, Any], name: str) -> float:
    """Return a figure of a run; of a curve, the mean over the run."""
    return fmean(point[1] for point in run["curve"]) if name == "curve" else float(run[name])


def summary(values: list[float]) -> str:
    """Return mean and standard error over the seeds."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{fmean(values):,.1f} +- {error:.1f}"


if __name__ == "__main__":
    sys.exit(main())
