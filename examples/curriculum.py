"""A curriculum: an observer makes the task harder when the policy is good enough.

    python examples/curriculum.py

`set_env` changes the options with which new episodes are reset. The change takes effect in an iteration that depends on
nothing but the iteration in which it is asked for, and it is stored in checkpoints: the result is the same with any
number of actors, and after a kill and a resume. An observer like this one decides from the row of metrics and from
`env_options` alone, so that it decides in the same way after a resume.
"""

import sys
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import dppo

LEVELS = (0.25, 0.5, 1.0)  # half the length of the pole: a short one falls faster


class Pole(CartPoleEnv):
    """CartPole whose pole has the length that the reset asks for."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.length = (options or {}).get("length", LEVELS[-1])
        self.polemass_length = self.masspole * self.length
        return super().reset(seed=seed)


def make() -> gym.Env:
    return gym.wrappers.TimeLimit(Pole(), 200)


class Curriculum(dppo.Observer):
    def __init__(self, good: float = 40.0) -> None:
        self.good = good

    def on_start(self, run: dppo.RunInfo) -> None:
        self.run = run
        run.set_env(length=LEVELS[-1])  # ignored when a run is resumed, which has its own

    def on_iteration(self, row: dict[str, float]) -> None:
        level = LEVELS.index(self.run.env_options["length"])
        if level > 0 and row.get("charts/episodic_return", 0.0) > self.good * (len(LEVELS) - level):
            self.run.set_env(length=LEVELS[level - 1])
            print(f"after {row['global_step']:,} steps: length {LEVELS[level - 1]}")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_480
    # or any number of actors
    config = dppo.Config(env_id=make, num_actors=0, total_timesteps=steps, progress="plain")
    print(dppo.train(config, observers=[Curriculum()]))
