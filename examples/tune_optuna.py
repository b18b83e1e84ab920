"""Tune with Optuna, several trials at a time on one Ray: python tune_optuna.py [TRIALS] [STEPS].

Each trial is a run with actors of its own; the study is a file that the trials share, and a second call continues it. A
trial that is worse than the median of the others stops early. `dppo tune` does this for one trial at a time, with a
search space for PPO; write your own when the space or the objective is your own. docs/RUNS.md compares the ways.
"""

import math
import sys
from pathlib import Path

import optuna
import ray

import dppo

AT_ONCE = 2  # trials; each has one actor here
OUT = Path("runs/tune_optuna").absolute()
STORAGE = f"sqlite:///{OUT}/study.db"


class Prune(dppo.Observer):
    """Report the mean return of a trial after each tenth of its steps, and stop it if others were better."""

    def __init__(self, trial: optuna.Trial, steps: int) -> None:
        self.trial, self.steps, self.tenth = trial, steps, 0

    def on_iteration(self, row: dict[str, float]) -> bool:
        tenth = int(10 * row["global_step"] / self.steps)
        if tenth == self.tenth or "charts/episodic_return" not in row:
            return False
        self.tenth = tenth
        self.trial.report(row["charts/episodic_return"], tenth)
        return self.trial.should_prune()


def objective(trial: optuna.Trial, steps: int) -> float:
    config = dppo.Config(
        env_id="CartPole-v1",  # "mysim:make" for your own
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        gamma=1 - trial.suggest_float("one_minus_gamma", 1e-3, 0.05, log=True),
        num_steps=trial.suggest_categorical("num_steps", [32, 64, 128]),
        total_timesteps=steps,
        num_actors=1,
        progress="off",
        run_dir=OUT / f"trial_{trial.number}",
    )
    result = dppo.train(config, observers=[Prune(trial, steps)])
    if result.stopped_by is not None or math.isnan(result.episodic_return):
        raise optuna.TrialPruned
    return result.episodic_return


@ray.remote(num_cpus=0)  # the actors of its trials take the CPUs
def work(trials: int, steps: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(study_name="dppo", storage=STORAGE)
    enough = optuna.study.MaxTrialsCallback(trials, states=None)
    study.optimize(lambda trial: objective(trial, steps), callbacks=[enough])


def main(trials: int = 20, steps: int = 30_000) -> None:
    dppo.portable_numerics()  # before Ray starts, whose processes inherit it
    ray.init()  # address="auto" for a cluster; the folder of the study must then be on a disk that its nodes share
    OUT.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="dppo", storage=STORAGE, direction="maximize", load_if_exists=True
    )
    if len(study.trials) < trials:
        ray.get([work.remote(trials, steps) for _ in range(AT_ONCE)])
    print(
        f"{len(study.trials)} trials, best mean return {study.best_value:.1f} with {study.best_params}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
