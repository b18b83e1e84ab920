"""A model of an iteration: the speed to expect with any number of actors, and what would make a run faster.

`facts` are what `examination.py` has measured: see `Facts`.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from dppo.config import Config
from dppo.config.resolve import value_of
from dppo.config.ways import LAGGING_SAC_STEPS, WAYS, Way
from dppo.errors import counted
from dppo.records.terminal.figures import duration

Facts = dict[str, Any]
"""Facts about an environment by name; a fact that was not measured is absent."""
Findings = Iterator[tuple[str, str]]
"""Severity (ok, note, warning, error) and text of each finding."""

# share of the time of acting that does not depend on the number of samplers in a process
SHARED_ACTING = 0.3
# factor of the time of acting after steps of more than a millisecond: the caches are cold
COLD_ACTING = 2.0
# factor of the time of an update in a run, compared with updates one after the other
COLD_UPDATE = 1.1
SLOW_STEP_S = 1e-3
TURN_S = 8e-3  # time of an iteration with actors that does not depend on their number
TALK_S = 1.5e-3  # time of an iteration for each actor
OTHER_S = 1e-3  # time of an iteration for files and displays
ACTOR_MB = 65  # memory of the process of an actor, besides its environments
WORTHWHILE = 1.1  # a smaller gain is within the error of the model
NEARLY_BEST = 0.9  # share of the best speed for which fewer actors are recommended
SIMPLER = 0.8  # share of the best speed for which a plan without Ray is recommended
TAKES_TIME_S = 5e-3  # time of a step from which on env steps count more than SGD
SLIGHTLY_SLOWER = 1.25  # times the time of the defaults, which is worth fewer env steps
# share of the time of training that evaluations in the same process may take without a word
LONG_EVALUATIONS = 0.25
LEAK_MB = 2.0  # growth in 1,000 steps; the examination itself needs some
ACTOR_NUMBERS = {0, 1, 2, 4, 8, 16, 32, 64}
BUSY = 0.5  # share of the time; with less, a simulator mainly waits, and threads help


@dataclass(frozen=True)
class Plan:
    """A way to collect, and the env steps per second to expect of it."""

    speed: float
    samplers: int
    actors: int
    threads: bool = False


def iteration_s(
    facts: Facts, config: Config, actors: int, *, threads: bool = False, lag: bool | None = None
) -> float:
    """Return the seconds of an iteration that the model predicts: collecting, exchange, update.

    With more actors than samplers, there are as many samplers as actors.

    Args:
        lag: collect while learning; None: if `config` does.
    """
    samplers = max(config.num_samplers, actors)
    # of the environments of one sampler
    segment_s = config.num_steps * config.envs_per_sampler * env_step_s(facts)
    more_rows = samplers / config.num_samplers
    update_s = COLD_UPDATE * facts["update_s"] * more_rows / max(1, config.num_learners)
    cold = COLD_ACTING if env_step_s(facts) > SLOW_STEP_S else 1.0

    def acting_s(side_by_side: float) -> float:
        share = SHARED_ACTING + (1 - SHARED_ACTING) * side_by_side / config.num_samplers
        return float(cold * facts["collect_s"] * share)

    hosted = samplers if actors == 0 else math.ceil(samplers / actors)
    if threads:
        interpreter_s = hosted * (facts["own_busy"] * segment_s + acting_s(1))
        collect_s = max(segment_s + acting_s(1), interpreter_s)
    else:
        collect_s = hosted * segment_s + acting_s(hosted)
    if actors == 0:
        return collect_s + update_s + OTHER_S
    cpu_s = samplers * segment_s * facts["busy"] + actors * acting_s(hosted)
    collect_s = max(collect_s, cpu_s / facts["cpus"])
    exchange_s = TURN_S + TALK_S * actors
    if lag is None:
        lag = config.lag > 0
    if lag:
        return max(collect_s, update_s + exchange_s, (cpu_s + update_s) / facts["cpus"]) + OTHER_S
    return collect_s + update_s + exchange_s + OTHER_S


def env_step_s(facts: Facts) -> float:
    """Return the mean seconds of a step in the environment on a quiet machine, with its share of a reset."""
    undisturbed = facts.get("undisturbed", 1.0)
    step_s = undisturbed * facts["step"]["mean"]
    reset_s = undisturbed * facts["reset"]["mean"]
    if "rows" in facts:
        resets_per_step = (facts["reset"]["count"] - 1) / facts["step"]["count"]
        return float((step_s + reset_s * resets_per_step) / facts["rows"])
    if not facts["lengths"]:
        return float(step_s)
    return float(step_s + reset_s / fmean(facts["lengths"]))


def plans(facts: Facts, config: Config) -> Iterator[Plan]:
    """Yield a plan in process and with 1, 2, 4, ... 64 actors, and the same with threads where simulators wait."""
    numbers = ACTOR_NUMBERS | {config.num_samplers}
    if config.num_learners:
        numbers = numbers - {0}
    limit = max_in_process(facts, config)
    for actors in sorted(number for number in numbers if number <= config.sampling.most_hosted):
        plan = _plan(facts, config, actors, threads=False)
        if limit and math.ceil(plan.samplers / max(1, actors)) > limit:
            continue
        yield plan
        if not limit and config.num_samplers > max(1, actors) and facts["busy"] < BUSY:
            yield _plan(facts, config, actors, threads=True)


def _plan(facts: Facts, config: Config, actors: int, *, threads: bool) -> Plan:
    samplers = max(config.num_samplers, actors)
    steps = samplers * config.batch_size / config.num_samplers
    speed = steps / iteration_s(facts, config, actors, threads=threads)
    return Plan(speed, samplers, actors, threads)


def max_in_process(facts: Facts, config: Config) -> int:
    """Return the most samplers that a process may have, 0 if there is no limit."""
    if facts.get("single") or facts.get("disturbed"):
        return 1
    return config.samplers_per_actor or 0


def recommended(facts: Facts, config: Config) -> Plan:
    """Return the simplest plan that is nearly the fastest for this learning problem, and fits into memory."""
    envs_mb = config.num_samplers * config.envs_per_sampler * facts["env_mb"]
    max_actors = min(config.num_samplers, max(0, (facts["available_mb"] - envs_mb) // ACTOR_MB))
    candidates = list(plans(facts, config))
    fitting = [plan for plan in candidates if plan.actors <= max_actors] or candidates[:1]
    if needs_actors(facts):
        fitting = [plan for plan in fitting if plan.actors] or fitting
    best_speed = max(plan.speed for plan in fitting)
    for plan in fitting:
        share = NEARLY_BEST
        if not plan.actors and not plan.threads:
            share = SIMPLER
        if plan.speed >= share * best_speed:
            return plan
    raise AssertionError("the fastest plan is nearly the fastest")


class WayHere(NamedTuple):
    """A way to learn, for an environment whose facts are known."""

    way: Way
    config: Config
    facts: Facts
    """Facts about the environment, with the times that the settings of `config` take."""
    speed: float
    """Env steps per second to expect."""

    @property
    def relative_time(self) -> float:
        """Seconds to a good return, as a share of a number that is the same for all ways."""
        return self.way.share / self.speed

    def advice(self) -> str:
        """Describe the env steps and the time to expect."""
        tasks = self.way.discrete
        kind = "discrete"
        if self.facts["continuous"] or tasks is None:
            tasks = self.way.continuous
            kind = "continuous"
        reason = f"{self.way.flags} {self.way.reason}. " if self.way.settings else ""
        not_learned = ""
        if tasks.not_learned:
            not_learned = f" ({', '.join(tasks.not_learned)}: not learned)"
        return (
            f"{reason}{tasks.count} known tasks with {kind} actions needed {tasks.fewest:,} to {tasks.most:,} env "
            f"steps to a good return with these settings{not_learned}: {duration(tasks.fewest / self.speed)} to "
            f"{duration(tasks.most / self.speed)} on this machine, if your task is similar."
        )


def best_way(facts: Facts, config: Config, chosen: Collection[str]) -> WayHere | None:
    """Return the way to learn with the fewest env steps, by known tasks, that does not take too long in time.

    Where steps take time, it may be somewhat slower than the fastest way; elsewhere each way must be worthwhile beside
    those before it. Returns None if settings of ways are among those `chosen` by the user or a preset, or for another
    algorithm than PPO, as no figures are known then.
    """
    if config.algo != "ppo" or any(way.settings.keys() & chosen for way in WAYS):
        return None
    ways = list(_ways_here(facts, config))
    shortest = min(way_here.relative_time for way_here in ways)
    if env_step_s(facts) > TAKES_TIME_S:
        quick = [
            way_here for way_here in ways if way_here.relative_time <= SLIGHTLY_SLOWER * shortest
        ]
        return min(quick, key=lambda way_here: way_here.way.share)
    return next(way_here for way_here in ways if way_here.relative_time < WORTHWHILE * shortest)


def _ways_here(facts: Facts, config: Config) -> Iterator[WayHere]:
    """Yield the ways that are possible in this environment, the defaults first."""
    for way in WAYS:
        changed = way.within(config) if way.settings else config
        if changed is None:
            continue
        if way.algo == config.algo:
            facts_then = _facts_with(facts, config, changed)
        elif way.algo in facts.get("algorithms", {}):
            facts_then = facts | facts["algorithms"][way.algo]
        else:
            continue
        yield WayHere(way, changed, facts_then, recommended(facts_then, changed).speed)


def _facts_with(facts: Facts, config: Config, changed: Config) -> Facts:
    """Return facts with the times of an iteration that the settings `changed` of the same algorithm would take."""
    dims = int(facts["continuous"])
    steps = changed.num_steps / config.num_steps
    epochs = value_of("update_epochs", changed, dims) / value_of("update_epochs", config, dims)
    sgd = steps * epochs * changed.reuse / config.reuse
    return facts | {"collect_s": steps * facts["collect_s"], "update_s": sgd * facts["update_s"]}


def needs_actors(facts: Facts) -> bool:
    """Return whether a run without actors would end with the environment, stop with it for ever, or grow with it."""
    hung = facts.get("hung") and facts["stage"] != "closing"
    return bool(facts.get("died") or hung or facts.get("leak_mb", 0.0) > LEAK_MB)


def advice(facts: Facts, config: Config) -> Iterator[str]:
    """Yield what Ray, a lag, copies for resets and other sizes would gain."""
    plan = recommended(facts, config)
    now_s = iteration_s(facts, config, plan.actors, threads=plan.threads)
    step_s = env_step_s(facts)
    if not plan.actors:
        most = config.num_samplers
        best = max(other.speed for other in plans(facts, config) if other.actors <= most)
        effect = f"would make this command {best / plan.speed:.1f} x as fast at most"
        if best < WORTHWHILE * plan.speed:
            effect = "would not make this command faster"
        if plan.threads:
            effect += ", because threads step all environments at the same time"
        yield (
            f"You do not need Ray for speed: actors (up to {most}, one for each sampler) {effect}. But without actors, "
            f"a hang or a crash stops the run. Use --num-actors {most} if your simulator hangs or crashes: lost actors "
            f"are replaced."
        )
    elif config.iterations > 1 and not config.lag:
        gain = now_s / iteration_s(facts, config, plan.actors, threads=plan.threads, lag=True)
        if gain > WORTHWHILE:
            yield _advice_on_lag(config, gain)
    yield from _advice_on_resets(facts, config, plan)
    yield from _advice_on_evaluations(facts, config, plan)
    if "rows" not in facts and config.envs_per_sampler > 1 and step_s > SLOW_STEP_S:
        yield (
            f"--num-samplers {config.num_samplers * config.envs_per_sampler} with --envs-per-sampler 1 lets more "
            f"actors share the same batch: environments of a sampler step one after the other."
        )
    exchange = (TURN_S + TALK_S * plan.actors) / now_s
    if plan.actors and exchange > WORTHWHILE - 1 and not config.lag:
        yield f"A larger --num-steps: {exchange:.0%} of an iteration is exchange with actors. It changes the batch."


def _advice_on_lag(config: Config, gain: float) -> str:
    settings = "--policy-lag 1"
    effect = "It changes what is learned"
    if config.algo == "sac":
        if config.num_steps > LAGGING_SAC_STEPS:
            settings += f" --num-steps {LAGGING_SAC_STEPS}"
        effect += (
            f", and costs soft actor-critic hardly any env steps on four of five known tasks, with segments of "
            f"{LAGGING_SAC_STEPS}"
        )
    return f"{settings} collects while learning: {gain:.1f} x as fast. {effect}."


def _advice_on_evaluations(facts: Facts, config: Config, plan: Plan) -> Iterator[str]:
    """Yield how long evaluations take, if training waits for them, or they cannot keep up."""
    if config.eval_every is None or not facts["lengths"]:
        return
    players = config.evaluators_with(has_actors=plan.actors > 0, threads=plan.threads)
    episode_s = fmean(facts["lengths"]) * facts["step"]["mean"] + facts["reset"]["mean"]
    evaluation_s = math.ceil(config.eval_episodes / players) * episode_s
    between_s = config.eval_every / plan.speed
    takes = f"An evaluation of {counted(config.eval_episodes, 'episode')} takes {duration(evaluation_s)}"
    if not plan.actors and evaluation_s > LONG_EVALUATIONS * between_s:
        yield (
            f"{takes}, and the training between two evaluations {duration(between_s)}. Fewer --eval-episodes, or a "
            f"larger --eval-every, leave more time for training."
        )
    elif plan.actors and evaluation_s > between_s:
        needed = min(config.eval_episodes, math.ceil(players * evaluation_s / between_s))
        yield (
            f"{takes} on {counted(players, 'actor')}, and another is due every {duration(between_s)}. "
            f"--eval-actors {needed} keeps up."
        )


def _advice_on_resets(facts: Facts, config: Config, plan: Plan) -> Iterator[str]:
    """Yield what copies that are reset in the background would gain, where a run may have them."""
    if (
        "rows" in facts
        or config.standby_envs
        or max_in_process(facts, config)
        or any(facts.get("same", {}).values())
    ):
        return
    without_resets = facts | {"reset": facts["reset"] | {"mean": 0.0}}
    gain = _plan(without_resets, config, plan.actors, threads=plan.threads).speed / plan.speed
    if gain > WORTHWHILE and env_step_s(facts) > SLOW_STEP_S:
        copies = math.ceil(
            facts["reset"]["mean"] / (fmean(facts["lengths"]) * facts["step"]["mean"])
        )
        envs = config.num_samplers * config.envs_per_sampler
        needed = (1 + copies) * envs + config.evaluators
        if needed <= (config.licences or needed):
            yield f"--standby-envs {copies} resets in the background: up to {gain:.1f} x as fast."
