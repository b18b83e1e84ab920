"""Controllers for tests: of choices, of continuous actions, with a state, and invalid ones."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


def balance(obs: np.ndarray) -> int:
    """Push the cart of CartPole to where the pole leans, which holds it for some 40 steps."""
    return int(obs[2] > 0)


class Integrator:
    """Swing the pendulum by a rule that depends on all observations of the episode."""

    def reset(self) -> None:
        self._sum = 0.0
        self._steps = 0

    def act(self, obs: np.ndarray) -> np.ndarray:
        self._sum = 0.9 * self._sum + float(obs[2])
        self._steps += 1
        return np.clip([np.sin(0.3 * self._steps) + 0.2 * self._sum], -2, 2)


def zeros(obs: Any) -> np.ndarray:
    """Return no torque."""
    return np.zeros(1)


def outside(obs: Any) -> np.ndarray:
    """Return a torque beyond the bounds of Pendulum."""
    return np.full(1, 3.0)


def swing_up(obs: np.ndarray) -> np.ndarray:
    """Pump energy into the pendulum, and hold it at the top."""
    cosine, sine, speed = obs
    angle = np.arctan2(sine, cosine)
    if cosine > 0.9 and abs(speed) < 4:
        torque = -10 * angle - 2.5 * speed
    else:
        energy = speed**2 / 6 + 5 * (cosine - 1)
        torque = -2 * energy * (1 if speed >= 0 else -1)
    return np.clip([torque], -2, 2)


class Cue(gym.Env[np.ndarray, np.ndarray]):
    """Rewards the action that equals the first observation of an episode; later observations are zero."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self._cue = float(self.np_random.choice([-0.5, 0.5]))
        self._steps = 0
        return np.array([self._cue], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, Any]:
        self._steps += 1
        reward = 1 - abs(float(action[0]) - self._cue)
        return np.zeros(1, np.float32), reward, False, self._steps == 8, {}


class Remembering:
    """Return the first observation of the episode at each step."""

    def reset(self) -> None:
        self._first: np.ndarray | None = None

    def act(self, obs: np.ndarray) -> np.ndarray:
        if self._first is None:
            self._first = np.array(obs)
        return self._first
