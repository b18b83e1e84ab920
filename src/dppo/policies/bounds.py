"""Shares of the steps in which a policy's actions lie at the bounds of their space."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dppo.ppo.exchange.records import Episode
from dppo.spaces.actions import Actions, BoxActions, NestedActions, innermost

REPORTED_SHARE = 1 / 3  # of the steps; a larger share is reported


class BoundCounter:
    """Counts the steps in which each element of an action is at its lower or its upper bound."""

    def __init__(self, actions: Actions) -> None:
        """Prepare for the actions of a policy; choices, and numbers without bounds, are never at a bound."""
        limits = [_limits(part) for part in innermost(actions)]
        self._lower = np.concatenate([lower for lower, _ in limits])
        self._upper = np.concatenate([upper for _, upper in limits])
        self.counts = np.zeros((2, actions.width), np.int64)
        """[2, width]: steps at the lower and at the upper bound, summed over rows."""

    def add(self, actions: np.ndarray) -> None:
        """Count the policy's actions [rows, width], or [rows], of a step."""
        elements = actions.reshape(len(actions), -1)
        self.counts[0] += (elements <= self._lower).sum(axis=0)
        self.counts[1] += (elements >= self._upper).sum(axis=0)


@dataclass(frozen=True)
class ElementAtBound:
    """The element of an action that is at a bound most often."""

    share: float
    """Share of all steps."""
    name: str
    """Element in words: `element 2 of the action`."""
    side: str
    """`lower` or `upper`."""
    is_clipped: bool
    """True if numbers beyond the bound are clipped, without having been rescaled."""

    @property
    def is_frequent(self) -> bool:
        """True if the share is as large as that of few good controllers, and is reported."""
        return self.share >= REPORTED_SHARE

    def __str__(self) -> str:
        """Describe the share in one sentence, with a remedy if a setting may help."""
        fact = f"the greedy policy takes {self.name} at its {self.side} bound in {self.share:.0%} of the steps"
        if not self.is_clipped:
            return f"{fact}, more often than most good controllers."
        return (
            f"{fact}. Unless an on-off controller is right here, use action_bounds=rescale (--action-bounds "
            f"rescale)."
        )


def element_at_bound(actions: Actions, episodes: Iterable[Episode]) -> ElementAtBound | None:
    """Return the element that is at a bound most often in `episodes`; None if they counted none."""
    counts = np.zeros((2, actions.width))
    steps = 0
    for episode in episodes:
        if episode.at_bounds is not None:
            counts += episode.at_bounds
            steps += episode.length
    if not steps:
        return None
    shares = counts / steps
    side, element = np.unravel_index(int(np.argmax(shares)), shares.shape)
    name = list(_names(actions, "the action"))[element]
    can_be_mapped = np.concatenate([_could_be_mapped(part) for part in innermost(actions)])
    is_clipped = bool(can_be_mapped[element])
    return ElementAtBound(float(shares[side, element]), name, ("lower", "upper")[side], is_clipped)


def _limits(actions: Actions) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(actions, BoxActions):
        return actions.saturated_at()
    never = np.full(actions.width, np.inf)
    return -never, never


def _could_be_mapped(actions: Actions) -> np.ndarray:
    """Return which elements [width] are clipped, and are not with action_bounds=rescale."""
    if not isinstance(actions, BoxActions) or actions.bounds != "clip":
        return np.zeros(actions.width, bool)
    return replace(actions, bounds="rescale").mapped().reshape(-1)


def _names(actions: Actions, where: str) -> Iterator[str]:
    """Yield the name of each element of a policy's action."""
    if isinstance(actions, NestedActions):
        keys = actions.keys if actions.keys is not None else range(len(actions.parts))
        for key, part in zip(keys, actions.parts, strict=True):
            yield from _names(part, f"{where.removeprefix('the ')}[{key!r}]")
    elif actions.width == 1:
        yield where
    else:
        for element in range(actions.width):
            yield f"element {element} of {where}"
