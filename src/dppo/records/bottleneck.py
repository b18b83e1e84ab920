"""A model of an iteration's time: what takes the longest, and which setting would make the run faster."""

from collections.abc import Mapping
from typing import NamedTuple

from dppo.config import Config
from dppo.invocation import as_setting_and_flag

MIN_ADVICE_S = (
    60.0  # of training: the result of a shorter run is there, so a faster one would not help
)
MIN_GAIN = 1.1  # a smaller gain is within the noise


class TimeSplit(NamedTuple):
    """Seconds spent in all iterations of this call except the first, which makes the environments."""

    rows: int = 0
    iteration_s: float = 0.0
    collect_s: float = 0.0
    slowest_actor_s: float = 0.0
    update_s: float = 0.0

    def plus(self, row: Mapping[str, float]) -> "TimeSplit":
        """Add a row of metrics."""
        return TimeSplit(
            self.rows + 1,
            self.iteration_s + row["perf/iteration_s"],
            self.collect_s + row["perf/collect_s"],
            self.slowest_actor_s + row["perf/slowest_actor_s"],
            self.update_s + row["perf/update_s"],
        )


def times_line(split: TimeSplit, config: Config, epochs: int, *, advise: bool = True) -> str:
    """Return the times of an iteration, and the gain from fewer epochs if updating takes the longest; "" without rows.

    Updating takes a time proportional to `epochs`. No fewer than half of them are suggested. Without `advise`, return
    only the times.
    """
    if split.rows == 0:
        return ""
    overlaps = config.lag > 0 and config.num_actors != 0
    iteration_s = split.iteration_s / split.rows
    collect_s = (split.slowest_actor_s if overlaps else split.collect_s) / split.rows
    update_s = split.update_s / split.rows
    phases = f"collecting {_duration(collect_s)}, updating {_duration(update_s)}"
    times = f"An iteration took {_duration(iteration_s)}: {phases}."
    if not advise or update_s <= collect_s:
        return times
    fewer_epochs = max(epochs // 2, int(epochs * collect_s / max(update_s, 1e-9)))
    if fewer_epochs == 0:
        return times
    shorter_update_s = update_s * fewer_epochs / epochs
    if overlaps:
        shorter_update_s = max(collect_s, shorter_update_s)
    gain = _ratio(iteration_s, iteration_s - update_s + shorter_update_s)
    if gain < MIN_GAIN:
        return times
    return (
        f"{times} {as_setting_and_flag('update_epochs', fewer_epochs)} would make about {gain:.1f} x as many env steps "
        f"per second, and need more of them to learn the same."
    )


def bottleneck_line(split: TimeSplit, config: Config) -> str:
    """Return the bottleneck of a run on actors, and the setting that would relieve it; "" if no setting gains enough.

    An iteration takes collecting + update + rest. With overlap, it takes max(collecting, update) + rest, and so saves
    min(collecting, update).
    """
    if config.num_actors == 0 or split.rows == 0:
        return ""
    if config.lag == 0:
        return _gain_by_overlap(split)
    if _ratio(split.iteration_s, split.update_s) < MIN_GAIN:
        return "Bottleneck: the learner. More actors gain nothing."
    if config.env_threads or _ratio(split.iteration_s, split.slowest_actor_s) >= MIN_GAIN:
        return ""
    samplers = config.num_samplers
    gain = _ratio(
        split.iteration_s, max(split.update_s, split.iteration_s * config.most_actors / samplers)
    )
    if gain < MIN_GAIN:
        return ""
    return (
        f"Bottleneck: the actors. {as_setting_and_flag('num_actors', samplers)} would be up to {gain:.1f} x as "
        f"fast if there are CPUs for them, with the same result."
    )


def _gain_by_overlap(split: TimeSplit) -> str:
    gain = _ratio(split.iteration_s, split.iteration_s - min(split.collect_s, split.update_s))
    if gain < MIN_GAIN:
        return ""
    idle = 1 - split.collect_s / split.iteration_s
    return (
        f"Bottleneck: the actors were idle for {idle:.0%} of the time, during updates. "
        f"{as_setting_and_flag('overlap', True)} would be about {gain:.1f} x as fast; its results differ."
    )


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else float("inf")


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
