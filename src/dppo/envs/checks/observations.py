"""Checks of observations against their space.

A check of each step would cost as much as a small network, so whole segments are checked at once. Only numbers that
are not finite cannot wait: the sampler looks for them before each decision, in all its environments at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.faults import BadResult
from dppo.envs.spaces.leaves import leaf_spaces, short
from dppo.envs.spaces.packing import LARGEST
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import EnvLog
from dppo.spaces.spaces import leaves


@dataclass(frozen=True, slots=True)
class Outside:
    """An observation outside its space."""

    row: tuple[int, ...]
    """Index of the observation."""
    what: str
    """The leaf, the number and its limits. It continues "... returned"."""
    fatal: bool
    """Nothing can be learned from it: it is not finite, or it counts choices or pixels that do not exist."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one leaf, in the dtype in which it is stored."""

    name: str
    low: np.ndarray
    high: np.ndarray


class SpaceChecks:
    """Compare the environments of a group, and what they return, with their spaces."""

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], obs: np.dtype[Any], owner: str) -> None:
        """Read the spaces of `envs`, whose observations are stored as `obs`; `owner` is a prefix of messages.

        Raises:
            EnvironmentFault: the spaces are not equal.
        """
        self._obs = obs
        names = ("observation_space", "action_space")
        self._spaces = [{name: getattr(env, name) for name in names} for env in envs]
        self._limits = _limits_as_stored(envs[0].observation_space, obs)
        for index, spaces in enumerate(self._spaces):
            for name, space in spaces.items():
                if space != self._spaces[0][name]:
                    raise EnvironmentFault(
                        f"{owner}, env {index}: has {name}={short(space)}, but env 0 has "
                        f"{short(self._spaces[0][name])}. All environments of a run must have equal spaces."
                    )

    def change(self, env: int, now: gym.Env[Any, Any]) -> str | None:
        """Describe how the spaces of an environment have changed; None if they are equal."""
        known = self._spaces[env]
        for name, old in known.items():
            new = getattr(now, name)
            if new is not old and new != old:
                return (
                    f"changed {name} from {short(old)} to {short(new)}. Spaces must not change after the environment "
                    f"is made."
                )
            known[name] = new  # equal, and compared faster from here on
        return None

    def outside(self, obs: np.ndarray) -> Outside | None:
        """Return the first of the stored observations [...] that is outside its space; None if all are inside."""
        return first_outside(self._limits, obs)

    def stored(self, seen: np.ndarray) -> np.ndarray:
        """Return a copy of one observation in the dtype in which it is stored."""
        stored = np.empty((), self._obs)
        stored[...] = seen
        return stored

    def check_limits(self, seen: np.ndarray) -> None:
        """Raise BadResult for an observation outside its space."""
        outside = self.outside(self.stored(seen)[None])
        if outside is not None:
            raise BadResult(outside.what)

    def limiting(self, pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
        """Return `pack` so that it raises BadResult for an observation outside its space, too."""

        def limited(returned: Any) -> np.ndarray:
            seen = pack(returned)
            self.check_limits(seen)
            return seen

        return limited


def quick_packer(obs: np.dtype[Any], pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Return `pack` with a short cut for arrays of the right form, whose numbers are checked later.

    The sampler looks for those that are not finite before it acts on them, `SpaceChecks.outside` at the others.
    """
    dtype, shape = np.dtype(obs.base.type), obs.shape  # the object that arrays of this dtype share
    array = np.ndarray

    def quick(returned: Any) -> np.ndarray:
        if type(returned) is array and returned.dtype is dtype and returned.shape == shape:
            return returned.copy()
        return pack(returned)

    return quick if obs.names is None else pack


def first_outside(limits: Sequence[Limits], obs: np.ndarray) -> Outside | None:
    """Return the first of the stored observations [...] that is outside of `limits`; None if all are inside."""
    named = leaves(obs) if obs.dtype.names else {"": obs}
    for one in limits:
        column = named[one.name]
        inside = (column >= one.low) & (column <= one.high)
        if not inside.all():
            return _described(one, column, inside)
    return None


def place_in(row: int, done: np.ndarray, log: EnvLog, env: int, open_episode: int, open_length: int) -> tuple[int, int]:
    """Return the episode of an observation of a segment, and its step; step 0 is the reset.

    Args:
        row: index of the observation, 0 <= row <= T.
        done: [T] of the environment, in whose segment no episode was dropped.
        open_episode, open_length: of the episode that is open after the segment.
    """
    before, after = np.flatnonzero(done[:row]), np.flatnonzero(done[row:])
    if len(before):
        step = row - int(before[-1]) - 1
    elif len(after):
        first = next(episode for episode in log.episodes if episode.env == env)
        step = first.length - int(after[0]) - 1
    else:
        step = open_length - (len(done) - row)
    return open_episode - len(after), step


def _limits_as_stored(space: gym.Space[Any], obs: np.dtype[Any]) -> list[Limits]:
    """Return the limits of the leaves of `space` that a stored observation can exceed, rounded as it is."""
    stored, found = leaves(obs), []
    for name, leaf in leaf_spaces(space).items():
        low, high = _limits_of(leaf)
        if low is None or name not in stored:
            continue
        dtype = stored[name].base
        if dtype.kind == "f":  # floats must be finite
            low, high = low.astype(dtype), high.astype(dtype)
            low, high = np.maximum(low, -LARGEST, dtype=dtype), np.minimum(high, LARGEST, dtype=dtype)
            found.append(Limits(name, low, high))
        elif dtype.kind in "iu" and ((low > np.iinfo(dtype).min).any() or (high < np.iinfo(dtype).max).any()):
            found.append(Limits(name, low.astype(dtype), high.astype(dtype)))
    return found


def _limits_of(space: gym.Space[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest numbers of a leaf; (None, None) for a kind that has none."""
    if isinstance(space, gym.spaces.Box):
        return space.low, space.high
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        count = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        return np.asarray(space.start), np.asarray(space.start + count - 1)
    if isinstance(space, gym.spaces.MultiBinary):
        return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)
    return None, None


def _described(limits: Limits, column: np.ndarray, inside: np.ndarray) -> Outside:
    leading = column.ndim - limits.low.ndim
    at = tuple(int(i) for i in np.argwhere(~inside)[0])
    row, index = at[:leading], at[leading:]
    what = f"observation leaf {limits.name!r}" if limits.name else "an observation"
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    low, high = limits.low[index], limits.high[index]
    if not np.isfinite(column[at]):
        return Outside(row, f"{what} that is {column[at]}{place}", fatal=True)
    inside_of = f"outside its space from {low} to {high}"
    return Outside(row, f"{what} that is {column[at]}{place}, {inside_of}", fatal=column.dtype.kind != "f")
