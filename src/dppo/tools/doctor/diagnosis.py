"""Diagnosis of an environment from the facts: findings with remedies, the speed to expect, and settings."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from dppo.config import Config
from dppo.envs.repairs import FIRST_STEPS
from dppo.envs.statistics import REMEDY, kept_in_words
from dppo.errors import counted

Facts = dict[str, Any]
ALONE = 0.3  # share of the time of acting together that does not depend on the number of samplers
COLD = 2.0  # times as long takes acting after steps of more than a millisecond, which leave the caches cold
COOL = 1.1  # times as long takes an update in a run as one after the other, for the same reason
TURN_S, TALK_S, OTHER_S = 8e-3, 1.5e-3, 1e-3  # of an iteration: for actors at all, for each of them, for the rest
ACTOR_MB = 65  # of the process of an actor, besides its environments
WORTH = 1.1  # a smaller gain is within the error of the model
ENOUGH, SIMPLE = 0.9, 0.8  # of the best speed: few actors suffice; Ray is not worth it
LEAK_MB = 2.0  # in 1,000 steps; the examination itself needs some
FAR = 100.0  # rewards this much above or below 1 are learned badly


def iteration_s(f: Facts, config: Config, actors: int, *, threads: bool = False, lag: bool = False) -> float:
    """Return the seconds of an iteration that the model predicts: collecting, exchange, update.

    With more actors than samplers, there are as many samplers as actors.
    """
    samplers, known = max(config.num_samplers, actors), config.num_samplers
    env_s = config.num_steps * config.envs_per_sampler * env_step_s(f)  # of a segment of one sampler
    update_s = COOL * f["update_s"] * samplers / known / max(1, config.num_learners)
    cold = COLD if env_step_s(f) > 1e-3 else 1.0

    def acting_s(side_by_side: float) -> float:
        return cold * f["collect_s"] * (ALONE + (1 - ALONE) * side_by_side / known)

    hosted = samplers if actors == 0 else math.ceil(samplers / actors)
    collect_s = hosted * env_s + acting_s(hosted)
    if threads:
        collect_s = max(env_s + acting_s(1), hosted * (f["own_busy"] * env_s + acting_s(1)))
    if actors == 0:
        return collect_s + update_s + OTHER_S
    work_s = samplers * env_s * f["busy"] + actors * acting_s(hosted)  # of all CPUs
    collect_s, exchange_s = max(collect_s, work_s / f["cpus"]), TURN_S + TALK_S * actors
    if lag:
        return max(collect_s, update_s + exchange_s, (work_s + update_s) / f["cpus"]) + OTHER_S
    return collect_s + update_s + exchange_s + OTHER_S


def env_step_s(f: Facts) -> float:
    """Return the mean seconds of a step in the environment, with its share of a reset."""
    if "rows" in f:
        return (f["step"]["mean"] + f["reset"]["mean"] * (f["reset"]["count"] - 1) / f["step"]["count"]) / f["rows"]
    return f["step"]["mean"] + (f["reset"]["mean"] / fmean(f["lengths"]) if f["lengths"] else 0.0)


class Plan(NamedTuple):
    """A way to collect, and the env steps per second to expect of it."""

    speed: float
    samplers: int
    actors: int
    threads: bool = False


def plans(f: Facts, config: Config) -> Iterator[Plan]:
    """Yield a plan in process and with 1, 2, 4, ... 64 actors, and the same with threads where simulators wait."""
    for actors in sorted({0, 1, 2, 4, 8, 16, 32, 64, config.num_samplers} - ({0} if config.num_learners else set())):
        samplers = max(config.num_samplers, actors)
        limit = most_in_process(f, config)
        if limit and math.ceil(samplers / max(1, actors)) > limit:
            continue
        threaded = not limit and config.num_samplers > max(1, actors) and f["busy"] < 0.5
        for threads in (False, True) if threaded else (False,):
            seconds = iteration_s(f, config, actors, threads=threads, lag=config.lag > 0)
            yield Plan(samplers * config.batch_size / config.num_samplers / seconds, samplers, actors, threads)


def most_in_process(f: Facts, config: Config) -> int:
    """Return the most samplers that a process may have, 0 if there is no limit."""
    return 1 if f.get("single") or f.get("disturbed") else config.samplers_per_actor or 0


def in_processes_of_their_own(f: Facts, config: Config) -> dict[str, Any]:
    """Return the settings with which each instance is in a process of its own, if that is needed."""
    if not f.get("elsewhere"):
        return {}
    rows = 1 if "rows" in f else config.envs_per_sampler
    instances = config.num_samplers * rows
    settings = {"num_samplers": instances, "num_actors": instances, "samplers_per_actor": 1}
    return settings | {"envs_per_sampler": config.envs_per_sampler // rows, "standby_envs": 0, "backup_requests": False}


def _one_each(f: Facts, config: Config) -> str:
    """Return the flags for as many processes as there are instances."""
    settings = in_processes_of_their_own(f, config)
    names = ["samplers_per_actor", "num_actors"]
    if settings["num_samplers"] != config.num_samplers:
        names += ["num_samplers", "envs_per_sampler"]
    return ", ".join(f"`{name}={settings[name]}`" for name in names)


def recommended(f: Facts, config: Config) -> Plan:
    """Return the simplest plan that is nearly the fastest for this learning problem, and fits into memory."""
    room = f["available_mb"] - config.num_samplers * config.envs_per_sampler * f["env_mb"]
    every = [*plans(f, config)]
    able = [one for one in every if one.actors <= min(config.num_samplers, max(0, room // ACTOR_MB))] or every[:1]
    if _needs_actors(f):
        able = [one for one in able if one.actors] or able
    best = max(able).speed
    return next(one for one in able if one.speed >= (ENOUGH if one.actors or one.threads else SIMPLE) * best)


def _needs_actors(f: Facts) -> bool:
    """Return whether a run without actors would end with the environment, stop with it for ever, or grow with it."""
    hung = f.get("hung") and f["stage"] != "closing"
    return bool(f.get("died") or hung or f.get("leak_mb", 0.0) > LEAK_MB)


def advice(f: Facts, config: Config) -> Iterator[str]:
    """Yield what Ray, a lag, copies for resets and other sizes would gain."""
    speed, _, actors, threads = recommended(f, config)
    now_s, step_s = iteration_s(f, config, actors, threads=threads), env_step_s(f)
    with_lag_s = iteration_s(f, config, actors, threads=threads, lag=True)
    several = config.envs_per_sampler if "rows" not in f else 0  # whose environments can be had one by one
    if not actors:
        best = max(one.speed for one in plans(f, config) if one.actors <= config.num_samplers)
        yield f"You do not need Ray: with actors, it would be {best / speed:.1f} x as fast at most."
    elif config.iterations > 1 and not config.lag and (gain := now_s / with_lag_s) > WORTH:
        yield f"--policy-lag 1 collects while learning: {gain:.1f} x as fast. It changes what is learned."
    gain = now_s / iteration_s(f | {"reset": f["reset"] | {"mean": 0.0}}, config, actors, threads=threads)
    may_have_copies = several and not config.standby_envs and not most_in_process(f, config)
    if gain > WORTH and may_have_copies and step_s > 1e-3 and not any(f.get("same", {}).values()):
        copies = math.ceil(f["reset"]["mean"] / (fmean(f["lengths"]) * f["step"]["mean"]))
        yield f"--standby-envs {copies} resets in the background: up to {gain:.1f} x as fast."
    if several > 1 and step_s > 1e-3:
        yield (
            f"--num-samplers {config.num_samplers * several} with --envs-per-sampler 1 lets more actors share the same "
            f"batch: environments of a sampler step one after the other."
        )
    if actors and (share := (TURN_S + TALK_S * actors) / now_s) > WORTH - 1 and not config.lag:
        yield f"A larger --num-steps: {share:.0%} of an iteration is exchange with actors. It changes the batch."


# ------------------------------------------------------------------ findings

SURVIVES = "State survives reset, or is shared: set all of it in reset. Else a replaced actor changes the result"


def _seeds(config: Config) -> str:
    otherwise = ", or use --no-replay" if config.replay else ""
    return f"Draw all randomness from self.np_random, which super().reset(seed=seed) seeds{otherwise}"


def _differs(f: Facts, config: Config) -> list[str]:
    """Return the first place where an episode does not follow from its seed, how it differs, and the remedy."""
    found = [(where, what) for where, what in f["same"].items() if what]
    remedy = _seeds(config) if found and found[0][0].startswith("in a") else SURVIVES
    if f.get("statistics"):
        remedy = REMEDY.rstrip(".")
    return [f"{where}: {what}. {remedy}" for where, what in found[:1]]


def _repeats(f: Facts) -> bool:
    """Return whether episodes were made again, also in a fresh process, and were the same."""
    return bool(f.get("compared")) and not any(f["same"].values())


def _generators(f: Facts) -> list[str]:
    return [one for one in f["changed_by_playing"] if "generator" in one]


def _endless(f: Facts, config: Config) -> str:
    """Return what to do about episodes that do not end, if they are replayed."""
    if f["lengths"] or f["steps"] < 500 or not config.replay or config.env_state == "own":
        return ""
    if f.get("state") == "":
        return "Use --env-state own, which sets its own state instead"
    return "Give it a time limit (gymnasium.wrappers.TimeLimit)"


def _size(f: Facts, config: Config) -> float:
    """Return the size of rewards and returns, if they are far from 1 and nothing scales them."""
    of = config
    scaled = of.norm_reward or of.norm_value or of.sign_reward or of.clip_reward or of.scale_reward != 1
    size = max(map(abs, (*f["rewards"], *f["returns"])))
    return 0.0 if scaled or 1 / FAR < size < FAR else float(size)


def _large_integers(f: Facts, config: Config) -> list[str]:
    """Return integers of observations, which no normalizer scales, with their sizes."""
    large = {name: max(-low, high) for name, (kind, low, high) in f["observed"].items() if kind in "iu"}
    return [f"{name or 'the observation'} reaches {size:,.0f}" for name, size in large.items() if size > 255]


def faults(f: Facts, config: Config) -> tuple[dict[str, str], str]:
    """Return the settings with which a run would survive the faults, if it does not already, and a text about them."""
    if not f.get("faults"):
        return {}, ""
    number, (most, seconds), of = sum(f["faults"].values()), config.env.fault_budget, config
    share = min(1.0, number / f["steps"] / f.get("rows", 1))
    hourly = 3600 * share * (recommended(f, config).speed if "update_s" in f else 1 / env_step_s(f))
    early = {"rebuild": 0.0, "raise": 1.0}.get(of.on_env_fault, 1 - (1 - share) ** FIRST_STEPS)
    unit, needed = 10 ** math.floor(math.log10(hourly)), {"on_env_fault": "rebuild"} if early > 0.5 else {}
    if hourly > most * 3600 / seconds:
        needed["env_faults"] = f"{max(1.0, math.ceil(2 * hourly / unit) * unit):.0f}/h"
    kinds = ", ".join(f"{times} x {kind}" for kind, times in f["faults"].items())
    text = (
        f"{f['first_fault'][0]}\nIt is the first of {counted(number, 'fault')} in {f['steps']:,} steps ({kinds}), "
        f"about {hourly:,.{2 * (hourly < 10)}f} an hour. Each costs {f['lost'] / number:.3g} steps of an episode, and "
        f"{f['make']['mean'] + f['reset']['mean']:.2g} s to make the environment anew. "
    )
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in needed.items())
    ends = f"on_env_fault={of.on_env_fault}, env_faults={of.env_faults}: {early:.0%} of runs end in their first"
    text += f"With {ends} {FIRST_STEPS} env steps, others later. With {flags}, a run" if needed else "A run"
    return needed, f"{text} goes on after each."


# fmt: off
FINDINGS: tuple[tuple[str, Callable[[Facts, Config], Any], str], ...] = (
    ("error", lambda f, c: f["died"], "{v}. If it dies only now and then, use actors (--num-actors), which are "
     "replaced: without them, it ends the run"),
    ("error", lambda f, c: f["stage"] not in ("closing", "over") and f["hung"], "{v}. If it hangs only now and then, "
     "use actors, which are replaced, with --start-timeout-s, --reset-timeout-s or --step-timeout-s: without them, it "
     "stops the run. Better, give the call a timeout of its own"),
    ("error", lambda f, c: f["stage"] == "closing" and f["hung"], "{v}. Give it a timeout: a run leaves it alone"),
    ("error", lambda f, c: f["stage"] == "over" and f["hung"], "after close(), a thread goes on, so that the process "
     "does not end; without actors, neither does a run. End it in close(), or make it a daemon"),
    ("warning", lambda f, c: f["alone"], "episodes were not played again in a fresh process: {v}"),
    ("error", lambda f, c: f["error"], "{v}"),
    ("note", lambda f, c: f["late"], "an update with these settings was not over after {v}: no speed is predicted, and "
     "episodes were not played again. Use smaller --num-steps for the doctor"),
    ("error", lambda f, c: all(found := faults(f, c)) and found[1], "{v}"),
    ("warning", lambda f, c: not (found := faults(f, c))[0] and found[1], "{v}"),
    ("warning", lambda f, c: ", ".join(f["unlike"]), "faults do not follow from seed and actions, as others happened "
     "{v}: two runs with the same seed differ"),
    ("note", lambda f, c: f["rows"], "{v} rows step at once, in the times above. Not examined, as they are of single "
     "environments: Gymnasium's checker, get_state"),
    ("warning", lambda f, c: f["statistics"] and kept_in_words(f["statistics"]), "{v}. " + REMEDY.rstrip(".")),
    ("note", lambda f, c: f["elsewhere"] and "silent" not in f and f["single"],
     "a process can have one instance only: a second one raised {v}, and another process could make one meanwhile. Use "
     "{one_each}"),
    ("warning", lambda f, c: not f["elsewhere"] and f["single"],
     "a second instance cannot be made, nor in another process: {v}. Use `num_samplers=1`, or free what it needs: a "
     "licence, a port, a file"),
    ("warning", lambda f, c: f["silent"] and f["single"],
     "with a second instance in its process: {v}. One alone plays the same steps in a process of its own. If a process "
     "may have only one, use {one_each}"),
    ("warning", lambda f, c: f["disturbed"] and [where for where, what in f["same"].items() if what][:1],
     "instances in one process disturb each other: the same seed and actions give another episode {v}, and the same "
     "one in a process of its own. Share nothing between them, or use {one_each}"),
    ("warning", lambda f, c: "disturbed" not in f and _differs(f, c),
     "the same seed and actions give another episode {v}"),
    ("ok", lambda f, c: [", ".join(f["same"])] if f["compared"] and not any(f["same"].values()) else [],
     "the same seed and actions give the same {f[compared]:,} steps {v}"),
    ("warning", lambda f, c: f["state"], "after set_state in another instance: {v}. Return from get_state all that "
     "later steps depend on, and set all of it; until then, runs replay (--env-state off is silent about it)"),
    ("ok", lambda f, c: f["state"] == "", "another instance goes on in the same way after set_state"),
    ("note", lambda f, c: f["deterministic"] and f["stage"] == "over" and "same" not in f and "error" not in f,
     "its episodes were not played again, for lack of time. Raise --seconds"),
    ("note", lambda f, c: not f["deterministic"], "it is declared nondeterministic: lost samplers start new episodes"),
    ("warning", lambda f, c: [f"{one}, which no seed of an episode sets. {_seeds(c)}" for one in _generators(f)]
     if not _repeats(f) else [], "it draws from {v}"),
    ("note", lambda f, c: _generators(f) if _repeats(f) else [],
     "it seeds {v}, or draws from it. Environments of one process share it, so draw from self.np_random"),
    ("warning", lambda f, c: [one for one in f["changed_by_playing"] if "generator" not in one],
     "playing changes {v}, which other code of the process relies on. Restore it"),
    ("note", lambda f, c: f["changed_by_making"], "making it changes {v}"),
    ("warning", lambda f, c: f["incidents"], "{v}"),
    ("warning", _size, "rewards or returns reach {v:.3g}; values are learned best from about 1. Use --norm-reward"),
    ("warning", _large_integers, "integers are not normalized: {v}. Return float32, or scale them to about 1"),
    ("warning", lambda f, c: f["leak_mb"] > LEAK_MB and f["leak_mb"] * c.total_timesteps / 1e6,
     "memory grows by {f[leak_mb]:.1f} MB in 1,000 steps, {v:,.1f} GB in a whole run. Free it, restart the simulator "
     "in reset now and then, or let actors be replaced: --recycle-after, well above what the environments of one need"),
    ("warning", lambda f, c: f["output"] > 100 * max(1000, f.get("steps", 0)) and f["output"] / 1e6,
     "it printed {v:.1f} MB, at the end {f[last_line]!r}. Silence it: output costs time, and fills disks"),
    ("warning", lambda f, c: len(f["left"]), "close() leaves {v} of its processes: {f[left]}. End them there: they may "
     "hold licences and ports"),
    ("warning", lambda f, c: f["close_s"] > 4 and f["close_s"], "close() took {v:.1f} s, and a run waits for 4 s"),
    ("warning", _endless, "no episode ended in {f[steps]:,} steps, so that replays take ever longer. {v}"),
    ("warning", lambda f, c: f["step"]["worst"] > max(1.0, 50 * f["step"]["median"]) and f["step"]["worst"],
     "one step took {v:.1f} s, others {f[step][median]:.2g} s: all wait for it, unless --policy-lag has them go on"),
    ("warning", lambda f, c: c.num_samplers * c.envs_per_sampler * f["env_mb"] > f["available_mb"],
     "{c.num_samplers} x {c.envs_per_sampler} environments of {f[env_mb]:,.0f} MB are more than the "
     "{f[available_mb]:,.0f} MB available. Use fewer --num-samplers, or more machines"),
    ("note", lambda f, c: f["batch"], "{v}"),
    ("note", lambda f, c: f["rescaled"], "{v}"),
    ("warning", lambda f, c: f["off_centre"], "actions lie between {v}, and the policy, which starts around 0, is "
     "clipped to them: it may stay at a bound. Use --action-bounds rescale"),
    ("note", lambda f, c: f["rewards"] == [0, 0],
     "all rewards of {f[steps]:,} steps were 0. If chance finds no other, reward progress on the way"),
    ("note", lambda f, c: f["threads"], "an instance starts threads: {v}"),
    ("note", lambda f, c: [", ".join(f["children"])] if f["children"] else [], "an instance starts processes: {v}"),
    ("note", lambda f, c: f["pickle"], "it cannot be pickled, and need not be: {v}"),
    ("note", lambda f, c: f["gymnasium"], "Gymnasium's checker: {v}"),
)
# fmt: on
"""Severity; a function that returns what is found, a list of several, or nothing; and the text about it."""


def findings(f: Facts, config: Config) -> Iterator[tuple[str, str]]:
    """Yield severity and text of each finding; facts that were not measured lead to none."""
    for severity, find, text in FINDINGS:
        with suppress(KeyError):
            found = find(f, config)
            for v in found if isinstance(found, list) else [found] if found else []:
                one_each = _one_each(f, config) if "{one_each}" in text else ""
                yield severity, text.format(v=v, f=f, c=config, one_each=one_each)
