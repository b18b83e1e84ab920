"""Descriptions of how continuous actions are brought within their bounds, and of where this hinders learning."""

import numpy as np

from dppo.spaces.actions import (
    MAX_LISTED_COUNTS,
    MIN_COVERED,
    Actions,
    BoxActions,
    boxes,
    has_bounds,
    is_covered_at_first,
)


def clipped_off_centre(actions: Actions) -> str | None:
    """Describe the bounds of clipped actions that a new policy does not cover; None if there are none.

    Elements without two finite bounds are left out, as no setting maps them.
    """
    for box in boxes(actions):
        is_bounded = has_bounds(box.low, box.high)
        low = box.low[is_bounded]
        high = box.high[is_bounded]
        if box.bounds == "clip" and not is_covered_at_first(low, high):
            return bounds_in_words(low, high)
    return None


def stuck_beside_unbounded(actions: Actions) -> str | None:
    """Describe an element that is not mapped to its bounds, as one is infinite, and may stay at the other.

    Return None without any.
    """
    for box in boxes(actions):
        low = box.low.reshape(-1)
        high = box.high.reshape(-1)
        leaves_room = (low <= -MIN_COVERED) & (high >= MIN_COVERED)
        stuck = np.flatnonzero(~has_bounds(low, high) & ~leaves_room)
        if len(stuck):
            element = int(stuck[0])
            return (
                f"Element {element} of an action lies between {low[element]:g} and {high[element]:g}. A new policy "
                f"acts around 0 with a deviation of about 1, is clipped to these bounds, and may stay at one of them. "
                f"It is not mapped to them, because they are not both finite. Give it finite bounds."
            )
    return None


def bounds_in_words(low: np.ndarray, high: np.ndarray) -> str:
    """Describe bounds [elements], as in `0 and 1`, or `[10, 0] and [45, 100]` if those of elements differ."""
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
    low = np.concatenate([box.low[box.mapped()] for box in rescaled])
    high = np.concatenate([box.high[box.mapped()] for box in rescaled])
    return (
        f"Actions lie between {bounds_in_words(low, high)}: the range [-1, 1] of the policy is mapped to these bounds; "
        f"action_bounds=clip (--action-bounds clip) passes its numbers on as they are."
        f"{''.join(map(_describe_unmapped, rescaled))}"
    )


def _describe_unmapped(box: BoxActions) -> str:
    """Describe the elements of a Box that are not mapped, as a sentence behind others; "" without any."""
    elements = np.flatnonzero(~box.mapped())
    if not len(elements):
        return ""
    listing = ", ".join(map(str, elements[:MAX_LISTED_COUNTS]))
    if len(elements) > MAX_LISTED_COUNTS:
        listing += f" and {len(elements) - MAX_LISTED_COUNTS} others"
    noun = "Element" if len(elements) == 1 else "Elements"
    verb = "is" if len(elements) == 1 else "are"
    return f" {noun} {listing} of an action {verb} not mapped, for lack of two finite bounds."


def bounds_described(actions: Actions) -> dict[str, str | None]:
    """Describe how actions are brought within their bounds, by the names of facts."""
    return {
        "rescaled": describe_rescaling(actions),
        "off_centre": clipped_off_centre(actions),
        "beside_unbounded": stuck_beside_unbounded(actions),
    }
