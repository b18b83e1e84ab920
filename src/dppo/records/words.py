"""Lines about a run: its sizes and processes, its result, the bottleneck of its speed, and why it does not learn."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dppo.config import Config
from dppo.config.checks import batch_in_words
from dppo.errors import EnvFault, EnvironmentFault, counted
from dppo.log import logger
from dppo.records.files.checkpoint import Found
from dppo.records.going_on import how_to_go_on
from dppo.records.observer import Observer, Result
from dppo.spaces.actions import Actions, BoxActions, boxes

FAULTS = 5  # lines about environments that failed
WINDOW = 100  # window of the mean return
ADVICE_S = 60.0  # of training: the result of a shorter run is there, so a faster one would not help
WORTH_REPORTING = 1.1  # a smaller gain is within the noise
NO_EPISODE = "No episode has finished yet."
OTHER_CPU = "The result depends on which process ran on which type of CPU: see docs/REPRODUCIBILITY.md."


def sizes_line(config: Config) -> str:
    """Return how many env steps there will be, and what an iteration does with its share."""
    total = counted(config.iterations * config.batch_size, "env step")
    iterations = counted(config.iterations, "iteration")
    epochs = config.epochs()
    discrete_epochs = config.epochs_for()
    trains = f"trains on them for {counted(epochs, 'epoch')}"
    if config.reuse > 1:
        before = counted(config.reuse - 1, "iteration")
        trains = f"trains on them and those of {before} before, for {counted(epochs, 'epoch')}"
    if discrete_epochs > epochs:
        trains += f", or {discrete_epochs} if actions are discrete"
    return f"{total} in {iterations}: each collects {config.batch_size:,} ({batch_in_words(config)}), then {trains}."


def hosting_line(config: Config) -> str:
    """Return where the samplers run, in one sentence."""
    samplers, actors = counted(config.num_samplers, "sampler"), config.most_actors
    if config.num_actors == 0:
        spread = as_setting_and_flag("num_actors", config.num_samplers)
        more = f"; {spread} would spread it over Ray actors, with the same result" * (config.num_samplers > 1)
        return f"Collecting in this process{more}."
    if config.elastic:
        between = f"Between {config.actor_bounds[0]} and {counted(actors, 'Ray actor')}"
        return f"{between}, as there is room for them, host {samplers}."
    if actors == 1:
        return f"1 Ray actor hosts {samplers}."
    fewest, most = divmod(config.num_samplers, actors)
    if not most:
        return f"{actors} Ray actors host {counted(fewest, 'sampler')} each."
    uneven = f"{most} host {fewest + 1}, the others {fewest} and have to wait"
    return f"{actors} Ray actors host {samplers} unevenly: {uneven}."


def own_state_line(config: Config) -> str:
    """Return how the states that environments have themselves are used."""
    if config.env_state == "own":
        return "get_state and set_state: an environment that is lost is set to its state, without a replay."
    return (
        "get_state and set_state: an environment that is lost is replayed, and set to its state where that leads to "
        "another one, if it is proven. env_state=own sets it at once; off only replays."
    )


def instances_line(config: Config, place: EnvFault | None) -> str:
    """Return what limits the number of environments, for a message about one whose constructor raised; else nothing.

    Of a process that has made others, the limit may be that of the process; else it is one of licences, of the run or
    of a node.
    """
    if place is None or place.phase != "constructor":
        return ""
    if place.others:
        return f". {_crowded(config, place)}{_licences(config)}"
    return f". {_licences(config).strip()}" if config.num_samplers > 1 else ""


def together_line(config: Config) -> str:
    """Return what may be wrong with a run in this process whose environment does not return; "" if it has only one."""
    samplers = config.num_samplers * config.envs_per_sampler
    if config.num_samplers * config.envs_of_sampler == 1:
        return ""
    each = [as_setting_and_flag(name, samplers) for name in ("num_samplers", "num_actors")][
        samplers == config.num_samplers :
    ]
    return (
        f". There are {config.num_samplers * config.envs_of_sampler} instances in this process. If it may have only "
        f"one, use {', '.join([*each, as_setting_and_flag('samplers_per_actor', 1)])}"
    )


def _crowded(config: Config, place: EnvFault) -> str:
    """Return the settings with which each process has only as many instances as this one could make."""
    others, envs, samplers = place.others, config.envs_per_sampler, config.num_samplers
    each = place.samplers_beside if not config.standby_envs else others // envs
    flags = []
    if config.standby_envs:
        flags.append(as_setting_and_flag("standby_envs", 0))
    if not each:  # the same batch, in samplers of fewer environments
        each, samplers = 1, math.ceil(samplers * envs / others)
        flags += [as_setting_and_flag("envs_per_sampler", others), as_setting_and_flag("num_samplers", samplers)]
    if samplers > 1:
        flags.append(as_setting_and_flag("num_actors", math.ceil(samplers / each)))
    flags.append(as_setting_and_flag("samplers_per_actor", each))
    had = counted(others, "other instance")
    return f"Its process had {had}. If a process may have only {others}, use {', '.join(flags)}."


def _licences(config: Config) -> str:
    n, each, evaluating = config.num_samplers, config.envs_of_sampler, config.evaluators
    if n == 1:
        return ""
    more, fewer = f" + {evaluating} for evaluations" if evaluating else "", as_setting_and_flag("num_samplers", n // 2)
    per_node = ""
    if config.num_actors != 0:
        per_node = " If a node may have few, use actors_per_node (--actors-per-node)."
    return (
        f" {n} samplers x {counted(each, 'env')}{more} = {n * each + evaluating} instances exist at once, for any "
        f"number of actors. With fewer licences, use {fewer}: {n // 2 * each + evaluating} instances, and a smaller "
        f"batch.{per_node}"
    )


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
    cause = str(error).strip().partition("\n")[0] if isinstance(error, Exception) else ""
    if isinstance(error, EnvironmentFault):
        cause = cause.partition(". ")[0]  # the advice follows with the traceback
    last = counted(min(result.episodes, WINDOW), "episode")
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(result.incidents.items()))
    faults = dict(result.env_faults)
    lost = faults.pop("steps lost", 0)
    most = sorted(faults.items(), key=lambda one: (-one[1], one[0]))
    others = sum(count for _, count in most[FAULTS:])
    lines = (
        _ending(result, error),
        cause and f"Cause: {cause}",  # the rest is reported where the error is caught
        f"Mean return of the last {last}: {result.episodic_return:.1f}" if result.episodes else NO_EPISODE,
        f"Checkpoint: {result.checkpoint}",
        f"Picture: {result.picture}" if result.picture.exists() else "",
        f"Weights: sha256 {result.weights_sha256[:16]}",
        counts and f"Incidents: {counts}",
        f"Faults of environments, which cost {counted(lost, 'env step')}:" if lost else "",
        *(f"  {count} x {name}" for name, count in most[:FAULTS]),
        f"  {others} more of {counted(len(most) - FAULTS, 'other kind')}" if others else "",
        OTHER_CPU if "other_cpu" in result.incidents else "",
        *(result.times, result.bottleneck, *result.notes),
        how_to_go_on(result, error),
    )
    return [line for line in lines if line]


def _ending(result: Result, error: BaseException | None) -> str:
    if result.iterations == result.resumed_at and result.stopped_by is None:
        fact = f"Nothing to do: the run has already completed its {result.global_step:,} steps"
        return f"{fact}. To go on, raise {as_setting_and_flag('total_timesteps', 2 * result.global_step)}."
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

    def plus(self, row: Mapping[str, float]) -> "TimeSplit":
        """Return the sums with those of another row of metrics."""
        return TimeSplit(self.rows + 1, *(getattr(self, name) + row[f"perf/{name}"] for name in self._fields[1:]))


def times_line(split: TimeSplit, config: Config, epochs: int, *, advise: bool = True) -> str:
    """Return the times of an iteration, and the gain from fewer epochs, at least half, if updating takes the longest.

    Without `advise`, return only the times.

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
    if not advise or update <= collect or not fewer or gain < WORTH_REPORTING:
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
        idle = 1 - split.collect_s / split.iteration_s
        return (
            f"Bottleneck: the actors were idle for {idle:.0%} of the time, during updates. "
            f"{as_setting_and_flag('overlap', True)} would be about {gain:.1f} x as fast; its results differ."
        )
    if _ratio(split.iteration_s, split.update_s) < WORTH_REPORTING:
        return "Bottleneck: the learner. More actors gain nothing."
    samplers = config.num_samplers
    gain = _ratio(split.iteration_s, max(split.update_s, split.iteration_s * config.most_actors / samplers))
    if _ratio(split.iteration_s, split.slowest_actor_s) < WORTH_REPORTING <= gain and not config.env_threads:
        return (
            f"Bottleneck: the actors. {as_setting_and_flag('num_actors', samplers)} would be up to {gain:.1f} x as "
            f"fast if there are CPUs for them, with the same result."
        )
    return ""


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else float("inf")


ITERATIONS = 30  # in a row; a slow start and chance are shorter
FEW = 50  # episodes, for a first mean return
RISE = 0.2  # of the mean return, relative to its size: more than the noise of so many episodes
STILL_KL = 1e-6  # nats; usual are 1e-3 to 2e-2, and a hundredth of these at a tenth of the learning rate
ANNEALED = 0.1  # below this share of the first learning rate, small changes are intended
CERTAIN = 0.01  # share of the first entropy: the less likely of two choices then has a probability of 0.0006
NARROW_STD = 0.01  # of real-valued actions, which starts at 1; useful ones are rarely below 0.05
FALLEN = 0.5  # share of the rise of the mean return that is lost again
UNEXPLAINED = 0.05  # explained variance; values that help reach 0.3 and more
# A value head moves by about 0.02 in an SGD step, so values of hundreds take thousands: Acrobot's -100 are learned,
# LunarLander's 200 and Pendulum's 600 are learned better normalized. Small ones drown in the noise of untrained values.
LARGE, SMALL = 150.0, 1e-3

NOTES = {
    "still": "the policy hardly changes: approx_kl is {kl:.1g}. Raise learning_rate ({row[charts/learning_rate]:.2g} "
    "now) or update_epochs, and check that actions affect rewards",
    "certain": "the policy has become deterministic, and returns have not risen: its entropy fell from {first:.3g} to "
    "{row[losses/entropy]:.3g}. Raise ent_coef ({bonus:g} now), or lower learning_rate",
    "unexplained": "the values explain nothing of the returns: explained_variance is "
    "{row[losses/explained_variance]:.2g}. Use norm_obs and norm_reward if they are off, else more update_epochs, or "
    "memory",
    "constant": "no return other than {row[charts/episodic_return]:g} in {row[global_step]:,} env steps "
    "({row[charts/episodes]:,} episodes): there is nothing to learn from. Reward progress on the way, or explore more "
    "(ent_coef)",
    "fallen": "the mean return has fallen from {best:.4g}, after {at:,} env steps, to "
    "{row[charts/episodic_return]:.4g}. If it does not recover, updates may follow noise: begin again, or with "
    "init_from at an earlier checkpoint, with more num_steps ({of.num_steps} now) or a lower learning_rate "
    "({row[charts/learning_rate]:.2g} now)",
    "scale": "discounted returns are about {size:.3g}, and values learn best from numbers of about 1. Use "
    "norm_reward=True (--norm-reward)",
}
KEYS = (
    *(f"charts/episodic_{name}" for name in ("return", "return_std", "length")),
    *(f"charts/{name}" for name in ("episodes", "learning_rate")),
    *(f"losses/{name}" for name in ("approx_kl", "entropy", "explained_variance")),
)


class LearningNotes(Observer):
    """Logs what speaks against a run whose mean return has not risen, or that has lost half of its rise.

    In a run that has got better, small changes, a certain policy and poor values may be those of a solved task.
    """

    def __init__(self, config: Config, actions: Actions, rows: Iterable[Mapping[str, float]] = ()) -> None:
        """Begin after the earlier `rows` of a run that is resumed, whose notes are not repeated."""
        self._config = of = config
        self._scaled = of.norm_reward or of.norm_value or of.sign_reward or of.clip_reward or of.scale_reward != 1
        # A policy is certain below the first of these numbers, plus the second times the entropy of the first row. Of
        # choices and real numbers side by side, nothing is known.
        self._certain = 0.0, math.nan if any(boxes(actions)) else CERTAIN
        self._fall = 0.0  # of the entropy since the first row, at least
        if isinstance(actions, BoxActions):
            self._fall = 2.0 * actions.width  # it may begin narrow, or wide behind a squash
            self._certain = actions.width * 0.5 * math.log(2 * math.pi * math.e * NARROW_STD**2), 0.0
        self._bonus = of.entropy_weight_for(not any(boxes(actions)))
        self._entropy = self._first = math.nan  # of the first row; the mean return of the first few episodes
        self._lowest, self._highest = math.inf, -math.inf  # mean return so far
        self._best, self._at = -math.inf, 0  # mean return of at least a few episodes, and env steps by then
        self._in_a_row, self._given, self._iteration = Counter[str](), set[str](), math.nan
        for row in rows:
            self.notes(row)

    def on_iteration(self, row: dict[str, float]) -> None:
        """Log the notes that are due after this row."""
        for note in self.notes(row):
            logger.warning("%s", note)

    def notes(self, row: Mapping[str, float]) -> list[str]:
        """Return the notes that are due after `row`, the next one of the run; rows of evaluations say nothing new."""
        if row["iteration"] == self._iteration:
            return []
        of, self._iteration = self._config, row["iteration"]
        mean, spread, length, episodes, rate, kl, entropy, explained = (row.get(key, math.nan) for key in KEYS)
        self._entropy = first = entropy if math.isnan(self._entropy) else self._entropy
        if math.isnan(self._first) and episodes >= FEW:
            self._first = mean
        self._lowest, self._highest = min(self._lowest, mean), max(self._highest, mean)
        if episodes >= FEW and mean > self._best:
            self._best, self._at = mean, int(row["global_step"])
        size = abs(mean) * min(1.0, 1 / max(1e-9, (1 - of.gamma) * length))
        signs = {
            "still": abs(kl) < STILL_KL and rate >= ANNEALED * of.learning_rate,
            "certain": entropy < min(self._certain[0] + self._certain[1] * first, first - self._fall),
            "unexplained": explained < UNEXPLAINED and of.vf_coef > 0,
            "constant": max(self._highest - self._lowest, spread) <= 1e-9 * max(1.0, abs(mean)) and episodes >= FEW,
            "scale": not self._scaled and (size > LARGE or 0 < size < SMALL),
        }
        rise = self._best - self._first
        fallen = rise > RISE * max(abs(self._best), abs(self._first)) and self._best - mean > FALLEN * rise
        risen = mean - self._first > RISE * max(abs(mean), abs(self._first))
        signs = {name: seen and not risen for name, seen in signs.items()} | {"fallen": fallen}
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name, seen in signs.items() if seen})
        due = [name for name, times in self._in_a_row.items() if times >= ITERATIONS and name not in self._given]
        self._given.update(due)
        facts = {"kl": abs(kl), "first": first, "size": size, "best": self._best, "at": self._at, "bonus": self._bonus}
        return [NOTES[name].format(row=row, of=of, **facts) for name in due]
