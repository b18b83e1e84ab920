"""Repetitions: segments of the doctor that were played again, and whether they were the same."""

from collections.abc import Iterable
from typing import Any

from dppo.tools.doctor.speed import Facts

# the most informative place first; a fresh process comes last
PLACES = ("in a new instance", "after other episodes", "beside another instance")


def nothing_repeated(num_steps: int) -> Facts:
    """Return the facts about repetitions of so many steps before the first one.

    `compared`: steps that were equal in all places.
    `same`: place -> the first difference that is not a fault in words; "" if there is none.
    `unlike`: places in which other faults happened.
    """
    return {"compared": num_steps, "same": {}, "unlike": []}


def with_repetition(
    facts: Facts, place: str, trace: Iterable[Any], repeated_trace: Iterable[Any]
) -> Facts:
    """Return the facts with a repetition in `place`, which is compared with `trace` up to the first difference.

    Args:
        trace, repeated_trace: steps, as `StepFacts` or as a list of its fields.
    """
    compared = facts["compared"]
    differences = facts["same"] | {place: ""}
    unlike = facts["unlike"]
    for number, (step, repeated) in enumerate(zip(trace, repeated_trace, strict=False)):
        if tuple(step) == tuple(repeated):
            continue
        compared = min(compared, number)
        *_, faults = step
        *_, repeated_faults = repeated
        if faults or repeated_faults:
            unlike = [*unlike, place]
        else:
            differences[place] = f"it differs at step {number}"
        break
    return facts | {
        "compared": compared,
        "same": {name: differences[name] for name in sorted(differences, key=_rank)},
        "unlike": sorted(unlike, key=_rank),
    }


def _rank(place: str) -> int:
    if place in PLACES:
        return PLACES.index(place)
    return len(PLACES)
