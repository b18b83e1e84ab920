"""Descriptions of how continuous actions are brought within their bounds, and of where this hinders learning."""

from collections.abc import Sequence

import numpy as np

from dppo.spaces.actions import (
    MAX_LISTED_COUNTS,
    MIN_COVERED,
    NO_BOUND,
    Actions,
    BoxActions,
    boxes,
    is_covered_at_first,
    is_unbounded,
)


def clipped_off_centre(actions: Actions) -> str | None:
    """Describe the bounds of actions that are clipped although a new policy does not cover them; None without any."""
    for box in boxes(actions):
        is_clipped = box.bounds == "clip" and not is_unbounded(box.low, box.high)
        if is_clipped and not is_covered_at_first(box.low, box.high):
            return bounds_in_words([box])
    return None


def stuck_beside_unbounded(actions: Actions) -> str | None:
    """Describe an element that is clipped because a bound of its Box is infinite; None without any.

    Such a Box cannot be mapped to [-1, 1], so all of its elements are clipped, also those with finite bounds.
    """
    for box in boxes(actions):
        if box.bounds != "clip" or not is_unbounded(box.low, box.high):
            continue
        bounds = zip(box.low.reshape(-1).tolist(), box.high.reshape(-1).tolist(), strict=True)
        for element, (low, high) in enumerate(bounds):
            if not _leaves_room_at_first(low, high):
                return (
                    f"Element {element} of an action lies between {low:g} and {high:g}. A new policy acts around 0 "
                    f"with a deviation of about 1, is clipped to these bounds, and may stay at one of them. It is not "
                    f"mapped to them, because not all bounds of the Box are finite. Give it finite bounds."
                )
    return None


def _leaves_room_at_first(low: float, high: float) -> bool:
    """Return whether clipped actions of a new policy cover an element, also one with an infinite bound."""
    if max(-low, high) < NO_BOUND:
        return is_covered_at_first(np.array([low]), np.array([high]))
    return low <= -MIN_COVERED and high >= MIN_COVERED


def bounds_in_words(boxes_named: Sequence[BoxActions]) -> str:
    """Describe the bounds of some Boxes, as in `0 and 1`, or `[10, 0] and [45, 100]` if those of elements differ."""
    low = np.concatenate([box.low.reshape(-1) for box in boxes_named])
    high = np.concatenate([box.high.reshape(-1) for box in boxes_named])
    if np.ptp(low) == 0 and np.ptp(high) == 0:
        return f"{low[0]:g} and {high[0]:g}"
    if len(low) > MAX_LISTED_COUNTS:
        return f"{low.min():g} at the lowest and {high.max():g} at the highest"
    lowest = ", ".join(f"{bound:g}" for bound in low)
    highest = ", ".join(f"{bound:g}" for bound in high)
    return f"[{lowest}] and [{highest}]"


def describe_rescaling(actions: Actions) -> str | None:
    """Describe the bounds that actions are rescaled to, and how to prevent it; None if no action is rescaled."""
    rescaled = [box for box in boxes(actions) if box.bounds == "rescale"]
    if not rescaled:
        return None
    return (
        f"Actions lie between {bounds_in_words(rescaled)}: [-1, 1] of the policy is mapped to these bounds; "
        f"action_bounds=clip (--action-bounds clip) passes its numbers on as they are."
    )


def bounds_described(actions: Actions) -> dict[str, str | None]:
    """Describe how actions are brought within their bounds, by the names of facts."""
    return {
        "rescaled": describe_rescaling(actions),
        "off_centre": clipped_off_centre(actions),
        "beside_unbounded": stuck_beside_unbounded(actions),
    }
