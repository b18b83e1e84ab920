"""Measure a step through dppo.h over a Unix socket, beside the same task as a Python environment.

    python benchmarks/solver_step.py            # needs a C compiler; some seconds

Prints the median of the means of several rounds, in microseconds a step: both kinds take turns in this process.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np

import dppo
from dppo.remote import make

SOURCE = """
#define DPPO_IMPLEMENTATION
#include "dppo.h"
int main(void) {
  double level[64] = {0}, inflow[3];
  dppo *d = dppo_open(DPPO_DOUBLE, "level[64]", "inflow[3](-1:1)");
  for (;;) {
    int reply = dppo_step(d, level, level[0], DPPO_RUNNING, inflow);
    if (reply == DPPO_STOP) break;
    if (reply == DPPO_RESET) level[0] = 0;
    else level[0] = 0.9 * level[0] + 0.1 * inflow[0];
  }
  dppo_close(d);
}
"""


class Level(gym.Env[np.ndarray, np.ndarray]):
    """The task of SOURCE."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (64,), np.float64)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float64)
        self._level = np.zeros(64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._level[0] = 0.0
        return self._level.copy(), {}

    def step(self, action: np.ndarray) -> Any:
        self._level[0] = 0.9 * self._level[0] + 0.1 * action[0]
        return self._level.copy(), float(self._level[0]), False, False, {}


def step_us(env: gym.Env, steps: int) -> float:
    """Return the mean time of a step, in microseconds."""
    action = np.full(3, 0.5)
    env.reset(seed=1)
    began = time.perf_counter()
    for _ in range(steps):
        env.step(action)
    return (time.perf_counter() - began) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    include = Path(dppo.__file__).parent / "remote"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "solver.c")
        source.write_text(SOURCE)
        program = Path(folder, "solver")
        subprocess.run(
            ["cc", "-O2", "-I", str(include), str(source), "-o", str(program)], check=True
        )
        solver = make([str(program)], scratch_dir=folder)
        envs: dict[str, gym.Env] = {"a solver with dppo.h": solver, "in Python": Level()}
        times: dict[str, list[float]] = {name: [] for name in envs}
        for _ in range(options.rounds):
            for name, env in envs.items():
                times[name].append(step_us(env, options.steps))
        for env in envs.values():
            env.close()
    for name, measured in times.items():
        print(f"{name}: {median(measured):.1f} us a step")


if __name__ == "__main__":
    main()
