"""Train on an environment of your own: python own_environment.py [STEPS].

From the command line, in this folder: dppo train own_environment:make --num-actors 4 --env-kwargs '{"outside": -5}'
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit

import dppo


class Heating(gym.Env[np.ndarray, np.ndarray]):
    """Keep a room at 21 degrees. Observation [2]: temperature inside and outside. Action [1]: power of the heater."""

    def __init__(self, outside: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-50.0, 50.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.mean_outside = outside
        self.inside = self.outside = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin an episode. Draw from `self.np_random` alone, so that the episode follows from its seed."""
        super().reset(seed=seed)
        self.inside = self.np_random.uniform(10, 20)
        self.outside = self.mean_outside + self.np_random.normal()
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Simulate ten minutes."""
        self.outside += 0.1 * self.np_random.normal()
        self.inside += 0.05 * (self.outside - self.inside) + 2.5 * float(action[0])
        error = abs(self.inside - 21)
        return self._obs(), -error, False, False, {"is_success": error < 1}

    def _obs(self) -> np.ndarray:
        return np.array([self.inside, self.outside], np.float32)


def make(outside: float = 0.0) -> gym.Env[np.ndarray, np.ndarray]:
    """Return the environment with its wrappers. A day ends by truncation, which is not a failure."""
    return TimeLimit(Heating(outside), 144)


if __name__ == "__main__":
    config = dppo.Config(
        env_id=make,  # or "own_environment:make", which the command line can resume
        env_kwargs={"outside": -5.0},
        total_timesteps=int(sys.argv[1]) if len(sys.argv) > 1 else 100_000,
        learning_rate=1e-3,
        norm_obs=True,
        norm_reward=True,
    )
    result = dppo.train(config)
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
