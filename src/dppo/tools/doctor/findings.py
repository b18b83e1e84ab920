"""Findings about an environment, each with a remedy: one function for each, in the order in which they are shown.

A function yields texts, or none. One that asks for a fact that was not measured (a KeyError) finds nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from dppo.config import Config
from dppo.envs.statistics import REMEDY, kept_in_words
from dppo.tools.doctor.controller_findings import FINDINGS_ABOUT_CONTROLLERS
from dppo.tools.doctor.needed import faults, one_process_each
from dppo.tools.doctor.rank_findings import FINDINGS_ABOUT_RANKS
from dppo.tools.doctor.speed import LEAK_MB, Facts

Finding = Callable[[Facts, Config], Iterator[str]]
FAR_FROM_ONE = 100.0  # rewards this much above or below 1 are learned badly
MAX_SMALL_INTEGER = 255  # larger ones need a normalizer
MAX_OUTPUT_PER_STEP = 100  # bytes
MIN_STEPS_WITHOUT_END = 500  # steps without an end after which episodes count as endless
MAX_CLOSE_S = 4.0  # a run does not wait longer for close()
_FINDINGS: list[tuple[str, Finding]] = []


def findings(facts: Facts, config: Config) -> Iterator[tuple[str, str]]:
    """Yield severity (ok, note, warning, error) and text of each finding."""
    for severity, find in (*_FINDINGS, *FINDINGS_ABOUT_RANKS, *FINDINGS_ABOUT_CONTROLLERS):
        texts = list[str]()
        with suppress(KeyError):
            texts = list(find(facts, config))
        for text in texts:
            yield severity, text


def _finding(severity: str) -> Callable[[Finding], Finding]:
    """Register a function whose texts are findings of this severity."""

    def register(find: Finding) -> Finding:
        _FINDINGS.append((severity, find))
        return find

    return register


def _when(severity: str, fact: str, text: str) -> None:
    """Register a finding: if a fact is true, this text, with facts in braces."""

    @_finding(severity)
    def find(facts: Facts, config: Config) -> Iterator[str]:
        if facts[fact]:
            yield text.format_map(facts)


# --------------------------------------------------------------- how the examination ended


_when(
    "error",
    "died",
    "{died}. If it dies only now and then, use actors (--num-actors), which are replaced: without "
    "them, it ends the run",
)


@_finding("error")
def _hung(facts: Facts, config: Config) -> Iterator[str]:
    if facts["stage"] not in ("closing", "over") and facts["hung"]:
        yield (
            f"{facts['hung']}. If it hangs only now and then, use actors, which are replaced, with --start-timeout-s, "
            f"--reset-timeout-s or --step-timeout-s: without them, it stops the run. Better, give the call a timeout "
            f"of its own"
        )


@_finding("error")
def _hung_in_close(facts: Facts, config: Config) -> Iterator[str]:
    if facts["stage"] == "closing" and facts["hung"]:
        yield f"{facts['hung']}. Give it a timeout: a run leaves it alone"


@_finding("error")
def _thread_goes_on(facts: Facts, config: Config) -> Iterator[str]:
    if facts["stage"] == "over" and facts["hung"] and not facts["threads_ended"]:
        names = ", ".join(facts["threads_left"])
        thread = f"a thread ({names})" if names else "a thread"
        yield (
            f"after close(), {thread} goes on, so that the process does not end; without actors, neither does a run. "
            f"End it in close(), or make it a daemon"
        )


@_finding("error")
def _process_does_not_end(facts: Facts, config: Config) -> Iterator[str]:
    if facts["stage"] == "over" and facts["hung"] and facts["threads_ended"]:
        yield (
            f"after close(), the process does not end, although its threads have ended: {facts['hung']}. Functions "
            f"registered with atexit, and packages of native code, may wait for something; a run then does not end "
            f"either"
        )


_when("warning", "alone", "episodes were not played again in a fresh process: {alone}")

_when("error", "error", "{error}")

_when(
    "note",
    "late",
    "an update with these settings was not over after {late}: no speed is predicted, and episodes "
    "were not played again. Use smaller --num-steps for the doctor",
)

# --------------------------------------------------------------- faults


@_finding("error")
def _faults_that_end_a_run(facts: Facts, config: Config) -> Iterator[str]:
    needed, text = faults(facts, config)
    if needed:
        yield text


@_finding("warning")
def _faults_that_a_run_survives(facts: Facts, config: Config) -> Iterator[str]:
    needed, text = faults(facts, config)
    if text and not needed:
        yield text


@_finding("warning")
def _faults_by_chance(facts: Facts, config: Config) -> Iterator[str]:
    if facts["unlike"]:
        yield (
            f"faults do not follow from seed and actions, as others happened {', '.join(facts['unlike'])}: two runs "
            f"with the same seed differ"
        )


# --------------------------------------------------------------- the same seed and actions


_when(
    "note",
    "rows",
    "{rows} rows step at once, in the times above. Not examined, as they are of single environments: "
    "Gymnasium's checker, get_state",
)


@_finding("warning")
def _statistics_in_wrappers(facts: Facts, config: Config) -> Iterator[str]:
    if facts["statistics"]:
        yield f"{kept_in_words(facts['statistics'])}. {REMEDY.rstrip('.')}"


@_finding("note")
def _single_instance(facts: Facts, config: Config) -> Iterator[str]:
    if facts["elsewhere"] and "silent" not in facts and facts["single"]:
        yield (
            f"a process can have one instance only: a second one raised {facts['single']}, and another process could "
            f"make one meanwhile. Use {one_process_each(facts, config)}"
        )


@_finding("warning")
def _no_second_instance_anywhere(facts: Facts, config: Config) -> Iterator[str]:
    if not facts["elsewhere"] and facts["single"]:
        yield (
            f"a second instance cannot be made, nor in another process: {facts['single']}. Use `num_samplers=1`, or "
            f"free what it needs: a licence, a port, a file"
        )


@_finding("warning")
def _trouble_with_a_second_instance(facts: Facts, config: Config) -> Iterator[str]:
    if facts["silent"] and facts["single"]:
        yield (
            f"with a second instance in its process: {facts['single']}. One alone plays the same steps in a process of "
            f"its own. If a process may have only one, use {one_process_each(facts, config)}"
        )


@_finding("warning")
def _disturbed_by_others(facts: Facts, config: Config) -> Iterator[str]:
    places = _different_places(facts)
    if facts["disturbed"] and places:
        yield (
            f"instances in one process disturb each other: the same seed and actions give another episode {places[0]}, "
            f"and the same one in a process of its own. Share nothing between them, or use "
            f"{one_process_each(facts, config)}"
        )


@_finding("warning")
def _episodes_differ(facts: Facts, config: Config) -> Iterator[str]:
    places = _different_places(facts)
    if "disturbed" in facts or not places:
        return
    if facts.get("statistics"):
        remedy = REMEDY.rstrip(".")
    elif places[0].startswith("in a"):
        remedy = _use_the_seed(config)
    else:
        remedy = "State survives reset, or is shared: set all of it in reset. Else a replaced actor changes the result"
    yield f"the same seed and actions give another episode {places[0]}: {facts['same'][places[0]]}. {remedy}"


@_finding("ok")
def _episodes_repeat(facts: Facts, config: Config) -> Iterator[str]:
    if _repeats(facts):
        yield f"the same seed and actions give the same {facts['compared']:,} steps {', '.join(facts['same'])}"


_when(
    "warning",
    "state",
    "after set_state in another instance: {state}. Return from get_state all that later steps depend "
    "on, and set all of it; until then, runs replay (--env-state off is silent about it)",
)


@_finding("ok")
def _complete_state(facts: Facts, config: Config) -> Iterator[str]:
    if facts["state"] == "":
        yield "another instance goes on in the same way after set_state"


@_finding("note")
def _not_played_again(facts: Facts, config: Config) -> Iterator[str]:
    not_compared = "same" not in facts and "error" not in facts
    if facts["deterministic"] and facts["stage"] == "over" and not_compared:
        yield "its episodes were not played again, for lack of time. Raise --seconds"


@_finding("note")
def _nondeterministic(facts: Facts, config: Config) -> Iterator[str]:
    if not facts["deterministic"]:
        yield "it is declared nondeterministic: lost samplers start new episodes"


def _different_places(facts: Facts) -> list[str]:
    """Return where episodes were made again and differed, the most telling place first."""
    return [place for place, difference in facts["same"].items() if difference]


def _repeats(facts: Facts) -> bool:
    """Return whether episodes were made again, also in a fresh process, and were the same."""
    return bool(facts.get("compared")) and not any(facts["same"].values())


def _use_the_seed(config: Config) -> str:
    alternative = ", or use --no-replay" if config.replay else ""
    return f"Draw all randomness from self.np_random, which super().reset(seed=seed) seeds{alternative}"


# --------------------------------------------------------------- what it does to its process


@_finding("warning")
def _draws_from_global_generators(facts: Facts, config: Config) -> Iterator[str]:
    if not _repeats(facts):
        for generator in _changed_generators(facts):
            yield f"it draws from {generator}, which no seed of an episode sets. {_use_the_seed(config)}"


@_finding("note")
def _seeds_global_generators(facts: Facts, config: Config) -> Iterator[str]:
    if _repeats(facts):
        for generator in _changed_generators(facts):
            yield (
                f"it seeds {generator}, or draws from it. Environments of one process share it, so draw from "
                f"self.np_random"
            )


@_finding("warning")
def _changes_the_process(facts: Facts, config: Config) -> Iterator[str]:
    for state in facts["changed_by_playing"]:
        if "generator" not in state:
            yield f"playing changes {state}, which other code of the process relies on. Restore it"


@_finding("note")
def _constructor_changes_the_process(facts: Facts, config: Config) -> Iterator[str]:
    for state in facts["changed_by_making"]:
        yield f"making it changes {state}"


def _changed_generators(facts: Facts) -> list[str]:
    return [state for state in facts["changed_by_playing"] if "generator" in state]


# --------------------------------------------------------------- what it returns


@_finding("warning")
def _incidents(facts: Facts, config: Config) -> Iterator[str]:
    yield from facts["incidents"]


@_finding("warning")
def _size_of_rewards(facts: Facts, config: Config) -> Iterator[str]:
    if config.norm_reward or config.norm_value or config.sign_reward or config.clip_reward:
        return
    largest = max(abs(reward) for reward in (*facts["rewards"], *facts["returns"]))
    if config.scale_reward == 1 and largest and not 1 / FAR_FROM_ONE < largest < FAR_FROM_ONE:
        yield f"rewards or returns reach {largest:.3g}; values are learned best from about 1. Use --norm-reward"


@_finding("warning")
def _large_integers(facts: Facts, config: Config) -> Iterator[str]:
    for name, (kind, low, high) in facts["observed"].items():
        size = max(-low, high)
        if kind in "iu" and size > MAX_SMALL_INTEGER:
            yield (
                f"integers are not normalized: {name or 'the observation'} reaches {size:,.0f}. Return float32, or "
                f"scale them to about 1"
            )


# --------------------------------------------------------------- memory, output, processes, times


@_finding("warning")
def _leak(facts: Facts, config: Config) -> Iterator[str]:
    run_gb = facts["leak_mb"] * config.total_timesteps / 1e6
    if facts["leak_mb"] > LEAK_MB:
        yield (
            f"memory grows by {facts['leak_mb']:.1f} MB in 1,000 steps, {run_gb:,.1f} GB in a whole run. Free it, "
            f"restart the simulator in reset now and then, or let actors be replaced: --recycle-after, well above what "
            f"the environments of one need"
        )


@_finding("warning")
def _output(facts: Facts, config: Config) -> Iterator[str]:
    if facts["output"] > MAX_OUTPUT_PER_STEP * max(1000, facts.get("steps", 0)):
        yield (
            f"it printed {facts['output'] / 1e6:.1f} MB, at the end {facts['last_line']!r}. Silence it: output costs "
            f"time, and fills disks"
        )


@_finding("warning")
def _leaves_processes(facts: Facts, config: Config) -> Iterator[str]:
    if facts["left"]:
        yield (
            f"close() leaves {len(facts['left'])} of its processes: {facts['left']}. End them there: they may hold "
            f"licences and ports"
        )


@_finding("warning")
def _slow_close(facts: Facts, config: Config) -> Iterator[str]:
    if facts["close_s"] > MAX_CLOSE_S:
        yield f"close() took {facts['close_s']:.1f} s, and a run waits for 4 s"


@_finding("warning")
def _endless_episodes(facts: Facts, config: Config) -> Iterator[str]:
    few_steps = facts["steps"] < MIN_STEPS_WITHOUT_END
    if facts["lengths"] or few_steps or not config.replay or config.env_state == "own":
        return
    remedy = "Give it a time limit (gymnasium.wrappers.TimeLimit)"
    if facts.get("state") == "":
        remedy = "Use --env-state own, which sets its own state instead"
    yield f"no episode ended in {facts['steps']:,} steps, so that replays take ever longer. {remedy}"


@_finding("warning")
def _rare_slow_step(facts: Facts, config: Config) -> Iterator[str]:
    worst = facts["step"]["worst"]
    median = facts["step"]["median"]
    if worst > max(1.0, 50 * median):
        yield (
            f"one step took {worst:.1f} s, others {median:.2g} s: all wait for it, unless --policy-lag has them go on"
        )


@_finding("warning")
def _too_little_memory(facts: Facts, config: Config) -> Iterator[str]:
    if config.num_samplers * config.envs_per_sampler * facts["env_mb"] > facts["available_mb"]:
        yield (
            f"{config.num_samplers} x {config.envs_per_sampler} environments of {facts['env_mb']:,.0f} MB are more "
            f"than the {facts['available_mb']:,.0f} MB available. Use fewer --num-samplers, or more machines"
        )


# --------------------------------------------------------------- for information


_when("note", "batch", "{batch}")

_when("note", "rescaled", "{rescaled}")

_when(
    "warning",
    "off_centre",
    "actions lie between {off_centre}, and the policy, which starts around 0, is clipped to them: it "
    "may stay at a bound. Use --action-bounds rescale",
)


@_finding("note")
def _no_reward(facts: Facts, config: Config) -> Iterator[str]:
    if facts["rewards"] == [0, 0]:
        yield (
            f"all rewards of {facts['steps']:,} steps were 0. If chance finds no other, reward progress on the way"
        )


_when("note", "threads", "an instance starts threads: {threads}")


@_finding("note")
def _processes(facts: Facts, config: Config) -> Iterator[str]:
    if facts["children"]:
        yield f"an instance starts processes: {', '.join(facts['children'])}"


_when("note", "pickle", "it cannot be pickled, and need not be: {pickle}")


@_finding("note")
def _gymnasium_checker(facts: Facts, config: Config) -> Iterator[str]:
    warnings = facts["gymnasium"]
    for warning in [warnings] if isinstance(warnings, str) else warnings:
        yield f"Gymnasium's checker: {warning}"
