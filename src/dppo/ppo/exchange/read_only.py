"""Frozen records whose arrays are read-only, too."""

from __future__ import annotations

from typing import Any

import numpy as np


class ReadOnly:
    """Base of frozen dataclasses with slots whose arrays are read-only too, also after unpickling."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make the arrays read-only, also those in a tuple; existing views of them stay writeable."""
        for name in self.__slots__:
            value = getattr(self, name)
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickle call the constructor, which makes the arrays read-only again."""
        return type(self), tuple(getattr(self, name) for name in self.__slots__)
