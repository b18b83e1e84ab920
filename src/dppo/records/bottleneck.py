"""Say at the end of a run whether the learner or the actors held it up, and what another setting would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORTH_SAYING = 1.1  # a smaller gain is within the noise


@dataclass(slots=True)
class TimeSplit:
    """Seconds of all iterations of a call but the first, in which environments are made."""

    rows: int = 0
    iteration_s: float = 0.0
    collect_s: float = 0.0
    """From requests to last segments."""
    actors_s: float = 0.0
    """Of the slowest actor of each iteration."""
    update_s: float = 0.0

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row of metrics."""
        self.rows += 1
        if self.rows > 1:
            self.iteration_s += row["perf/iteration_s"]
            self.collect_s += row["perf/collect_s"]
            self.actors_s += row["perf/slowest_actor_s"]
            self.update_s += row["perf/update_s"]


def bottleneck_in_words(split: TimeSplit, *, num_actors: int, num_samplers: int, overlap: bool) -> str:
    """Return a line about who waited for whom; empty where no other setting would gain anything worth saying.

    In turns an iteration takes C + u + x: collecting, update, the rest. With overlap it takes max(C, u) + x, so that
    min(C, u) is gained. Where it is overlapped already, the shorter of the two is hidden behind the longer.
    """
    if num_actors == 0 or split.rows < 2 or split.iteration_s <= 0:
        return ""
    if not overlap:
        gain = _ratio(split.iteration_s, split.iteration_s - min(split.collect_s, split.update_s))
        if gain < WORTH_SAYING:
            return ""
        waited = 1 - split.collect_s / split.iteration_s
        return f"Actors waited {waited:.0%} of the time for the learner; --overlap would give about {gain:.1f} x."
    iterations = split.rows - 1
    whole, update, actors = (
        f"{1e3 * s / iterations:,.0f} ms" for s in (split.iteration_s, split.update_s, split.actors_s)
    )
    if _ratio(split.iteration_s, split.update_s) < WORTH_SAYING:
        return f"The learner was the bottleneck (update {update} of {whole} an iteration); more actors gain nothing."
    gain = _ratio(split.iteration_s, max(split.update_s, split.iteration_s * num_actors / num_samplers))
    if _ratio(split.iteration_s, split.actors_s) < WORTH_SAYING <= gain:
        return (
            f"The actors were the bottleneck ({actors} of {whole} an iteration; the update took {update}); "
            f"--num-actors {num_samplers} would give up to {gain:.1f} x where there are CPUs for them."
        )
    return ""


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else float("inf")
