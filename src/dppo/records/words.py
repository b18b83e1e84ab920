"""The first and the last lines of a run: its sizes and processes, its result, and the bottleneck of its speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dppo.config import Config
from dppo.config.checks import batch_in_words
from dppo.config.trust import resume_command
from dppo.errors import counted
from dppo.records.files.checkpoint import Found
from dppo.records.result import Result

FAULTS = 5  # lines about environments that failed
EPISODES = 100  # window of the mean return
WORTH_REPORTING = 1.1  # a smaller gain is within the noise


def sizes_line(config: Config) -> str:
    """Return the numbers of iterations, steps, epochs and minibatches in one sentence."""
    per_epoch, reuse = config.minibatches_per_epoch, config.reuse
    older = "" if reuse == 1 else f" with the {reuse - 1} before it"
    batches = reuse * config.iterations - reuse * (reuse - 1) // 2  # the first iterations have fewer before them
    batch = f"{config.batch_size:,} steps ({batch_in_words(config)})"
    epochs, more = config.epochs(), config.epochs_for()
    steps = batches * epochs * per_epoch
    longer = f", {more} with discrete actions," if more > epochs else ""
    and_more = f" or {steps // epochs * more:,}" if longer else ""
    return (
        f"{counted(config.iterations, 'iteration')} of {batch}, each trained{older} "
        f"for {counted(epochs, 'epoch')}{longer} of {counted(reuse * per_epoch, 'minibatch', 'minibatches')} "
        f"of up to {config.minibatch_rows:,} rows: {steps:,}{and_more} SGD step{'s' * (steps > 1)} in all."
    )


def hosting_line(config: Config) -> str:
    """Return where the samplers run, in one sentence."""
    if config.num_actors == 0:
        if config.num_samplers == 1:
            return "Collecting in this process."
        spread = as_setting_and_flag("num_actors", config.num_samplers)
        return f"Collecting in this process; {spread} would spread it over Ray actors, with the same result."
    actors = config.most_actors
    if config.elastic:
        between = f"Between {config.actor_bounds[0]} and {counted(actors, 'Ray actor')}"
        return f"{between}, as there is room for them, host {counted(config.num_samplers, 'sampler')}."
    fewest, most = divmod(config.num_samplers, actors)
    if not most:
        if actors == 1:
            return f"1 Ray actor hosts {counted(fewest, 'sampler')}."
        return f"{actors} Ray actors host {counted(fewest, 'sampler')} each."
    uneven = f"{most} host {fewest + 1}, the others {fewest} and have to wait"
    return f"{actors} Ray actors host {config.num_samplers} samplers unevenly: {uneven}."


def branch_line(origin: Found) -> str:
    """Return what a new run takes over from a checkpoint of another run, and what it drops."""
    state, arrays = origin.checkpoint.state, origin.checkpoint.arrays
    lengths = [array for name, array in arrays["samplers"].items() if name.endswith(".episode_lengths")]
    left = sum(int((array > 0).sum()) for array in lengths)
    steps = sum(int(array.sum()) for array in lengths)
    kept = f"Branching off {origin.path} at step {state['global_step']:,}: weights, optimizer and normalizers are kept"
    dropped = f"{counted(left, 'open episode')} of {counted(steps, 'step')} {'is' if left == 1 else 'are'} dropped"
    return f"{kept}, counters start at zero. New episodes start; {dropped}."


def as_setting_and_flag(name: str, value: object) -> str:
    """Return a setting as it is written in Python and on the command line: `num_actors=8 (--num-actors 8)`."""
    flag = f"--{name.replace('_', '-')}"
    return f"{name}={value} ({flag if value is True else f'{flag} {value}'})"


def closing_lines(result: Result, error: BaseException | None = None) -> list[str]:
    """Return the last lines of a run's output; `error` is the exception that ended the run, if one did."""
    lines = [_ending(result, error)]
    if isinstance(error, Exception) and (cause := str(error).strip().partition("\n")[0]):
        lines.append(f"Cause: {cause}")  # the rest is reported where the error is caught
    if result.episodes:
        last = counted(min(result.episodes, EPISODES), "episode")
        lines.append(f"Mean return of the last {last}: {result.episodic_return:.1f}")
    else:
        lines.append("No episode has finished yet.")
    lines.append(f"Checkpoint: {result.checkpoint}")
    if result.picture.exists():
        lines.append(f"Picture: {result.picture}")
    lines.append(f"Weights: sha256 {result.weights_sha256[:16]}")
    if result.incidents:
        counts = (f"{count} x {kind}" for kind, count in sorted(result.incidents.items()))
        lines.append(f"Incidents: {', '.join(counts)}")
    faults = dict(result.env_faults)
    if lost := faults.pop("steps lost", 0):
        lines.append(f"Faults of environments, which cost {counted(lost, 'env step')}:")
    most = sorted(faults.items(), key=lambda one: (-one[1], one[0]))
    lines += [f"  {count} x {name}" for name, count in most[:FAULTS]]
    if others := most[FAULTS:]:
        lines.append(f"  {sum(count for _, count in others)} more of {counted(len(others), 'other kind')}")
    if "other_cpu" in result.incidents:
        lines.append("The result depends on which process ran on which type of CPU: see docs/REPRODUCIBILITY.md.")
    lines += [line for line in (result.times, result.bottleneck, *result.notes) if line]
    if result.stopped_by:
        named = result.model_name, result.wrapper_names
        lines.append(f"Resume with: {resume_command(result.env_name, result.run_dir, *named)}")
    return lines


def _ending(result: Result, error: BaseException | None) -> str:
    if result.iterations == result.resumed_at and result.stopped_by is None:
        return f"Nothing to do: the run has already completed its {result.global_step:,} steps."
    stopped = "Failed with" if isinstance(error, Exception) else "Stopped by"
    ending = "Done" if result.stopped_by is None else f"{stopped} {result.stopped_by}"
    steps_per_s = f"{result.steps_per_s:,.0f}" if result.steps_per_s >= 10 else f"{result.steps_per_s:.2g}"
    speed = "" if result.iterations == result.resumed_at else f" ({steps_per_s} steps/s while training)"
    made = f"{counted(result.global_step, 'step')} and {counted(result.episodes, 'episode')}"
    return f"{ending} after {made} in {result.wall_s:.1f} s{speed}."


class TimeSplit(NamedTuple):
    """Seconds spent in all iterations of this call except the first, which makes the environments."""

    rows: int = 0
    iteration_s: float = 0.0
    collect_s: float = 0.0
    slowest_actor_s: float = 0.0
    update_s: float = 0.0

    def plus(self, row: Mapping[str, float]) -> TimeSplit:
        """Return the sums with those of another row of metrics."""
        return TimeSplit(self.rows + 1, *(getattr(self, name) + row[f"perf/{name}"] for name in self._fields[1:]))


def times_line(split: TimeSplit, config: Config, epochs: int) -> str:
    """Return the times of an iteration, and the gain from fewer epochs, at least half, if updating takes the longest.

    Of an update in K `epochs`, E of them take about E / K of its time.
    """
    if not split.rows:
        return ""
    at_once = config.lag > 0 and config.num_actors != 0
    sums = (split.iteration_s, split.slowest_actor_s if at_once else split.collect_s, split.update_s)
    whole, collect, update = (seconds / split.rows for seconds in sums)
    took = [f"{one:.3g} s" if one >= 1 else f"{1e3 * one:.3g} ms" for one in (whole, collect, update)]
    times = f"An iteration took {took[0]}: collecting {took[1]}, updating {took[2]}."
    fewer = max(epochs // 2, int(epochs * collect / max(update, 1e-9)))
    shorter = update * fewer / epochs
    gain = _ratio(whole, whole - update + (max(collect, shorter) if at_once else shorter))
    if update <= collect or not fewer or gain < WORTH_REPORTING:
        return times
    return (
        f"{times} {as_setting_and_flag('update_epochs', fewer)} would make about {gain:.1f} x as many env steps per "
        f"second, and need more of them to learn the same."
    )


def bottleneck_line(split: TimeSplit, config: Config) -> str:
    """Return one line about the bottleneck and the setting that would relieve it; "" if no setting gains enough.

    An iteration takes C + u + x: collecting, update, rest; with overlap max(C, u) + x, which saves min(C, u).
    """
    if config.num_actors == 0 or not split.rows:
        return ""
    if config.lag == 0:
        gain = _ratio(split.iteration_s, split.iteration_s - min(split.collect_s, split.update_s))
        if gain < WORTH_REPORTING:
            return ""
        waited = 1 - split.collect_s / split.iteration_s
        return (
            f"Bottleneck: the actors waited {waited:.0%} of the time for the learner. "
            f"{as_setting_and_flag('overlap', True)} would be about {gain:.1f} x as fast; its results differ."
        )
    if _ratio(split.iteration_s, split.update_s) < WORTH_REPORTING:
        return "Bottleneck: the learner. More actors gain nothing."
    samplers = config.num_samplers
    gain = _ratio(split.iteration_s, max(split.update_s, split.iteration_s * config.most_actors / samplers))
    if _ratio(split.iteration_s, split.slowest_actor_s) < WORTH_REPORTING <= gain:
        return (
            f"Bottleneck: the actors. {as_setting_and_flag('num_actors', samplers)} would be up to {gain:.1f} x as "
            f"fast if there are CPUs for them, with the same result."
        )
    return ""


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else float("inf")
