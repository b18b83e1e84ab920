"""A controller to compare a policy with: PI control of the two tanks of `tanks.py`, with the demand fed forward.

    dppo eval tanks:make --policy pi:PI --info-keys energy violations

Run the command in this folder.
"""

from __future__ import annotations

import math

import numpy as np
from tanks import HEATER, LEVEL, PUMP, TEMPERATURE, VALVE


class PI:
    """Proportional and integral control. The integrals must begin at 0 in each episode."""

    def reset(self) -> None:
        """Begin an episode."""
        self._level_sum = 0.0
        self._temperature_sum = 0.0

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Return the settings of pump, valve and heater, from 0 to 1, as `env.step` takes them."""
        first, second, scaled_temperature, scaled_demand, *_ = obs.tolist()
        temperature = 50 * scaled_temperature
        level_error = LEVEL - second
        temperature_error = TEMPERATURE - temperature
        self._level_sum += level_error
        self._temperature_sum += temperature_error

        # m a minute into the second tank: what is drawn, and what the level lacks
        inflow = scaled_demand / 50 + 0.06 * level_error + 0.002 * self._level_sum
        valve = inflow / (VALVE * math.sqrt(max(0.1, first)))
        pump = (inflow + 0.02 * (LEVEL - first)) / PUMP
        # degrees a minute that the inflow of 10 degrees takes away, and that the temperature lacks
        cooling = (temperature - 10) * max(0.0, inflow) / 0.2
        heating = cooling + 0.5 * temperature_error + 0.01 * self._temperature_sum
        return np.clip([pump, valve, heating / HEATER], 0, 1)
