"""Controllers for tests: of choices, of continuous actions, with a state, and invalid ones."""

from __future__ import annotations

from typing import Any

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
