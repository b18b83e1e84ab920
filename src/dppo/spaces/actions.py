"""Action spaces as plain data, and the conversion of a policy's actions to the environment's actions.

A policy's action is one number, or one vector for all parts of a composite space: choices are counted from 0, and
continuous actions are not limited yet. `to_env` turns n of them into n actions of the environment's own space.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from typing_extensions import override

Bounds = Literal["clip", "squash", "rescale"]
SATURATION = 0.98  # share of a bound that counts as the bound: tanh never reaches 1
# symmetric bounds that a new policy, of mean 0 and standard deviation 1, covers by itself
MIN_COVERED = 0.25
MAX_COVERED = 2.0
# distance of a Box's centre from 0 that counts as symmetric, in units of half its width
MAX_OFF_CENTRE = 0.1
MAX_LISTED_COUNTS = 8
NO_BOUND = 1e9  # a finite bound beyond this, such as the largest float32, stands for none


class Actions(ABC):
    """An action space."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of elements of a policy's action."""

    @property
    def choices(self) -> tuple[int, ...] | None:
        """The number of choices of each element, which an action mask lists; None where masks do not apply."""
        return None

    @abstractmethod
    def to_env(self, actions: np.ndarray) -> Any:
        """Convert `actions` [n, *A]: an array [n, ...], or a dict or tuple of such arrays. Its arrays are new."""

    @abstractmethod
    def from_env(self, action: Any) -> np.ndarray:
        """Return the policy's action [*A] that `to_env` converts to `action`, an element of the environment's space.

        For a bound that no action of a policy reaches, as with tanh, return an action that is as good as the bound.
        """

    def half_widths(self) -> np.ndarray:
        """Return half the distance between the bounds of each element [width], in units of the policy's actions.

        It is 1 where there are no bounds, and for choices.
        """
        return np.ones(self.width)

    def each(self, actions: np.ndarray) -> Any:
        """Convert `actions` [n, *A] to a sequence of n actions, each for one `env.step`."""
        converted = self.to_env(actions)
        if converted.ndim > 1:
            return converted
        return [np.array(action) for action in converted]  # arrays of shape (), not NumPy's scalars

    @abstractmethod
    def __str__(self) -> str:
        """Format as `Discrete(2)`."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Store the space under one key that names its kind; `actions_from_json` reads it."""


@dataclass(frozen=True, slots=True)
class DiscreteActions(Actions):
    """One of n choices, which the environment numbers from `start`."""

    n: int
    start: int = 0

    width = 1

    @property
    @override
    def choices(self) -> tuple[int, ...]:
        return (self.n,)

    @override
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return actions + self.start

    @override
    def from_env(self, action: Any) -> np.ndarray:
        return np.array(int(action) - self.start)

    @override
    def each(self, actions: np.ndarray) -> Any:
        if self.start:
            actions = actions + self.start
        return actions.tolist()  # integers of Python

    def __str__(self) -> str:
        if self.start:
            return f"Discrete({self.n}, start={self.start})"
        return f"Discrete({self.n})"

    @override
    def as_json(self) -> dict[str, Any]:
        return {"discrete": asdict(self)}


@dataclass(frozen=True, slots=True)
class BoxActions(Actions):
    """An array of continuous actions within bounds."""

    low: np.ndarray
    """[*A] of the space's dtype."""
    high: np.ndarray
    """[*A]"""
    bounds: Bounds = "clip"
    """Map of a policy's actions into [low, high]: clip; rescale: clip to [-1, 1], then linear; squash: tanh, then
    linear. Elements with an infinite bound are clipped in any case."""
    _ends: tuple[np.ndarray, np.ndarray] = field(init=False, repr=False, compare=False)
    """Lower and upper ends [*A] that [-1, 1] is mapped to; some others for elements that are not mapped."""
    _is_mapped: np.ndarray | None = field(init=False, repr=False, compare=False)
    """[*A]: which elements are mapped; None: all of them, or none with clip."""

    def __post_init__(self) -> None:
        is_mapped = self.mapped()
        low = np.where(is_mapped, self.low, -1).astype(np.float64)
        high = np.where(is_mapped, self.high, 1).astype(np.float64)
        object.__setattr__(self, "_ends", (low, high))
        mapped = None if self.bounds == "clip" or is_mapped.all() else is_mapped
        object.__setattr__(self, "_is_mapped", mapped)

    def mapped(self) -> np.ndarray:
        """Return which elements [*A] are mapped to their bounds: with clip, none; otherwise, those of finite bounds."""
        if self.bounds == "clip":
            return np.zeros(self.shape, bool)
        return np.isfinite(self.low) & np.isfinite(self.high)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an environment's action."""
        return self.low.shape

    @property
    @override
    def width(self) -> int:
        return int(self.low.size)

    @override
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Reshape actions [n, width] to the box, and bring them within its bounds (detail 27)."""
        shaped = actions.reshape(len(actions), *self.shape)
        if self.bounds != "clip":
            unit = np.tanh(shaped) if self.bounds == "squash" else np.clip(shaped, -1, 1)
            low, high = self._ends
            mapped = low + (unit + 1) * (0.5 * (high - low))
            shaped = (
                mapped if self._is_mapped is None else np.where(self._is_mapped, mapped, shaped)
            )
        return np.clip(shaped, self.low, self.high).astype(self.low.dtype)

    @override
    def from_env(self, action: Any) -> np.ndarray:
        flat = np.clip(np.asarray(action, np.float64).reshape(-1), *self._flat_limits())
        if self.bounds == "clip":
            return flat
        low, high = (end.reshape(-1) for end in self._ends)
        unit = 2 * (flat - low) / (high - low) - 1
        if self.bounds == "squash":
            unit = np.arctanh(np.clip(unit, -SATURATION, SATURATION))
        if self._is_mapped is None:
            return unit
        return np.where(self._is_mapped.reshape(-1), unit, flat)

    @override
    def half_widths(self) -> np.ndarray:
        if self.bounds != "clip":
            return np.ones(self.width)
        low, high = self._flat_limits()
        return np.where(has_bounds(low, high), high / 2 - low / 2, 1.0)

    def _flat_limits(self) -> tuple[np.ndarray, np.ndarray]:
        return self.low.reshape(-1).astype(np.float64), self.high.reshape(-1).astype(np.float64)

    def saturated_at(self) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper limits [width]: a policy's action at or beyond a limit becomes a bound."""
        low, high = self._flat_limits()
        if self.bounds == "clip":
            return low, high
        limit = 1.0
        if self.bounds != "rescale":
            limit = math.atanh(SATURATION)
        is_mapped = self.mapped().reshape(-1)
        return np.where(is_mapped, -limit, low), np.where(is_mapped, limit, high)

    def __str__(self) -> str:
        """Return `Box[3]`, without the bounds: `to_env` takes them from the space that the policy was trained with."""
        return f"Box{list(self.shape)}"

    @override
    def as_json(self) -> dict[str, Any]:
        described = {
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "dtype": str(self.low.dtype),
        }
        if self.bounds != "clip":
            described["bounds"] = self.bounds
        return {"box": described}


@dataclass(frozen=True, slots=True)
class MultiDiscreteActions(Actions):
    """An array of independent choices: a MultiDiscrete, a MultiBinary, or a Box of a few integers."""

    counts: tuple[int, ...]
    """Number of choices of each element, flat."""
    starts: tuple[int, ...]
    """First choice of each element, as the environment counts."""
    shape: tuple[int, ...]
    """Shape of an environment's action."""
    dtype: str
    """Dtype of an environment's action."""

    @property
    @override
    def width(self) -> int:
        return len(self.counts)

    @property
    @override
    def choices(self) -> tuple[int, ...]:
        return self.counts

    @property
    def is_binary(self) -> bool:
        """True if the space is a MultiBinary."""
        return set(self.counts) == {2} and not any(self.starts) and self.dtype == "int8"

    @override
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return (
            (actions + np.array(self.starts)).astype(self.dtype).reshape(len(actions), *self.shape)
        )

    @override
    def from_env(self, action: Any) -> np.ndarray:
        flat = np.asarray(action).reshape(-1).astype(np.int64)
        return flat - np.array(self.starts)

    def __str__(self) -> str:
        """Return `MultiDiscrete[3, 2]`; only the number of elements where that would be long."""
        if self.is_binary:
            return f"MultiBinary{list(self.shape)}"
        starts = ""
        if any(self.starts):
            starts = f", start={list(self.starts)}"
        if self.width <= MAX_LISTED_COUNTS:
            return f"MultiDiscrete{list(self.counts)}{starts}"
        choices = str(min(self.counts))
        if max(self.counts) > min(self.counts):
            choices += f" to {max(self.counts)}"
        return f"MultiDiscrete of {self.width} elements with {choices} choices"

    @override
    def as_json(self) -> dict[str, Any]:
        return {"multi_discrete": asdict(self)}


@dataclass(frozen=True, slots=True)
class NestedActions(Actions):
    """A Dict or a Tuple of action spaces. A policy's action holds the actions of the parts side by side."""

    parts: tuple[Actions, ...]
    keys: tuple[str, ...] | None
    """Keys of a Dict, in the order of the parts; None for a Tuple."""

    @property
    @override
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    @property
    @override
    def choices(self) -> tuple[int, ...] | None:
        """The choices of all parts, one after the other; None if no part has any."""
        counts = tuple(count for part in self.parts for count in part.choices or ())
        return counts or None

    @override
    def to_env(self, actions: np.ndarray) -> Any:
        return self._nested(
            [part.to_env(part_actions) for part, part_actions in self._split(actions)]
        )

    @override
    def from_env(self, action: Any) -> np.ndarray:
        values = list(action) if self.keys is None else [action[key] for key in self.keys]
        parts = [
            part.from_env(value).reshape(-1) for part, value in zip(self.parts, values, strict=True)
        ]
        return np.concatenate(parts)

    @override
    def half_widths(self) -> np.ndarray:
        return np.concatenate([part.half_widths() for part in self.parts])

    @override
    def each(self, actions: np.ndarray) -> list[Any]:
        columns = [part.each(part_actions) for part, part_actions in self._split(actions)]
        return [self._nested([column[row] for column in columns]) for row in range(len(actions))]

    def __str__(self) -> str:
        """Return `Dict(arm: Box[3], gear: Discrete(4))`, or a Tuple without keys."""
        if self.keys is None:
            return f"Tuple({', '.join(map(str, self.parts))})"
        parts = ", ".join(f"{key}: {part}" for key, part in zip(self.keys, self.parts, strict=True))
        return f"Dict({parts})"

    @override
    def as_json(self) -> dict[str, Any]:
        described: dict[str, Any] = {"parts": [part.as_json() for part in self.parts]}
        if self.keys is not None:
            described["keys"] = list(self.keys)
        return {"nested": described}

    def _nested(self, parts: list[Any]) -> Any:
        if self.keys is None:
            return tuple(parts)
        return dict(zip(self.keys, parts, strict=True))

    def _split(self, actions: np.ndarray) -> Iterator[tuple[Actions, np.ndarray]]:
        """Yield each part with its columns of the policy's actions."""
        start = 0
        for part in self.parts:
            part_actions = actions[:, start : start + part.width]
            start += part.width
            if isinstance(part, DiscreteActions | MultiDiscreteActions):
                # stored as floats beside continuous parts
                part_actions = part_actions.astype(np.int64)
            if isinstance(part, DiscreteActions):
                part_actions = part_actions[:, 0]
            yield part, part_actions


def innermost(actions: Actions) -> Iterator[Actions]:
    """Yield the parts of `actions` that hold no others, in the order of the policy's numbers."""
    if isinstance(actions, NestedActions):
        for part in actions.parts:
            yield from innermost(part)
    else:
        yield actions


def with_allowed_choices(actions: Actions, action: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Replace choices of one action, as a policy makes it, that its mask [M] forbids by the first allowed ones."""
    allowed_action = np.array(action)  # of a single choice, `action` is a number
    elements = allowed_action.reshape(-1)  # a view
    for part in innermost(actions):
        for element, count in enumerate(part.choices or ()):
            allowed = mask[:count]
            mask = mask[count:]
            if not allowed[int(elements[element])]:
                elements[element] = allowed.argmax()
        elements = elements[part.width :]
    return allowed_action


def boxes(actions: Actions) -> Iterator[BoxActions]:
    """Yield the parts of `actions` that are continuous."""
    return (part for part in innermost(actions) if isinstance(part, BoxActions))


def continuous_width(actions: Actions) -> int:
    """Return the number of continuous components of an action; 0 if all actions are discrete."""
    return sum(box.width for box in boxes(actions))


def is_continuous(actions: Actions) -> bool:
    """True if all elements of an action are continuous; the parts of a Dict or Tuple count."""
    return continuous_width(actions) == actions.width


def has_bounds(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return which elements have two finite bounds, neither of them so large that it stands for none."""
    largest = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
    return largest <= NO_BOUND


def is_covered_at_first(low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether all bounds are symmetric and about [-1, 1], so that clipped actions of a new policy cover them.

    With bounds of [0, 1], half of its actions would be 0, because its mean is the lower bound.
    """
    half_width = (high.astype(np.float64) - low) / 2
    centre = (high.astype(np.float64) + low) / 2
    is_near_one = (half_width >= MIN_COVERED) & (half_width <= MAX_COVERED)
    is_symmetric = np.abs(centre) <= MAX_OFF_CENTRE * half_width
    return bool(np.all(is_near_one & is_symmetric))


def actions_from_json(described: dict[str, Any]) -> Actions:
    """Convert the result of `Actions.as_json` back; raise KeyError, TypeError or ValueError if it is not valid."""
    ((kind, values),) = described.items()
    if kind == "discrete":
        return DiscreteActions(**values)
    if kind == "box":
        low = np.array(values["low"], values["dtype"])
        high = np.array(values["high"], values["dtype"])
        return BoxActions(low, high, values.get("bounds", "clip"))
    if kind == "multi_discrete":
        counts = tuple(values["counts"])
        starts = tuple(values["starts"])
        shape = tuple(values["shape"])
        if not len(counts) == len(starts) == math.prod(shape):
            raise ValueError(f"actions of shape {shape} with {len(counts)} counts")
        return MultiDiscreteActions(counts, starts, shape, values["dtype"])
    keys = values.get("keys")
    parts = tuple(actions_from_json(part) for part in values["parts"])
    return NestedActions(parts, None if keys is None else tuple(keys))
