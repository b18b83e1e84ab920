"""Report at the end of a run whether learner or actors were the bottleneck, and which setting would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dppo.records.terminal.opening import as_setting_and_flag

WORTH_REPORTING = 1.1  # a smaller gain is within the noise


@dataclass(slots=True)
class TimeSplit:
    """Seconds spent in all iterations of this call except the first, which makes the environments."""

    rows: int = 0
    iteration_s: float = 0.0
    collect_s: float = 0.0
    """From the request to the last segment."""
    actors_s: float = 0.0
    """Busy time of the slowest actor of each iteration."""
    update_s: float = 0.0

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row of metrics."""
        self.rows += 1
        if self.rows > 1:
            self.iteration_s += row["perf/iteration_s"]
            self.collect_s += row["perf/collect_s"]
            self.actors_s += row["perf/slowest_actor_s"]
            self.update_s += row["perf/update_s"]


def bottleneck_line(split: TimeSplit, *, num_actors: int, num_samplers: int, overlap: bool) -> str:
    """Return one line about the bottleneck and the setting that would relieve it; "" if no setting gains enough.

    Without overlap an iteration takes C + u + x: collecting, update, rest. With overlap it takes max(C, u) + x, which
    saves min(C, u).
    """
    if num_actors == 0 or split.rows < 2 or split.iteration_s <= 0:
        return ""
    if not overlap:
        gain = _ratio(split.iteration_s, split.iteration_s - min(split.collect_s, split.update_s))
        if gain < WORTH_REPORTING:
            return ""
        waited = 1 - split.collect_s / split.iteration_s
        return (
            f"Bottleneck: the actors waited {waited:.0%} of the time for the learner. "
            f"{as_setting_and_flag('overlap', True)} would be about {gain:.1f} x as fast; its results differ."
        )
    iterations = split.rows - 1
    whole, update, actors = (
        f"{1e3 * s / iterations:,.0f} ms" for s in (split.iteration_s, split.update_s, split.actors_s)
    )
    if _ratio(split.iteration_s, split.update_s) < WORTH_REPORTING:
        return f"Bottleneck: the learner (updating took {update} of {whole} per iteration). More actors gain nothing."
    gain = _ratio(split.iteration_s, max(split.update_s, split.iteration_s * num_actors / num_samplers))
    if _ratio(split.iteration_s, split.actors_s) < WORTH_REPORTING <= gain:
        return (
            f"Bottleneck: the actors (collecting took {actors} of {whole} per iteration, updating {update}). "
            f"{as_setting_and_flag('num_actors', num_samplers)} would be up to {gain:.1f} x as fast if there are CPUs "
            f"for them, with the same result."
        )
    return ""


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else float("inf")
