"""A plant to control: two tanks in a row with a pump, a valve and a heater, whose hot water is drawn by a town.

    dppo doctor tanks:make
    dppo train tanks:make --num-actors 8 --algo sac

Run the commands in this folder. An episode is a day, and each of its 96 steps a quarter of an hour. `step_s` stands
for the time that a real simulator takes for a step.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium as gym
import numpy as np

QUARTERS = 96  # of an hour, in a day
LEVEL, TEMPERATURE = 1.0, 60.0  # set points of the second tank, in m and degrees Celsius
# at most, in m of level a minute and degrees a minute in a full tank
PUMP, VALVE, HEATER = (0.06, 0.06, 8.0)


class Tanks(gym.Env[np.ndarray, np.ndarray]):
    """Keep level and temperature of the second tank, with little energy."""

    observation_space = gym.spaces.Box(-1, 2, (6,), np.float32)
    action_space = gym.spaces.Box(0, 1, (3,), np.float32)  # pump, valve, heater

    def __init__(self, step_s: float = 0.0) -> None:
        """Prepare; `step_s` is slept in each step."""
        self._step_s = step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a day with other levels, another temperature and another demand."""
        super().reset(seed=seed)
        self._levels = self.np_random.uniform(0.5, 1.5, 2)
        self._temperature = self.np_random.uniform(40, 60)
        self._size = self.np_random.uniform(0.7, 1.3)  # of the town
        self._quarter = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Simulate a quarter of an hour, minute by minute."""
        time.sleep(self._step_s)
        pump, valve, heater = np.clip(action, 0, 1).tolist()
        for _ in range(15):
            into_second = VALVE * valve * math.sqrt(max(0.0, self._levels[0]))
            drawn = min(self._demand(), self._levels[1])
            # cold water of 10 degrees
            mixed = (10.0 - self._temperature) * into_second / max(0.2, self._levels[1])
            heated = HEATER * heater * 0.2 / max(0.2, self._levels[1])
            self._temperature = float(np.clip(self._temperature + mixed + heated - 0.02, 5.0, 95.0))
            self._levels[0] = np.clip(self._levels[0] + PUMP * pump - into_second, 0.0, 2.0)
            self._levels[1] = np.clip(self._levels[1] + into_second - drawn, 0.0, 2.0)
        self._quarter += 1
        off_level, off_temperature = (
            abs(self._levels[1] - LEVEL),
            abs(self._temperature - TEMPERATURE) / 10,
        )
        energy = 0.05 * pump + 0.1 * heater
        info = {"energy": energy, "violations": float(off_level > 0.3 or off_temperature > 0.5)}
        return (
            self._observation(),
            -off_level - off_temperature - energy,
            False,
            self._quarter == QUARTERS,
            info,
        )

    def _demand(self) -> float:
        """Return the level that is drawn in a minute: most in the morning and in the evening."""
        hour = self._quarter / 4
        peaks = math.exp(-((hour - 7) ** 2) / 4) + math.exp(-((hour - 19) ** 2) / 6)
        return self._size * (0.004 + 0.016 * peaks)

    def _observation(self) -> np.ndarray:
        angle = 2 * math.pi * self._quarter / QUARTERS
        demand = 50 * self._demand()
        return np.array(
            [*self._levels, self._temperature / 50, demand, math.sin(angle), math.cos(angle)],
            np.float32,
        )


def make(**settings: Any) -> gym.Env[np.ndarray, np.ndarray]:
    """Return the plant."""
    return Tanks(**settings)


class Controller:
    """What runs such plants today: proportional control with the demand fed forward."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Return pump, valve and heater."""
        first, second, temperature, demand, *_ = observation.tolist()
        needed = demand / 50 + 0.02 * (LEVEL - second)
        pump = (needed + 0.02 * (LEVEL - first)) / PUMP
        valve = needed / (VALVE * math.sqrt(max(0.1, first)))
        cooling = (50 * temperature - 10) * max(0.0, needed) / 0.2
        heater = (cooling + 0.5 * (TEMPERATURE - 50 * temperature)) / HEATER
        return np.clip([pump, valve, heater], 0, 1)


def play(act: Any, days: int = 20) -> float:
    """Return the mean return of a function of the observation."""
    env, returns = Tanks(), []
    for seed in range(days):
        observation, _ = env.reset(seed=seed)
        returns.append(0.0)
        ended = False
        while not ended:
            observation, reward, _, ended, _ = env.step(act(observation))
            returns[-1] += reward
    return float(np.mean(returns))


if __name__ == "__main__":
    print(f"the controller of today: {play(Controller().act):.1f}")
    print(f"everything half open: {play(lambda _: np.full(3, 0.5)):.1f}")
    print(f"nothing: {play(lambda _: np.zeros(3)):.1f}")
