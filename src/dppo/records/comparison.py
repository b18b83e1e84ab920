"""The comparison of a run's best evaluation with its baseline, the user's controller."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dppo.records.differences import Difference
from dppo.records.terminal.figures import number


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The user's controller, and how the best evaluation of the run differs from it."""

    name: str
    """Import path of the controller."""
    mean_return: float
    """Its mean return in the episodes of the evaluations; nan until it has played them."""
    iteration: int | None
    """The iteration of the best evaluation; None without one."""
    difference: Difference | None
    """Returns of the best evaluation minus the controller's returns; None without an evaluation."""
    never_worse: bool
    """True if a policy is deployed only where an evaluation shows an improvement."""
    version: str | None = None
    """Hash of the controller's file and of the settings that its returns depend on; None if it cannot be known."""

    @property
    def deployed(self) -> Literal["policy", "baseline"]:
        """Return which of the two the run deploys: without `never_worse`, always the policy."""
        if self.never_worse and not self.is_improvement:
            return "baseline"
        return "policy"

    @property
    def is_improvement(self) -> bool:
        """Return whether the best evaluation shows at 95 % that the policy is better."""
        return self.difference is not None and self.difference.is_improvement

    def __str__(self) -> str:
        """Return a sentence on both returns, one on what they show, and one on what is deployed."""
        if math.isnan(self.mean_return):
            return f"Baseline {self.name}: not all of its episodes have been played."
        text = f"Baseline {self.name}: mean return {number(self.mean_return)}."
        if self.difference is not None:
            text += (
                f" The best evaluation (iter_{self.iteration or 0:06d}) differs by {self.difference}: its policy is "
                f"{self.difference.verdict}."
            )
        if not self.never_worse:
            return text
        deployed = "the baseline"
        if self.is_improvement:
            deployed = f"the policy of iter_{self.iteration or 0:06d}"
        return f"{text} Deployed, as never_worse=True: {deployed}."

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`; NaN, which JSON does not have, becomes None."""
        return asdict(self) | {
            "mean_return": None if math.isnan(self.mean_return) else self.mean_return,
            "difference": None if self.difference is None else self.difference.as_json(),
        }

    @classmethod
    def from_json(cls, stored: Any) -> BaselineComparison:
        """Return what `as_json` has stored; raise KeyError, TypeError or ValueError for anything else."""
        mean_return = stored["mean_return"]
        iteration = stored["iteration"]
        difference = stored["difference"]
        version = stored["version"]
        return cls(
            name=str(stored["name"]),
            mean_return=math.nan if mean_return is None else float(mean_return),
            iteration=None if iteration is None else int(iteration),
            difference=None if difference is None else Difference.from_json(difference),
            never_worse=bool(stored["never_worse"]),
            version=None if version is None else str(version),
        )

    def in_best_json(self) -> dict[str, Any]:
        """Return the entries of best.json about the comparison; a deployed baseline replaces the best checkpoint."""
        content: dict[str, Any] = {"deployed": self.deployed, "baseline": self.as_json()}
        if self.deployed == "baseline":
            content |= {"checkpoint": None, "iteration": None, "score": None}
        return content
