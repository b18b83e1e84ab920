"""Findings about an environment, each with a remedy, in the order in which they are shown.

A fact that was not measured is absent, and nothing is found about it.
"""

from dppo.config import Config
from dppo.envs.statistics import REMEDY, describe_statistics
from dppo.errors import counted
from dppo.slots.layout import CORES_REMEDY
from dppo.tools.doctor.controller_findings import findings_about_controllers
from dppo.tools.doctor.controllers import MIN_STEPS_WITHOUT_END
from dppo.tools.doctor.needed import faults, one_process_each
from dppo.tools.doctor.speed import LEAK_MB, Facts, Findings

FAR_FROM_ONE = 100.0  # rewards this much above or below 1 are learned badly
MAX_SMALL_INTEGER = 255  # larger ones need a normalizer
MAX_OUTPUT_PER_STEP = 100  # bytes
MAX_NAMED_FILES = 3
MAX_CLOSE_S = 4.0  # a run does not wait longer for close()


def findings(facts: Facts, config: Config) -> Findings:
    """Yield severity and text of each finding."""
    yield from _about_the_end(facts)
    yield from _about_faults(facts, config)
    yield from _about_instances(facts, config)
    yield from _about_repetitions(facts, config)
    yield from _about_the_process(facts, config)
    yield from _about_answers(facts, config)
    yield from _about_resources(facts, config)
    yield from _about_the_task(facts)
    yield from _about_ranks(facts, config)
    yield from findings_about_controllers(facts, config)


def _about_the_end(facts: Facts) -> Findings:
    """Yield how the examination ended."""
    if facts.get("died"):
        yield (
            "error",
            f"{facts['died']}. If it dies only now and then, use actors (--num-actors), which are replaced: without "
            f"them, it ends the run",
        )
    if facts.get("hung"):
        yield "error", _hung(facts)
    if facts.get("alone"):
        yield "warning", f"episodes were not played again in a fresh process: {facts['alone']}"
    if facts.get("error"):
        yield "error", facts["error"]
    if facts.get("late"):
        yield (
            "note",
            f"an update with these settings was not over after {facts['late']}: no speed is predicted. Use smaller "
            f"--num-steps for the doctor",
        )


def _hung(facts: Facts) -> str:
    hung = facts["hung"]
    if facts["stage"] == "closing":
        return f"{hung}. Give it a timeout: a run does not wait for it"
    if facts["stage"] != "over":
        return (
            f"{hung}. If it is slow, raise --seconds to some 20 times what it needs. If it hangs now and then, "
            f"use actors, which are replaced, with --start-timeout-s, --reset-timeout-s or --step-timeout-s: without "
            f"them, it stops the run. Better, give the call a timeout of its own"
        )
    if facts["threads_ended"]:
        return (
            f"after close(), the process does not end, although its threads have ended: {hung}. Functions registered "
            f"with atexit, and packages of native code, may wait for something; a run then does not end either"
        )
    names = ", ".join(facts["threads_left"])
    thread = f"a thread ({names})" if names else "a thread"
    return (
        f"after close(), {thread} keeps running, so the process does not end; without actors, a run does not end "
        f"either. End it in close(), or make it a daemon"
    )


def _about_faults(facts: Facts, config: Config) -> Findings:
    needed, text = faults(facts, config)
    if text:
        yield "warning" if needed == {} else "error", text
    if facts.get("unlike"):
        yield (
            "warning",
            f"faults do not follow from seed and actions: different ones happened {', '.join(facts['unlike'])}. Two "
            f"runs with the same seed differ",
        )


# --------------------------------------------------------------- the same seed and actions


def _about_instances(facts: Facts, config: Config) -> Findings:
    if facts.get("rows"):
        yield (
            "note",
            f"{facts['rows']} sub-environments step at once in the times above. Gymnasium's checker and get_state are "
            f"for single environments, and were not examined",
        )
    if facts.get("statistics"):
        yield "warning", f"{describe_statistics(facts['statistics'])}. {REMEDY.rstrip('.')}"
    if facts.get("single"):
        yield _single_instance(facts, config)


def _single_instance(facts: Facts, config: Config) -> tuple[str, str]:
    """Return the finding that a process cannot have a second instance, or has trouble with it."""
    single = facts["single"]
    if facts.get("silent"):
        return (
            "warning",
            f"with a second instance in its process: {single}. One alone plays the same steps in a process of its own. "
            f"If a process may have only one, use {one_process_each(facts, config)}",
        )
    if facts["elsewhere"]:
        return (
            "note",
            f"a process can have one instance only: a second one raised {single}, and another process could make one "
            f"meanwhile. Use {one_process_each(facts, config)}",
        )
    return (
        "warning",
        f"a second instance cannot be made, not even in another process: {single}. Use `num_samplers=1`, or free what "
        f"it needs: a licence, a port, a file",
    )


def _about_repetitions(facts: Facts, config: Config) -> Findings:
    differences = facts.get("same", {})
    # the most telling place first
    differing = [place for place, difference in differences.items() if difference]
    if differing and facts.get("disturbed"):
        yield (
            "warning",
            f"instances in one process disturb each other: the same seed and actions give another episode "
            f"{differing[0]}, and the same one in a process of its own. Share nothing between them, or use "
            f"{one_process_each(facts, config)}",
        )
    elif differing:
        remedy = (
            "State survives reset, or is shared: set all of it in reset. Otherwise a replaced actor changes the "
            "result"
        )
        if facts.get("statistics"):
            remedy = REMEDY.rstrip(".")
        elif differing[0].startswith("in a"):
            remedy = _use_the_seed(config)
        difference = f"{differing[0]}: {differences[differing[0]]}"
        yield "warning", f"the same seed and actions give another episode {difference}. {remedy}"
    if _repeats(facts):
        places = ", ".join(differences)
        yield "ok", f"the same seed and actions give the same {facts['compared']:,} steps {places}"
    if facts.get("state"):
        yield (
            "warning",
            f"after set_state in another instance: {facts['state']}. Return from get_state all that later steps depend "
            f"on, and set all of it; until then, runs replay (--env-state off hides this warning)",
        )
    elif facts.get("state") == "":
        yield "ok", "another instance goes on in the same way after set_state"
    deterministic = facts.get("deterministic")
    if deterministic is False:
        yield "note", "it is declared nondeterministic: lost samplers start new episodes"
    elif deterministic and facts["stage"] == "over" and not facts.keys() & {"same", "error"}:
        yield "note", "its episodes were not played again, for lack of time. Raise --seconds"


def _repeats(facts: Facts) -> bool:
    """Return whether repeated episodes were equal to the first ones, also in a fresh process."""
    return bool(facts.get("compared")) and not any(facts["same"].values())


def _use_the_seed(config: Config) -> str:
    alternative = ", or use --no-replay" if config.replay else ""
    return f"Draw all randomness from self.np_random, which super().reset(seed=seed) seeds{alternative}"


# --------------------------------------------------------------- what it does and returns


def _about_the_process(facts: Facts, config: Config) -> Findings:
    generators_first = sorted(
        facts.get("changed_by_playing", ()), key=lambda state: "generator" not in state
    )
    for state in generators_first:
        if "generator" not in state:
            yield (
                "warning",
                f"playing changes {state}, which other code of the process relies on. Restore it",
            )
        elif _repeats(facts):
            yield (
                "note",
                f"it seeds {state}, or draws from it. Environments of one process share it, so draw from "
                f"self.np_random",
            )
        else:
            yield (
                "warning",
                f"it draws from {state}, which no seed of an episode sets. {_use_the_seed(config)}",
            )
    if facts.get("written"):
        names = ", ".join(facts["written"][:MAX_NAMED_FILES])
        yield (
            "warning",
            f"files of the current folder were written meanwhile: {names}. If it writes them, all instances write the "
            f"same ones. Give its constructor a parameter scratch_dir, a path of its own, and write there",
        )
    for state in facts.get("changed_by_making", ()):
        yield "note", f"making it changes {state}"


def _about_answers(facts: Facts, config: Config) -> Findings:
    for text in facts.get("incidents", ()):
        yield "warning", text
    if not config.scales_rewards:
        rewards = (*facts.get("rewards", ()), *facts.get("returns", ()))
        largest = max(map(abs, rewards), default=0)
        if largest and not 1 / FAR_FROM_ONE < largest < FAR_FROM_ONE:
            yield (
                "warning",
                f"rewards or returns reach {largest:.3g}; values are learned best if these are about 1. "
                f"Use --norm-reward",
            )
    for name, (kind, low, high) in facts.get("observed", {}).items():
        size = max(-low, high)
        if kind in "iu" and size > MAX_SMALL_INTEGER:
            yield (
                "warning",
                f"integers are not normalized: {name or 'the observation'} reaches {size:,.0f}. Return float32, or "
                f"scale them to about 1",
            )


# --------------------------------------------------------------- memory, output, processes, times


def _about_resources(facts: Facts, config: Config) -> Findings:
    leak_mb = facts.get("leak_mb", 0.0)
    if leak_mb > LEAK_MB:
        run_gb = leak_mb * config.total_timesteps / 1e6
        yield (
            "warning",
            f"memory grows by {leak_mb:.1f} MB in 1,000 env steps, {run_gb:,.1f} GB in a whole run. Free it, restart "
            f"the simulator in reset now and then, or let actors be replaced: --recycle-after, well above what the "
            f"environments of one need",
        )
    steps = facts.get("steps", 0)
    if facts.get("output", 0) > MAX_OUTPUT_PER_STEP * max(1000, steps):
        yield (
            "warning",
            f"it printed {facts['output'] / 1e6:.1f} MB, at the end {facts['last_line']!r}. Silence it: output costs "
            f"time, and fills disks",
        )
    if facts.get("left"):
        yield (
            "warning",
            f"close() leaves {len(facts['left'])} of its processes: {facts['left']}. End them there: they may hold "
            f"licences and ports",
        )
    if facts.get("close_s", 0.0) > MAX_CLOSE_S:
        yield "warning", f"close() took {facts['close_s']:.1f} s, and a run waits for 4 s"
    is_replayed = config.replay and config.env_state != "own"
    if (
        is_replayed
        and steps >= MIN_STEPS_WITHOUT_END
        and not facts["lengths"]
        and not facts["faults"]
    ):
        remedy = "Give it a time limit (gymnasium.wrappers.TimeLimit)"
        if facts.get("state") == "":
            remedy = "Use --env-state own, which sets its own state instead"
        yield (
            "warning",
            f"no episode ended in {steps:,} steps, so that replays take ever longer. {remedy}",
        )
    yield from _about_times_and_memory(facts, config)


def _about_times_and_memory(facts: Facts, config: Config) -> Findings:
    times = facts.get("step", {})
    worst = times.get("worst", 0.0)
    if worst > 1.0 and worst > 50 * times["median"]:
        yield (
            "warning",
            f"one step took {worst:.1f} s, others {times['median']:.2g} s: all others wait for it, unless "
            f"you use --policy-lag",
        )
    env_mb = facts.get("env_mb", 0.0)
    if env_mb and config.num_samplers * config.envs_per_sampler * env_mb > facts["available_mb"]:
        yield (
            "warning",
            f"{config.num_samplers} x {config.envs_per_sampler} environments of {env_mb:,.0f} MB are more than the "
            f"{facts['available_mb']:,.0f} MB available. Use fewer --num-samplers, or more machines",
        )


# --------------------------------------------------------------- for information


def _about_the_task(facts: Facts) -> Findings:
    for fact in ("batch", "rescaled"):
        if facts.get(fact):
            yield "note", facts[fact]
    if facts.get("off_centre"):
        yield (
            "warning",
            f"actions lie between {facts['off_centre']}, and the policy, which starts around 0, is clipped to them: it "
            f"may stay at a bound. Use --action-bounds rescale",
        )
    if facts.get("beside_unbounded"):
        yield "warning", facts["beside_unbounded"].rstrip(".")
    if facts.get("rewards") == [0, 0]:
        yield (
            "note",
            f"all rewards of {facts['steps']:,} steps were 0. If random actions find no other, reward "
            f"progress on the way",
        )
    if facts.get("threads"):
        yield "note", f"an instance starts threads: {facts['threads']}"
    if facts.get("children"):
        yield "note", f"an instance starts processes: {', '.join(facts['children'])}"
    if facts.get("pickle"):
        yield "note", f"it cannot be pickled, and need not be: {facts['pickle']}"
    for warning in facts.get("gymnasium", ()):
        yield "note", f"Gymnasium's checker: {warning}"


def _about_ranks(facts: Facts, config: Config) -> Findings:
    """Yield findings about the ranks of an environment's program, and how many environments fit this machine."""
    cores = config.layout.cores
    if cores and facts.get("shared_cores"):
        yield (
            "warning",
            f"its ranks are not bound to cores of their own: several may run on core {facts['shared_cores'][0]}. Start "
            f"them by `slots.launch`, without an mpirun of your own",
        )
    if cores and "env_mb" in facts:
        by_cores = facts["cpus"] // cores
        by_memory = int(facts["available_mb"] // max(1.0, facts["env_mb"]))
        environments = counted(min(by_cores, by_memory), "environment")
        text = (
            f"this machine has room for {environments} of {config.layout}: {by_cores} by its cores, {by_memory} by its "
            f"memory, {facts['env_mb']:,.0f} MB for all ranks of an environment"
        )
        severity = "note"
        needed = config.num_samplers * config.sampling.envs_of_sampler
        if by_cores < needed and not config.address:
            severity = "warning"
            text += f". A run with {needed} environments is refused here. {CORES_REMEDY}"
        yield severity, text
    if config.nodes_per_env != 1:
        yield (
            "note",
            f"nodes_per_env={config.nodes_per_env}: all ranks were started on this machine, so the times lack the "
            f"network between nodes",
        )
