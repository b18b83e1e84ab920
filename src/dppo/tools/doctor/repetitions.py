"""Repetitions: segments of the doctor that were played again, and whether they were the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dppo.tools.doctor.speed import Facts

# the most informative place first
PLACES = ("in a new instance", "after other episodes", "beside another instance")


@dataclass(frozen=True)
class Repetitions:
    """Repetitions of the same steps in several places."""

    num_steps: int
    """Steps that were equal in all places."""
    differences: dict[str, str] = field(default_factory=dict)
    """Place -> the first difference that is not a fault in words; "" if there is none."""
    other_faults: list[str] = field(default_factory=list)
    """Places in which other faults happened."""

    @classmethod
    def of_facts(cls, facts: Facts) -> Repetitions:
        return cls(facts["compared"], facts["same"], facts["unlike"])

    def as_facts(self) -> Facts:
        return {"compared": self.num_steps, "same": self.differences, "unlike": self.other_faults}

    def plus(self, place: str, trace: Iterable[Any], again: Iterable[Any]) -> Repetitions:
        """Add a repetition in `place`, up to the first difference from `trace`.

        Args:
            trace, again: steps, as `StepFacts` or as a list of its fields.
        """
        num_steps = self.num_steps
        difference = ""
        other_faults = self.other_faults
        for number, (step, repeated) in enumerate(zip(trace, again, strict=False)):
            if tuple(step) == tuple(repeated):
                continue
            num_steps = min(num_steps, number)
            *_, faults = step
            *_, repeated_faults = repeated
            if faults or repeated_faults:
                other_faults = [*other_faults, place]
            else:
                difference = f"it differs at step {number}"
            break
        return Repetitions(num_steps, self.differences | {place: difference}, other_faults)

    def in_order(self) -> Repetitions:
        """Sort the places, all of them PLACES, the most telling first."""
        return Repetitions(
            self.num_steps,
            {place: self.differences[place] for place in PLACES if place in self.differences},
            [place for place in PLACES if place in self.other_faults],
        )
