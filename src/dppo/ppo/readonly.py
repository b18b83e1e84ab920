"""ReadOnly: records whose arrays nobody writes into."""

from __future__ import annotations

from typing import Any

import numpy as np


class ReadOnly:
    """A frozen dataclass with slots whose arrays are not writeable either, also after it was unpickled."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Lock the arrays, those in a tuple too; a view of one that was made before stays as it is."""
        for name in self.__slots__:
            value = getattr(self, name)
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle call the constructor, which locks the arrays again."""
        return type(self), tuple(getattr(self, name) for name in self.__slots__)
