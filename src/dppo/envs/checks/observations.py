"""Checks of observations against their space.

Numbers that are not finite, choices that do not exist and the like are found in the step that returns them. A check of
the limits of floats would cost as much as a small network, so whole segments are compared with these at once.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.returned import LARGEST, BadResult, leaf_named, packer
from dppo.envs.spaces import ARRAYS, leaf_spaces, limits_of, short
from dppo.errors import EnvironmentFault
from dppo.spaces.spaces import Spaces, leaves

# share of the distance between the limits of a number; farther outside, the space is wrong
OVERSHOOT = 0.1
UNLIMITED = 1e30  # a limit of this size stands for none
SPACES = ("observation_space", "action_space")
Limits = dict[str, tuple[np.ndarray, np.ndarray]]
"""The lowest and the highest values of leaves, by name, in the dtypes in which these are stored."""


class SpaceChecks:
    """Compare the environments of a group, and what they return, with their spaces."""

    def __init__(
        self, envs: Sequence[Any], spaces: Spaces, owner: str, *, limits: bool = False
    ) -> None:
        """Read the spaces of `envs`; raise EnvironmentFault, which `owner` begins, if they differ.

        `pack` converts an observation to the form in which it is stored, or raises BadResult: with `limits`, for any
        outside its space. `pack_last` does so with the observation of a terminal state, from which nothing is learned.
        """
        self._stored = spaces.returned.base
        self._limits = _limits_as_stored(envs[0].observation_space, spaces.returned)
        pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
        limits_in_steps = {
            name: (low, high)
            for name, (low, high) in self._limits.items()
            if limits or low.dtype.kind != "f"
        }

        def limited(returned: Any) -> np.ndarray:
            obs = pack(returned)
            check_inside(limits_in_steps, obs.astype(self._stored, copy=False))
            return obs

        self.pack = limited if limits_in_steps else pack
        self.pack_last = self.pack if limits else pack
        self._spaces = [{name: getattr(env, name) for name in SPACES} for env in envs]
        first = self._spaces[0]
        for index, env_spaces in enumerate(self._spaces):
            for name, space in env_spaces.items():
                if space != first[name]:
                    raise EnvironmentFault(
                        f"{owner}, env {index}: has {name}={short(space)}, but env 0 has {short(first[name])}. All "
                        f"environments of a run must have equal spaces."
                    )

    def change(self, env: int, env_now: gym.Env[Any, Any]) -> str | None:
        """Describe how the spaces of an environment have changed; None if they are equal."""
        env_spaces = self._spaces[env]
        for name, old_space in env_spaces.items():
            new_space = getattr(env_now, name)
            if new_space is not old_space and new_space != old_space:
                return (
                    f"changed {name} from {short(old_space)} to {short(new_space)}. Spaces must not change after the "
                    f"environment is made."
                )
            env_spaces[name] = new_space  # equal, and compared faster from here on
        return None

    def check_limits(self, obs: np.ndarray) -> None:
        """Raise BadResult for one of the observations [...] outside its space."""
        check_inside(self._limits, obs.astype(self._stored, copy=False))

    def far_outside(self, obs: np.ndarray) -> BadResult | None:
        """Return the first of the observations [...] so far outside its space that the space is wrong, if one is."""
        try:
            check_inside(self._limits, obs.astype(self._stored, copy=False), overshoot=OVERSHOOT)
        except BadResult as outside:
            return outside
        return None


def check_inside(limits: Limits, obs: np.ndarray, overshoot: float = 0.0) -> None:
    """Raise BadResult, with its `row`, for the first of the stored observations [...] that is outside of `limits`.

    Floats may exceed them by `overshoot`, a share of the distance between the limits.
    """
    columns = {"": obs} if obs.dtype.names is None else leaves(obs)
    for name, (low, high) in limits.items():
        column = columns[name]
        lowest, highest = _widened(low, high, overshoot) if overshoot else (low, high)
        inside = (column >= lowest) & (column <= highest)
        if not inside.all():
            place = tuple(int(index) for index in np.argwhere(~inside)[0])
            raise _outside(name, column, place, (low, high))


def _outside(
    name: str, column: np.ndarray, place: tuple[int, ...], limits: tuple[np.ndarray, np.ndarray]
) -> BadResult:
    """Describe the number of a leaf, at a place in its column [...], that is outside of the limits."""
    low, high = limits
    row = place[: column.ndim - low.ndim]
    index = place[column.ndim - low.ndim :]
    problem = f"{leaf_named(name)} that is {column[place]}{at_index(index)}"
    return BadResult(f"{problem}, outside its space from {low[index]} to {high[index]}", row)


def _widened(low: np.ndarray, high: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of floats moved apart by a share of their distance; by one of their size if one is missing."""
    if low.dtype.kind != "f":
        return low, high
    lowest = low.astype(np.float64)
    highest = high.astype(np.float64)
    is_bounded = (np.abs(lowest) < UNLIMITED) & (np.abs(highest) < UNLIMITED)
    distance = highest - lowest
    below = share * np.where(is_bounded, distance, np.abs(lowest))
    above = share * np.where(is_bounded, distance, np.abs(highest))
    return lowest - below, highest + above


def _limits_as_stored(space: gym.Space[Any], obs: np.dtype[Any]) -> Limits:
    """Return the limits of the leaves of `space` that a stored observation can exceed, rounded as it is."""
    stored = leaves(obs)
    limits: Limits = {}
    for name, leaf in leaf_spaces(space).items():
        if name not in stored or not isinstance(leaf, ARRAYS):  # a OneOf has no limits of its own
            continue
        dtype = stored[name].base
        low, high = limits_of(leaf)
        if dtype.kind == "f":  # floats must be finite
            largest = min(LARGEST, np.finfo(dtype).max)
            limits[name] = (
                np.maximum(low.astype(dtype), -largest, dtype=dtype),
                np.minimum(high.astype(dtype), largest, dtype=dtype),
            )
        elif dtype.kind in "iu" and (
            (low > np.iinfo(dtype).min).any() or (high < np.iinfo(dtype).max).any()
        ):
            limits[name] = low.astype(dtype), high.astype(dtype)
    return limits


def at_index(index: tuple[int, ...]) -> str:
    """Return how messages name the place of an element, if there are several."""
    if not index:
        return ""
    place = index[0] if len(index) == 1 else index
    return f" at index {place}"
