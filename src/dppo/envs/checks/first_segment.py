"""FirstSegment: diagnostics of what environments return, in the first segment only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.spaces.spaces import Spaces, is_image, leaves

LEAST_SPREAD = 1e-4  # less variation is noise rather than information
LOST = 0.05  # share of its standard deviation that rounding may take from a number
STILL = 16  # observations in a row; a scene may rest for a few
MASK_NOT_USED = (
    "the info of reset has an action_mask, which is not used. Set action_mask=info to take allowed actions only, or "
    "action_mask=off to leave this message out."
)


class FirstSegment:
    """Find numbers that float32 cannot tell apart, an image that never changes, and an action mask that is not used."""

    def __init__(
        self, spaces: Spaces, owner: str, *, sampler_id: int = 0, integers: bool = True, masks: bool = False
    ) -> None:
        """Prepare for the first segment of a sampler; `owner` is a prefix of messages.

        Report `integers` that float32 cannot tell apart, and `masks` in the info of the first reset that are not used.
        """
        self._obs, self._owner = spaces.returned, owner
        self._is_watched = sampler_id == 0  # the observations and masks of the other samplers are alike
        self._masks = masks and self._is_watched and spaces.mask is None and spaces.actions.choices is not None
        self._kinds = "fiu" if integers else "f"
        self._seen: dict[str, list[np.ndarray]] = {}

    def watching(self, pack: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
        """Return `pack` so that numbers of more digits than float32 has are remembered as they were returned."""
        self._seen = {}

        def watched(returned: Any) -> np.ndarray:
            for name, leaf in leaves(returned).items():
                if isinstance(leaf, np.ndarray | np.number | float | int):
                    dtype = np.asarray(leaf).dtype
                    if dtype.kind in self._kinds and dtype.itemsize > (4 if dtype.kind == "f" else 3):
                        self._seen.setdefault(name, []).append(np.array(leaf))
            return pack(returned)

        return watched if self._is_watched else pack

    def mask_not_used(self, *, offered: bool) -> list[Incident]:
        """Return what there is to say about the mask that the first reset `offered`."""
        said = Incident(IncidentKind.MASK_NOT_USED, f"{self._owner}: {MASK_NOT_USED}")
        return [said] if self._masks and offered else []

    def findings(self, obs: np.ndarray) -> list[Incident]:
        """Return what is odd about the observations [n, E, *O] of the segment, and forget those remembered."""
        seen, self._seen = self._seen, {}
        found = (
            (IncidentKind.PRECISION_LOST, precision_lost(seen, self._obs)),
            (IncidentKind.IMAGE_CONSTANT, constant_image(obs)),
        )
        return [Incident(kind, f"{self._owner}: {text}.") for kind, text in found if text]


def precision_lost(seen: dict[str, list[np.ndarray]], obs: np.dtype[Any]) -> str | None:
    """Describe the first leaf of which float32 loses the information in the numbers `seen`; None if there is none."""
    stored = leaves(obs)
    for name, numbers in seen.items():
        alike = name in stored and {one.shape for one in numbers} == {stored[name].shape}  # not those of a OneOf
        if alike and stored[name].base != np.float64:
            loss = _loss(np.stack(numbers), "read by the network" if stored[name].base.kind in "iu" else "stored")
            if loss:
                return f"{f'observation leaf {name!r}' if name else 'the observation'} {loss}"
    return None


def _loss(seen: np.ndarray, done: str) -> str | None:
    """Describe an element of `seen` [n, *shape] of whose variation float32 loses too much when it is `done` so."""
    spread = seen.std(axis=0)
    error = np.sqrt(np.square(seen - seen.astype(np.float32)).mean(axis=0))
    bad = np.argwhere((spread > LEAST_SPREAD) & (error > LOST * spread))
    if not len(bad):
        return None
    index = tuple(int(i) for i in bad[0])
    numbers = np.array([one[index] for one in seen])
    step = float(np.spacing(np.float32(np.abs(numbers).max())))
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    return (
        f"is from {numbers.min():.17g} to {numbers.max():.17g}{place}, and is {done} as float32, whose steps are "
        f"{step:g} there. Use obs_dtype=float64 with norm_obs=True, or subtract an offset in the environment "
        f"(gymnasium.wrappers.TransformObservation); norm_obs alone comes too late, after the rounding"
    )


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
