"""Numbers in the info of env steps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
MAX_BITS = 1000  # of an integer, so that a float holds it
Measured = tuple[int, float, float, float]
"""Number of values, their sum, the least and the largest."""


def numbers_in(info: Any, keys: Sequence[str] | None = None) -> dict[str, float]:
    """Return the finite numbers of an info by name; only those with one of these `keys`, unless they are None."""
    numbers: dict[str, float] = {}
    if not isinstance(info, dict):
        return numbers
    for key in info if keys is None else keys:
        value = info.get(key)
        if not isinstance(value, NUMBERS) or (
            isinstance(value, int) and value.bit_length() > MAX_BITS
        ):
            continue
        number = float(value)
        if math.isfinite(number):
            numbers[str(key)] = number
    return numbers


class InfoMeter:
    """Sum up numbers in the info of a sampler's env steps, in the order of these steps."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._measured = dict[str, Measured]()

    def add(self, info: Any) -> None:
        """Add the numbers of a step."""
        for key, value in numbers_in(info, self._keys).items():
            count, total, least, largest = self._measured.get(key, (0, 0.0, value, value))
            self._measured[key] = count + 1, total + value, min(least, value), max(largest, value)

    def take(self) -> dict[str, Measured]:
        measured = self._measured
        self._measured = {}
        return measured
