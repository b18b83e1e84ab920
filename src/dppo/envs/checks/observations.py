"""Checks of observations against their space.

Numbers that are not finite, choices that do not exist and the like are found in the step that returns them. A check of
the limits of floats would cost as much as a small network, so whole segments are compared with these at once.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.returned import LARGEST, BadResult, leaf_named, packer
from dppo.envs.spaces import NUMBERS, choices_of, leaf_spaces, short
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.spaces.spaces import Spaces, is_image, leaves

OVERSHOOT = 0.1  # of the distance between the limits of a number: beyond, the space is wrong
UNLIMITED = 1e30  # a limit of this size stands for none
LEAST_SPREAD = 1e-4  # less variation is noise rather than information
LOST = 0.05  # share of its standard deviation that rounding may take from a number
LARGE = 10.0  # inputs beyond this saturate units of tanh, so that nothing is learned through them
SMALL = 1e-5  # elements that vary by less are lost beside others, and tiny inputs to a network
ADDED = 1e-4  # square root of what the normalizer adds to variances
ROUNDING = 1e-6  # share of the mean that a variation by rounding may have
LEAST_SIGNAL = 1e-12  # less variation is the noise of a solver
OFTEN = 0.9  # quantile of the rows that must be large: a spike now and then does no harm
STILL = 16  # observations in a row; a scene may rest for a few
MASK_NOT_USED = (
    "the info of reset has an action_mask, which is not used. Set action_mask=info to take allowed actions only, or "
    "action_mask=off to leave this message out"
)
MASK_OF_NO_USE = (
    "the info of reset has an action_mask, which is not used: {actions} actions have no choices to allow. Set "
    "action_mask=off to leave this message out"
)


Limits = dict[str, tuple[np.ndarray, np.ndarray]]
"""The least and the largest values of leaves, by name, in the dtypes in which these are stored."""


class SpaceChecks:
    """Compare the environments of a group, and what they return, with their spaces."""

    def __init__(self, envs: Sequence[Any], spaces: Spaces, owner: str, *, limits: bool = False) -> None:
        """Read the spaces of `envs`; raise EnvironmentFault, which `owner` begins, if they differ.

        `pack` converts an observation to the form in which it is stored, or raises BadResult: with `limits`, for any
        outside its space. `pack_last` does so with that of a terminal state, from which nothing is learned.
        """
        self._stored = spaces.returned.base
        self._limits = _limits_as_stored(envs[0].observation_space, spaces.returned)
        pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
        in_steps = {name: own for name, own in self._limits.items() if limits or own[0].dtype.kind != "f"}

        def limited(returned: Any) -> np.ndarray:
            seen = pack(returned)
            check_inside(in_steps, seen.astype(self._stored, copy=False))
            return seen

        self.pack = limited if in_steps else pack
        self.pack_last = self.pack if limits else pack
        self._spaces = [{name: getattr(env, name) for name in ("observation_space", "action_space")} for env in envs]
        for index, known in enumerate(self._spaces):
            for name, space in known.items():
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
    named = leaves(obs)
    for name, (low, high) in limits.items():
        column = named[name]
        least, most = _widened(low, high, overshoot) if overshoot else (low, high)
        inside = (column >= least) & (column <= most)
        if not inside.all():
            at = tuple(int(i) for i in np.argwhere(~inside)[0])
            row, index = at[: column.ndim - low.ndim], at[column.ndim - low.ndim :]
            what = f"{leaf_named(name)} that is {column[at]}{_at(index)}"
            raise BadResult(f"{what}, outside its space from {low[index]} to {high[index]}", row)


def _widened(low: np.ndarray, high: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of floats moved apart by a share of their distance; by one of their size without the other."""
    if low.dtype.kind != "f":
        return low, high
    lowest = low.astype(np.float64)
    highest = high.astype(np.float64)
    bounded = (np.abs(lowest) < UNLIMITED) & (np.abs(highest) < UNLIMITED)
    below = share * np.where(bounded, highest - lowest, np.abs(lowest))
    above = share * np.where(bounded, highest - lowest, np.abs(highest))
    return lowest - below, highest + above


def _limits_as_stored(space: gym.Space[Any], obs: np.dtype[Any]) -> Limits:
    """Return the limits of the leaves of `space` that a stored observation can exceed, rounded as it is."""
    stored, found = leaves(obs), Limits()
    for name, leaf in leaf_spaces(space).items():
        if name not in stored or not isinstance(leaf, NUMBERS):  # a OneOf has no limits of its own
            continue
        dtype, shape = stored[name].base, leaf.shape or ()
        low, high = choices_of(leaf).limits(shape) if not isinstance(leaf, gym.spaces.Box) else (leaf.low, leaf.high)
        if dtype.kind == "f":  # floats must be finite
            low, high = low.astype(dtype), high.astype(dtype)
            most = min(LARGEST, np.finfo(dtype).max)
            found[name] = np.maximum(low, -most, dtype=dtype), np.minimum(high, most, dtype=dtype)
        elif dtype.kind in "iu" and ((low > np.iinfo(dtype).min).any() or (high < np.iinfo(dtype).max).any()):
            found[name] = low.astype(dtype), high.astype(dtype)
    return found


def _at(index: tuple[int, ...]) -> str:
    return f" at index {index[0] if len(index) == 1 else index}" if index else ""


@dataclass
class FirstSegment:
    """Find numbers too large, or too close for float32, a constant image, and an action mask that is not used."""

    spaces: Spaces
    owner: str
    """Prefix of messages."""
    sampler_id: int = 0
    """Its observations and masks are watched if it is the first one: those of the others are alike."""
    integers: bool = True
    """Report integers that float32 cannot tell apart."""
    masks: bool = False
    """Report a mask in the info of the first reset that is not used."""
    scales: bool = False
    """Report floats that are large and not normalized."""
    normalizes: bool = False
    """Report floats that vary too little for their normalization to find them."""
    seen: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Numbers of more digits than float32 has, as they were returned."""

    def watching(self, pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
        """Return `pack` so that numbers of more digits than float32 has are remembered as they were returned."""
        self.seen, kinds = {}, "fiu" if self.integers else "f"

        def watched(returned: Any) -> np.ndarray:
            for name, leaf in leaves(returned).items():
                if isinstance(leaf, np.ndarray | np.number | float | int):
                    dtype = np.asarray(leaf).dtype
                    if dtype.kind in kinds and dtype.itemsize > (4 if dtype.kind == "f" else 3):
                        self.seen.setdefault(name, []).append(np.array(leaf))
            return pack(returned)

        return pack if self.sampler_id else watched

    def findings(self, obs: np.ndarray, *, offers_mask: bool) -> list[Incident]:
        """Return what is odd about the observations [n, E, *O] of the segment, and forget those remembered.

        `offers_mask`: the info of a reset has an action mask.
        """
        spaces, first, seen, self.seen = self.spaces, self.sampler_id == 0, self.seen, {}
        unused = first and self.masks and offers_mask and spaces.mask is None
        note = MASK_NOT_USED if spaces.actions.choices else MASK_OF_NO_USE.format(actions=spaces.actions)
        lost = precision_lost(seen, spaces.returned)  # its remedy is that of large numbers, too
        found = {
            IncidentKind.MASK_NOT_USED: note if unused else None,
            IncidentKind.PRECISION_LOST: lost,
            IncidentKind.LARGE_OBSERVATIONS: large_numbers(obs) if first and self.scales and not lost else None,
            IncidentKind.SMALL_OBSERVATIONS: self._small(obs) if first and not lost else None,
            IncidentKind.IMAGE_CONSTANT: constant_image(obs),
        }
        return [Incident(kind, f"{self.owner}: {text}.") for kind, text in found.items() if text]

    def _small(self, obs: np.ndarray) -> str | None:
        if self.normalizes:
            return small_beside_others(obs, self.spaces.normalized)
        return small_numbers(obs) if self.scales else None


def precision_lost(seen: dict[str, list[np.ndarray]], obs: np.dtype[Any]) -> str | None:
    """Describe the first element of which float32 loses the variation in the numbers `seen`; None if there is none."""
    stored = leaves(obs)
    for name, numbers in seen.items():
        if name not in stored or {one.shape for one in numbers} != {stored[name].shape}:  # those of a OneOf
            continue
        together = np.stack(numbers)
        spread = together.std(axis=0)
        error = np.sqrt(np.square(together - together.astype(np.float32)).mean(axis=0))
        bad = np.argwhere((spread > LEAST_SPREAD) & (error > LOST * spread))
        if len(bad) and stored[name].base != np.float64:
            index = tuple(bad[0].tolist())
            column = together[(slice(None), *index)]
            step = float(np.spacing(np.float32(np.abs(column).max())))
            done = "read by the network" if stored[name].base.kind in "iu" else "stored"
            return (
                f"{leaf_named(name, 'the observation')} is from {column.min():.17g} to {column.max():.17g}{_at(index)}"
                f", and is {done} as float32, whose steps are {step:g} there. Use obs_dtype=float64 with "
                f"norm_obs=True, or subtract an offset in the environment (gymnasium.wrappers.TransformObservation); "
                f"norm_obs alone comes too late, after the rounding"
            )
    return None


def large_numbers(obs: np.ndarray) -> str | None:
    """Describe floats in observations [n, E, *O] of which an element is mostly large; None if there are none."""
    for name, leaf in leaves(obs).items():
        sizes = np.abs(leaf.reshape(leaf.shape[0] * leaf.shape[1], -1))
        if leaf.dtype.kind == "f" and (large := sizes[:, np.quantile(sizes, OFTEN, axis=0) > LARGE]).size:
            return (
                f"{leaf_named(name, 'the observation')} reaches {large.max():.3g}; networks learn from numbers of "
                f"about 1. Use norm_obs=True (--norm-obs), or scale it in the environment"
            )
    return None


def small_numbers(obs: np.ndarray) -> str | None:
    """Describe a leaf of floats in observations [n, E, *O] that are all tiny, and vary; None if there is none."""
    for name, leaf in leaves(obs).items():
        if leaf.dtype.kind != "f" or not leaf.size:
            continue
        rows = leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)
        largest = float(np.abs(rows).max())
        if 0.0 < largest < SMALL and (rows != rows[0]).any():
            return (
                f"{leaf_named(name, 'the observation')} stays below {largest:.3g}; networks learn from numbers of "
                f"about 1. Use norm_obs=True (--norm-obs), or scale it in the environment"
            )
    return None


def small_beside_others(obs: np.ndarray, names: Collection[str] | None) -> str | None:
    """Describe the first element that varies, but far too little beside the largest one; None if there is none.

    All elements of observations [n, E, *O] are normalized with one addition to their variances: see `Moments`.

    `names`: of the leaves that are normalized; None: all that hold floats.
    """
    spreads: dict[str, np.ndarray] = {}
    means: dict[str, np.ndarray] = {}
    for name, leaf in leaves(obs).items():
        if leaf.dtype.kind == "f" and leaf.size and (names is None or name in names):
            rows = leaf.reshape(leaf.shape[0] * leaf.shape[1], -1).astype(np.float64)
            spreads[name] = rows.std(axis=0)
            means[name] = np.abs(rows.mean(axis=0))
    largest = max((float(spread.max()) for spread in spreads.values()), default=0.0)
    if largest < ADDED:  # all are tiny, and normalized by less
        return None
    for name, spread in spreads.items():
        small = np.flatnonzero((spread > LEAST_SIGNAL) & (spread < SMALL) & (spread > ROUNDING * means[name]))
        if small.size:
            varies = spread[small[0]]
            return (
                f"{leaf_named(name, 'the observation')} varies by {varies:.1e} alone at index {small[0]}, and another "
                f"number by {largest:.2g}, so that norm_obs leaves it tiny. If it is a signal, multiply it by about "
                f"{1 / varies:.0e} in the environment (gymnasium.wrappers.TransformObservation)"
            )
    return None


def constant_image(obs: np.ndarray) -> str | None:
    """Describe an image that is the same in all observations [n, E, *O]; None if there is none, or n is small."""
    for name, seen in leaves(obs).items():
        if len(seen) >= STILL and is_image(np.dtype((seen.dtype, seen.shape[2:]))) and (seen == seen[0, 0]).all():
            low, high = seen[0, 0].min(), seen[0, 0].max()
            pixels = f"all of its bytes are {low}" if low == high else f"its bytes are from {low} to {high}"
            return (
                f"{leaf_named(name, 'the observation')} is the same image in all "
                f"{seen.shape[0] * seen.shape[1]:,} observations of the first segment: {pixels}. Save one as a picture "
                f"and look at it; without a display, some simulators draw nothing (with pygame, leave SDL_VIDEODRIVER "
                f"unset)"
            )
    return None
