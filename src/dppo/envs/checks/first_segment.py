"""FirstSegment: warnings about observations of the first segment that are valid but unusual."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dppo.envs.checks.observations import at_index
from dppo.envs.checks.returned import leaf_named
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.spaces.spaces import Spaces, is_image, leaves

MIN_SPREAD = 1e-4  # less variation is noise rather than information
MAX_LOSS = 0.05  # share of its standard deviation that rounding may take from a number
LARGE = 10.0  # inputs beyond this saturate units of tanh, so that nothing is learned through them
SMALL = 1e-5  # elements that vary by less are lost beside others, and tiny inputs to a network
ADDED = 1e-4  # square root of what the normalizer adds to variances
ROUNDING = 1e-6  # share of the mean that a variation by rounding may have
MIN_SIGNAL = 1e-12  # less variation is the noise of a solver
OFTEN = 0.9  # quantile of the rows that must be large: a spike now and then does no harm
STILL = 16  # observations in a row; a scene may rest for a few
SCALE_IT = "networks learn from numbers of about 1. Use norm_obs=True (--norm-obs), or scale it in the environment"
MASK_NOT_USED = (
    "the info of reset has an action_mask, which is not used. Set action_mask=info to take allowed actions only, or "
    "action_mask=off to leave this message out"
)
MASK_OF_NO_USE = (
    "the info of reset has an action_mask, which is not used: {actions} actions have no choices to allow. Set "
    "action_mask=off to leave this message out"
)


@dataclass
class FirstSegment:
    """Find numbers too large, or too close for float32, a constant image, and an action mask that is not used."""

    spaces: Spaces
    owner: str
    """Prefix of messages."""
    sampler_id: int = 0
    """Index of the sampler. Only sampler 0 checks numbers and masks: all samplers produce the same kind."""
    integers: bool = True
    """Report integers that float32 cannot distinguish."""
    masks: bool = False
    """Report a mask in the info of the first reset that is not used."""
    scales: bool = False
    """Report floats that are large and not normalized."""
    normalizes: bool = False
    """Report floats that vary too little for their normalization to find them."""
    precise: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Numbers of more digits than float32 has, as they were returned, by the name of the leaf."""

    def watch(self, pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
        """Remember numbers of more digits than float32 has as they are returned; return `pack` so that it does that."""
        self.precise = {}
        if self.sampler_id:
            return pack
        exact_bytes = {"f": 4}
        if self.integers:
            exact_bytes |= {"i": 3, "u": 3}

        def watched(returned: Any) -> np.ndarray:
            for name, leaf in leaves(returned).items():
                if isinstance(leaf, np.ndarray | np.number | float | int):
                    dtype = np.asarray(leaf).dtype
                    if dtype.itemsize > exact_bytes.get(dtype.kind, math.inf):
                        self.precise.setdefault(name, []).append(np.array(leaf))
            return pack(returned)

        return watched

    def take_findings(self, obs: np.ndarray, *, offers_mask: bool) -> list[Incident]:
        """Return warnings about unusual observations [n, E, *O] of the segment, and forget remembered observations.

        `offers_mask`: the info of a reset has an action mask.
        """
        spaces = self.spaces
        is_first = self.sampler_id == 0
        lost_precision = precision_lost(self.precise, spaces.returned)
        self.precise = {}
        problems: dict[IncidentKind, str | None] = {}
        if is_first and self.masks and offers_mask and spaces.mask is None:
            note = MASK_NOT_USED
            if not spaces.actions.choices:
                note = MASK_OF_NO_USE.format(actions=spaces.actions)
            problems[IncidentKind.MASK_NOT_USED] = note
        problems[IncidentKind.PRECISION_LOST] = lost_precision
        # large, small and lost numbers have the same remedy
        if is_first and not lost_precision:
            if self.scales:
                problems[IncidentKind.LARGE_OBSERVATIONS] = large_numbers(obs)
            problems[IncidentKind.SMALL_OBSERVATIONS] = self._small(obs)
        problems[IncidentKind.IMAGE_CONSTANT] = constant_image(obs)
        return [
            Incident(kind, f"{self.owner}: {problem}.")
            for kind, problem in problems.items()
            if problem
        ]

    def _small(self, obs: np.ndarray) -> str | None:
        if self.normalizes:
            return small_element(obs, self.spaces.normalized)
        if self.scales:
            return small_numbers(obs)
        return None


def precision_lost(precise: dict[str, list[np.ndarray]], obs: np.dtype[Any]) -> str | None:
    """Describe the first element whose variation float32 rounds away; None if there is none."""
    stored = leaves(obs)
    for name, numbers in precise.items():
        # parts of a OneOf
        if name not in stored or {number.shape for number in numbers} != {stored[name].shape}:
            continue
        dtype = stored[name].base
        stacked = np.stack(numbers)
        spread = stacked.std(axis=0)
        error = np.sqrt(np.square(stacked - stacked.astype(np.float32)).mean(axis=0))
        indices = np.argwhere((spread > MIN_SPREAD) & (error > MAX_LOSS * spread))
        if len(indices) and dtype != np.float64:
            index = tuple(indices[0].tolist())
            place = (slice(None), *index)
            column = stacked[place]
            step = float(np.spacing(np.float32(np.abs(column).max())))
            uses = {"f": "stored", "i": "read by the network", "u": "read by the network"}
            return (
                f"{leaf_named(name, 'the observation')} is from {column.min():.17g} to {column.max():.17g}"
                f"{at_index(index)}, and is {uses[dtype.kind]} as float32, whose steps are {step:g} there. Use "
                f"obs_dtype=float64 with norm_obs=True, or subtract an offset in the environment "
                f"(gymnasium.wrappers.TransformObservation); norm_obs alone comes too late, after the rounding"
            )
    return None


def _rows_of_floats(obs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and rows [n * E, size] of each leaf of floats in observations [n, E, *O]."""
    for name, leaf in leaves(obs).items():
        if leaf.dtype.kind == "f" and leaf.size:
            yield name, leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)


def large_numbers(obs: np.ndarray) -> str | None:
    """Describe floats in observations [n, E, *O] of which an element is mostly large; None if there are none."""
    for name, rows in _rows_of_floats(obs):
        sizes = np.abs(rows)
        large = sizes[:, np.quantile(sizes, OFTEN, axis=0) > LARGE]
        if large.size:
            return f"{leaf_named(name, 'the observation')} reaches {large.max():.3g}; {SCALE_IT}"
    return None


def small_numbers(obs: np.ndarray) -> str | None:
    """Describe a leaf of floats in observations [n, E, *O] that are all tiny, and vary; None if there is none."""
    for name, rows in _rows_of_floats(obs):
        largest = float(np.abs(rows).max())
        if 0.0 < largest < SMALL and (rows != rows[0]).any():
            return f"{leaf_named(name, 'the observation')} stays below {largest:.3g}; {SCALE_IT}"
    return None


def small_element(obs: np.ndarray, names: Collection[str] | None) -> str | None:
    """Describe the first element that varies far less than the largest one; None if there is none.

    All elements of observations [n, E, *O] are normalized with one addition to their variances: see `Moments`.

    `names`: of the leaves that are normalized; None: all that hold floats.
    """
    spreads: dict[str, np.ndarray] = {}
    means: dict[str, np.ndarray] = {}
    for name, rows in _rows_of_floats(obs):
        if names is None or name in names:
            spreads[name] = rows.astype(np.float64).std(axis=0)
            means[name] = np.abs(rows.astype(np.float64).mean(axis=0))
    largest = max((float(spread.max()) for spread in spreads.values()), default=0.0)
    if largest < ADDED:  # all are tiny, and normalized by less
        return None
    for name, spread in spreads.items():
        small = np.flatnonzero(
            (spread > MIN_SIGNAL) & (spread < SMALL) & (spread > ROUNDING * means[name])
        )
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
    for name, images in leaves(obs).items():
        num_steps, num_envs, *shape = images.shape
        dtype = np.dtype((images.dtype, tuple(shape)))
        image = images[0, 0]
        if num_steps < STILL or not is_image(dtype) or (images != image).any():
            continue
        low = image.min()
        high = image.max()
        pixels = f"its bytes are from {low} to {high}"
        if low == high:
            pixels = f"all of its bytes are {low}"
        return (
            f"{leaf_named(name, 'the observation')} is the same image in all {num_steps * num_envs:,} observations of "
            f"the first segment: {pixels}. Save one as a picture and look at it; without a display, some simulators "
            f"draw nothing (with pygame, leave SDL_VIDEODRIVER unset)"
        )
    return None
