"""Tune with Ray Tune, which stops the worse half of the trials early: python tune_ray.py [TRIALS] [STEPS].

Each trial collects in its own process, and Ray Tune runs as many at a time as there are CPUs. It needs ray[tune].
"""

import math
import sys
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import dppo

OUT = Path("runs/tune_ray").absolute()


class Report(dppo.Observer):
    """Report each iteration to Ray Tune, which ends the process of a trial that is not worth more steps."""

    def on_iteration(self, row: dict[str, float]) -> None:
        episodic_return = row.get("charts/episodic_return", -math.inf)
        tune.report({"episodic_return": episodic_return, "global_step": int(row["global_step"])})


def trial(settings: dict[str, Any]) -> None:
    config = dppo.Config(
        env_id="CartPole-v1",  # "mysim:make" for your own
        progress="off",
        run_dir=Path(tune.get_context().get_trial_dir()) / "run",
        **settings,
    )
    dppo.train(config, observers=[Report()])


def main(trials: int = 20, steps: int = 30_000) -> None:
    dppo.portable_numerics()  # before Ray starts, whose processes inherit it
    space = {
        "learning_rate": tune.loguniform(1e-4, 1e-2),
        "gamma": tune.choice([0.95, 0.98, 0.99, 0.999]),
        "num_steps": tune.choice([32, 64, 128]),
        "total_timesteps": steps,
    }
    halving = ASHAScheduler(
        time_attr="global_step", max_t=2 * steps, grace_period=max(1, steps // 4)
    )
    how = tune.TuneConfig(
        metric="episodic_return", mode="max", num_samples=trials, scheduler=halving
    )
    tuner = tune.Tuner(
        trial, param_space=space, tune_config=how, run_config=tune.RunConfig(storage_path=str(OUT))
    )
    results = tuner.fit()
    best = results.get_best_result()
    print(
        f"{len(results)} trials, best mean return {best.metrics['episodic_return']:.1f} with {best.config}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
