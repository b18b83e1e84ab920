"""Compare learning with one global shuffle and with each learner shuffling its own rows: returns over seeds.

    python benchmarks/shuffles.py                       all rows: about half an hour on two cores
    python benchmarks/shuffles.py --only cartpole --seeds 3

results/learners.md shows the results, which depend only on the seeds and the number of learners.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from measure import HERE, REPO, machine, ours_environment

# With the preset of CartPole the batch is one minibatch, so that shuffling has no effect; here it is four.
ROWS: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1", "minibatch_size": 64},
    "pendulum": {"env_id": "Pendulum-v1"},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--learners",
        type=int,
        nargs="+",
        default=[0, 2],
        help="0: train in the driver, with one global shuffle",
    )
    parser.add_argument("--json", type=Path, default=HERE / "shuffles.json", help="where to write")
    options = parser.parse_args()
    os.environ.update(ours_environment())  # for Ray's processes
    sys.path.insert(0, str(REPO / "src"))
    from dppo.config import Actors, Learners
    from dppo.transports.ray.session import RaySession, demand_of

    report: dict[str, Any] = {"machine": machine(), "rows": {}}
    actors = Actors(num_actors=1)
    session = RaySession(  # one for all runs
        actors,
        demand_of(actors, Learners(num_learners=max(1, *options.learners))),
        store_bytes=256 * 2**20,
        notify=lambda text: None,
    )
    try:
        for name in options.only:
            report["rows"][name] = {learners: [] for learners in options.learners}
            for seed in range(1, options.seeds + 1):
                for learners in options.learners:
                    report["rows"][name][learners].append(one(name, seed, learners))
                    # after each run, so that a crash loses none
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        session.close()
    for name, by_learners in report["rows"].items():
        for learners, runs in by_learners.items():
            for figure in ("train", "eval"):
                print(
                    f"{name}, {learners} learners, {figure}: {in_words([run[figure] for run in runs])}"
                )
    print(f"Written: {options.json}")
    return 0


def one(name: str, seed: int, learners: int) -> dict[str, Any]:
    """Train and evaluate one seed."""
    from learning import learned

    from dppo.config.presets import presets

    settings = presets()[ROWS[name]["env_id"]] | ROWS[name]
    done = learned(settings | {"num_learners": learners, "num_actors": 1 if learners else 0}, seed)
    print(
        f"{name}, seed {seed}, {learners} learners: train {done['train']:.1f}, eval {done['eval']:.1f}, "
        f"{done['seconds']:.0f} s, weights {done['weights_sha256'][:12]}",
        flush=True,
    )
    return done


def in_words(figures: list[float]) -> str:
    """Return the mean, its standard error, and the range."""
    error = stdev(figures) / math.sqrt(len(figures)) if len(figures) > 1 else math.nan
    spread = f"from {min(figures):.1f} to {max(figures):.1f}"
    return f"{fmean(figures):.1f} +- {error:.1f} over {len(figures)} seeds, {spread}"


if __name__ == "__main__":
    sys.exit(main())
