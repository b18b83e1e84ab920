"""Checks of observations against their space, and against the precision in which they are stored.

A check of each step would cost as much as a small network, so whole segments are checked at once. Only numbers that
are not finite cannot wait: the sampler looks for them before each decision, in all its environments at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.precision import PrecisionWatch
from dppo.envs.checks.results import BadResult
from dppo.envs.spaces.advice import short
from dppo.envs.spaces.packing import LARGEST
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import EnvLog
from dppo.spaces.spaces import is_image, leaves

STILL = 16  # observations in a row; a scene may rest for a few


@dataclass(frozen=True, slots=True)
class Outside:
    """An observation outside its space."""

    row: tuple[int, ...]
    """Index of the observation."""
    what: str
    """The leaf, the number and its limits. It continues "... returned"."""
    fatal: bool
    """Nothing can be learnt from it: it is not finite, or it counts choices or pixels that do not exist."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one leaf, in the dtype in which it is stored."""

    name: str
    low: np.ndarray
    high: np.ndarray


class SpaceChecks:
    """Compare the environments of a group, and what they return, with their spaces."""

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], obs: np.dtype[Any], owner: str) -> None:
        """Read the spaces of `envs`.

        Args:
            obs: dtype in which observations are stored.
            owner: prefix of error messages.

        Raises:
            EnvironmentFault: the spaces are not equal.
        """
        self._obs = obs
        self._spaces = [_spaces(env) for env in envs]
        self._limits = _limits_as_stored(envs[0].observation_space, obs)
        self._watch: PrecisionWatch | None = None
        self._reported_outside = False
        for index, spaces in enumerate(self._spaces):
            for name, space in spaces.items():
                if space != self._spaces[0][name]:
                    raise EnvironmentFault(
                        f"{owner}, env {index}: has {name}={short(space)}, but env 0 has "
                        f"{short(self._spaces[0][name])}. All environments of a run must have equal spaces."
                    )

    def change(self, env: int, now: gym.Env[Any, Any]) -> str | None:
        """Describe how the spaces of an environment have changed; None if they are equal."""
        spaces = self._spaces[env]
        if now.observation_space is spaces["observation_space"] and now.action_space is spaces["action_space"]:
            return None
        for name, old in spaces.items():
            new = getattr(now, name)
            if new is not old:
                if new != old:
                    return (
                        f"changed {name} from {short(old)} to {short(new)}. Spaces must not change after the "
                        f"environment is made."
                    )
                self._spaces[env][name] = new  # equal, and compared faster from here on
        return None

    # ------------------------------------------------------------------ limits

    def outside(self, obs: np.ndarray) -> Outside | None:
        """Return the first of the stored observations [...] that is outside its space; None if all are inside."""
        return first_outside(self._limits, obs)

    def stored(self, seen: np.ndarray) -> np.ndarray:
        """Return a copy of one observation in the dtype in which it is stored."""
        stored = np.empty((), self._obs)
        stored[...] = seen
        return stored

    def check_limits(self, seen: np.ndarray) -> None:
        """Check one observation.

        Raises:
            BadResult: it is outside its space.
        """
        outside = self.outside(self.stored(seen)[None])
        if outside is not None:
            raise BadResult(outside.what)

    def report_outside(self) -> bool:
        """Return True the first time, so that an overshooting simulator is reported once."""
        reported, self._reported_outside = self._reported_outside, True
        return not reported

    # ------------------------------------------------------------------ precision

    def watching(self, pack: Callable[[Any], np.ndarray], *, integers: bool) -> Callable[[Any], np.ndarray]:
        """Return `pack` so that each observation is remembered, to be compared with its form in float32."""
        self._watch = watch = PrecisionWatch(integers=integers)

        def watched(raw: Any) -> np.ndarray:
            watch.see(raw)
            return pack(raw)

        return watched

    def precision_lost(self) -> str | None:
        """Describe a number that is lost by storing it; None if there is none, or none was watched."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.finding(self._obs)


def first_outside(limits: Sequence[Limits], obs: np.ndarray) -> Outside | None:
    """Return the first of the stored observations [...] that is outside of `limits`; None if all are inside."""
    for one in limits:
        column = leaves(obs)[one.name] if one.name else obs
        inside = (column >= one.low) & (column <= one.high)
        if not inside.all():
            return _described(one, column, inside)
    return None


def constant_image(obs: np.ndarray) -> str | None:
    """Describe an image that is the same in all observations [n, E, *O]; None if there is none, or n is small."""
    for name, seen in leaves(obs).items():
        if len(seen) >= STILL and is_image(np.dtype((seen.dtype, seen.shape[2:]))) and (seen == seen[0, 0]).all():
            low, high = seen[0, 0].min(), seen[0, 0].max()
            pixels = f"all of its bytes are {low}" if low == high else f"its bytes are from {low} to {high}"
            return (
                f"{f'observation leaf {name!r}' if name else 'the observation'} is the same image in all "
                f"{seen.shape[0] * seen.shape[1]:,} observations of the first segment: {pixels}. Save one as a picture "
                f"and look at it; without a display, some simulators draw nothing (with pygame, leave SDL_VIDEODRIVER "
                f"unset)"
            )
    return None


def quick_packer(obs: np.dtype[Any], pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Return `pack` with a short cut for arrays of the right form, whose numbers are checked later.

    The sampler looks for those that are not finite before it acts on them, `SpaceChecks.outside` at the others.
    """
    dtype, shape = np.dtype(obs.base.type), obs.shape  # the object that arrays of this dtype share
    array = np.ndarray

    def quick(raw: Any) -> np.ndarray:
        if type(raw) is array and raw.dtype is dtype and raw.shape == shape:
            return raw.copy()
        return pack(raw)

    return quick if obs.names is None else pack


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


def _spaces(env: gym.Env[Any, Any]) -> dict[str, gym.Space[Any]]:
    return {"observation_space": env.observation_space, "action_space": env.action_space}


def _limits_as_stored(space: gym.Space[Any], obs: np.dtype[Any]) -> list[Limits]:
    """Return the limits of the leaves of `space` that a stored observation can exceed."""
    stored = leaves(np.empty(1, obs))
    found = [one for one in _limits_of(space, "") if _can_be_exceeded(one, stored.get(one.name))]
    return [_as_stored(one, stored[one.name].dtype) for one in found]


def _as_stored(limits: Limits, dtype: np.dtype[Any]) -> Limits:
    """Round limits as observations are rounded; those of floats are finite."""
    low, high = limits.low.astype(dtype), limits.high.astype(dtype)
    if dtype.kind == "f":
        low, high = np.maximum(low, -LARGEST, dtype=dtype), np.minimum(high, LARGEST, dtype=dtype)
    return Limits(limits.name, low, high)


def _limits_of(space: gym.Space[Any], name: str) -> Iterator[Limits]:
    """Yield the limits of each leaf; leaves of other kinds have none."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
        for part, inner in parts:
            yield from _limits_of(inner, f"{name}.{part}" if name else str(part))
    elif isinstance(space, gym.spaces.Box):
        yield Limits(name, space.low, space.high)
    elif isinstance(space, gym.spaces.Discrete):
        yield Limits(name, np.asarray(space.start), np.asarray(space.start + space.n - 1))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield Limits(name, np.asarray(space.start), np.asarray(space.start + space.nvec - 1))
    elif isinstance(space, gym.spaces.MultiBinary):
        yield Limits(name, np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8))


def _can_be_exceeded(limits: Limits, stored: np.ndarray | None) -> bool:
    """Return whether a leaf is stored in the shape of its space, in a dtype that reaches beyond the limits."""
    if stored is None or stored.shape[1:] != limits.low.shape:
        return False
    if stored.dtype.kind == "f":
        return True  # by what is not finite
    if stored.dtype.kind not in "iu":
        return False
    least, most = np.iinfo(stored.dtype).min, np.iinfo(stored.dtype).max
    return bool((limits.low > least).any() or (limits.high < most).any())


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
