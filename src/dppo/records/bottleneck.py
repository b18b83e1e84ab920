"""A model of an iteration's time: what takes the longest, and which setting would make the run faster."""

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from dppo.config import Config
from dppo.invocation import as_setting_and_flag
from dppo.records.metrics.reading import Row
from dppo.records.terminal.figures import duration

# Seconds of training, or of the iterations after the first, below which a run gets no advice: a faster run would save
# little time.
MIN_ADVICE_S = 60.0
MIN_GAIN = 1.1  # ratio of times; a smaller gain is within the noise
STALLS = 0.05  # share of the iterations that stalls may have made long


class TimeSplit(NamedTuple):
    """Mean seconds of iterations; 0 without any."""

    iteration_s: float = 0.0
    collect_s: float = 0.0
    slowest_actor_s: float = 0.0
    update_s: float = 0.0

    @classmethod
    def of(cls, rows: Collection[Row]) -> "TimeSplit":
        """Return the means over rows of metrics."""
        if not rows:
            return cls()
        return cls(*(fmean(row[f"perf/{name}"] for row in rows) for name in cls._fields))


def times_of(row: Row) -> Row:
    """Return the metrics of a row from which a `TimeSplit` follows."""
    names = (f"perf/{name}" for name in TimeSplit._fields)
    return {name: row[name] for name in names}


def usual_rows(rows: Collection[Row]) -> list[Row]:
    """Return the rows without those of the longest iterations, from which no advice should follow."""
    longest_s = longest_usual([row["perf/iteration_s"] for row in rows])
    return [row for row in rows if row["perf/iteration_s"] <= longest_s]


def longest_usual(times: Sequence[float]) -> float:
    """Return the longest of these times that is not due to a stall; 0 without any.

    Stalls may have made the longest twentieth of the times, at least two; of fewer than five times, the longer half.
    """
    ordered = sorted(times) or [0.0]
    last = len(ordered) - 1
    return ordered[max(last // 2, min(last - 2, int((1 - STALLS) * last)))]


def times_line(split: TimeSplit, config: Config, epochs: int | None, *, advise: bool = True) -> str:
    """Return the mean times of an iteration, and advice to use fewer epochs if updating takes longer than collecting.

    The model: an update takes a time proportional to `epochs`. The advice is the number of epochs at which updating
    takes as long as collecting, but at least half of `epochs`. Without `advise`, or where the algorithm has no epochs,
    only the times are returned; without iterations, "".
    """
    if not split.iteration_s:
        return ""
    overlaps = config.lag > 0 and config.num_actors != 0
    collect_s = split.slowest_actor_s if overlaps else split.collect_s
    update_s = split.update_s
    phases = f"collecting {_duration(collect_s)}, updating {_duration(update_s)}"
    times = f"An iteration took {_duration(split.iteration_s)}: {phases}."
    if not advise or epochs is None or update_s <= collect_s:
        return times
    balanced_epochs = int(epochs * collect_s / max(update_s, 1e-9))
    fewer_epochs = max(epochs // 2, balanced_epochs)
    if fewer_epochs == 0:
        return times
    shorter_update_s = update_s * fewer_epochs / epochs
    if overlaps:  # an iteration then takes at least as long as collecting
        shorter_update_s = max(collect_s, shorter_update_s)
    shorter_iteration_s = split.iteration_s - update_s + shorter_update_s
    gain = _ratio(split.iteration_s, shorter_iteration_s)
    if gain < MIN_GAIN:
        return times
    return (
        f"{times} {as_setting_and_flag('update_epochs', fewer_epochs)} would make about {gain:.1f} x as many env steps "
        f"per second, and need more of them to learn the same."
    )


def evaluations_line(waited_s: float, training_s: float, config: Config) -> str:
    """Return how long a run has waited for evaluations, and what would shorten that; "" if it is short."""
    ratio = _ratio(training_s + waited_s, training_s)
    if waited_s < MIN_ADVICE_S or ratio < MIN_GAIN:
        return ""
    times = f"Waiting for evaluations took {duration(waited_s)}, training {duration(training_s)}."
    return f"{times} {ways_to_evaluate_faster(config, ratio)}"


def ways_to_evaluate_faster(config: Config, ratio: float) -> str:
    """Return the advice by which evaluations take less time; they take `ratio` times as long as they may."""
    ways = ["a larger eval_every (--eval-every)", "fewer eval_episodes (--eval-episodes)"]
    actors = math.ceil(min(config.eval_episodes, config.eval_actors * ratio))
    if config.num_actors == 0:
        ways.insert(
            0, f"{as_setting_and_flag('num_actors', 1)}, which plays them beside the training"
        )
    elif actors > config.eval_actors:
        ways.insert(0, f"{as_setting_and_flag('eval_actors', actors)} if there are CPUs for them")
    return f"Use {', '.join(ways[:-1])}, or {ways[-1]}."


def bottleneck_line(split: TimeSplit, config: Config) -> str:
    """Return the bottleneck of a run on actors, and the setting that would relieve it; "" if no setting gains enough.

    The model: without overlap, an iteration takes collecting + update + rest. With overlap, it takes max(collecting,
    update) + rest, which saves min(collecting, update). Actors that are busy all the time would, with one sampler each,
    take most_actors / num_samplers of it.
    """
    if config.num_actors == 0 or not split.iteration_s:
        return ""
    if config.lag == 0:
        return _gain_by_overlap(split)
    is_learner_busy = _ratio(split.iteration_s, split.update_s) < MIN_GAIN
    if is_learner_busy:
        return "Bottleneck: the learner. More actors gain nothing."
    is_an_actor_busy = _ratio(split.iteration_s, split.slowest_actor_s) < MIN_GAIN
    # with env_threads, the samplers of an actor run side by side already
    if config.env_threads or not is_an_actor_busy:
        return ""
    num_samplers = config.num_samplers
    spread_collect_s = split.iteration_s * config.most_actors / num_samplers
    gain = _ratio(split.iteration_s, max(split.update_s, spread_collect_s))
    if gain < MIN_GAIN:
        return ""
    return (
        f"Bottleneck: the actors. {as_setting_and_flag('num_actors', num_samplers)} would be up to {gain:.1f} x as "
        f"fast if there are CPUs for them, with the same result."
    )


def _gain_by_overlap(split: TimeSplit) -> str:
    """Return the gain of overlap over alternating collecting and updating; "" if it is too small."""
    saved_s = min(split.collect_s, split.update_s)
    gain = _ratio(split.iteration_s, split.iteration_s - saved_s)
    if gain < MIN_GAIN:
        return ""
    idle_share = 1 - split.collect_s / split.iteration_s
    return (
        f"Bottleneck: the actors were idle for {idle_share:.0%} of the time, during updates. "
        f"{as_setting_and_flag('overlap', True)} would be up to {gain:.1f} x as fast if the learner has a core of its "
        f"own; its results differ."
    )


def _ratio(before_s: float, after_s: float) -> float:
    if after_s > 0:
        return before_s / after_s
    return float("inf")


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"
