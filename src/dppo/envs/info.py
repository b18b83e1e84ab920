"""Numbers in the info of an environment: of its steps in a segment, and of the last step of an episode."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Measured = tuple[int, float, float, float]
"""Number of values, their sum, the least and the largest."""
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
MOST_BITS = 1000  # of an integer, for a float to hold it


def numbers_in(info: Any) -> dict[str, float]:
    """Return the finite numbers of an info by name."""
    items = info.items() if isinstance(info, dict) else ()
    found = ((key, value) for key, value in items if isinstance(value, NUMBERS))
    small = ((key, value) for key, value in found if not isinstance(value, int) or value.bit_length() <= MOST_BITS)
    return {str(key): float(value) for key, value in small if math.isfinite(value)}


class InfoMeter:
    """Sums up some numbers in the info of a sampler's env steps, in the order of these."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self.clear()

    def clear(self) -> None:
        """Forget the steps so far."""
        self._seen: dict[str, Measured] = {}

    def watch(self, env: Any) -> Any:
        """Return `env`, whose steps are measured from now on."""
        step = env.step

        def measured(action: Any) -> Any:
            answer = step(action)
            if isinstance(answer, tuple | list) and len(answer) == 5 and isinstance(answer[4], dict):
                self._add(numbers_in({key: answer[4][key] for key in self._keys if key in answer[4]}))
            return answer

        env.step = measured
        return env

    def _add(self, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            count, total, low, high = self._seen.get(key, (0, 0.0, value, value))
            self._seen[key] = count + 1, total + value, min(low, value), max(high, value)

    def take(self) -> dict[str, Measured]:
        """Return what was measured since the last call."""
        seen = self._seen
        self.clear()
        return seen
