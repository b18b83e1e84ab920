"""`dppo doctor`: find out what is wrong with an environment or a run, how fast it can be, and what to set."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dppo.commands.flags import EXTRA, as_words, in_flags, print_lines
from dppo.commands.train import Command, arguments_of
from dppo.config import Config
from dppo.config.parts import default_of
from dppo.config.plain import plain, refuse_objects
from dppo.config.resume import leave_out_ineffective
from dppo.errors import ConfigError, counted, refuse
from dppo.invocation import command, flag
from dppo.records.files.run_folder import run_dir_of
from dppo.tools.doctor.controller_findings import is_better_than_chance
from dppo.tools.doctor.controllers import described
from dppo.tools.doctor.needed import faults, in_processes_of_their_own
from dppo.tools.doctor.run_findings import findings_of_run
from dppo.tools.doctor.speed import LEAK_MB, Facts, advice, best_way, plans, recommended

DESCRIPTION = (
    "Examine an environment in a process of its own, without Ray: what is wrong with it, how long its steps take, how "
    "fast a run with these settings would be, and how many actors are worthwhile. With the folder of a RUN: what "
    "limited it, and what went wrong. The exit code is 1 if the environment cannot be trained on."
)
NO_EFFECT = "the doctor trains nothing"
DEFAULT_SECONDS = 60.0
BARS = " ▁▂▃▄▅▆▇█"
ASCII_BARS = " .:-=+*#@"
QUIET_SHARE = 0.8  # share of the needed time of a core; with less, a machine is busy
QUANTILES = ("median", "p95", "p99", "worst")
COMMAND = Command(
    prog="dppo doctor",
    usage="ENV_ID [--seconds S] [--json] [--flag value ...]\nRUN [--json]",
    description=DESCRIPTION,
    title="doctor",
    flags={
        "--seconds S": "Time for the whole examination. (default: 60)",
        "--json": "Print all measurements and findings as JSON.",
    },
    refused=dict.fromkeys(("run_dir", "resume", "branch", "trust", "progress"), NO_EFFECT),
)


def main(argv: list[str]) -> int:
    """Examine an environment or a run, and print what is found; return the exit code."""
    options, flags, word = COMMAND.split(argv, "ENV_ID or RUN")
    as_json = "json" in options
    if word is not None and Path(word).is_dir():
        refuse(
            ConfigError(
                f"{flag(name)} has no effect here: the files of a run are only read. Leave it out."
            )
            for name in (*flags, *options)
            if name != "json"
        )
        findings = [
            (severity, in_flags(text)) for severity, text in findings_of_run(run_dir_of(Path(word)))
        ]
        nothing = ("note", "nothing is wrong with this run")
        return _print({"findings": findings or [nothing]}, as_json=as_json)
    seconds = options.get("seconds", DEFAULT_SECONDS)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds:g}: must be a finite number above 0.")
    return _print(_examine_environment(flags, word, seconds), as_json=as_json)


def _examine_environment(
    flags: dict[str, Any], env_id: str | None, seconds: float
) -> dict[str, Any]:
    """Examine an environment; return facts, findings, and if updates were timed, speeds, advice and a command."""
    from dppo.tools.doctor.findings import findings
    from dppo.tools.doctor.watching import examine

    began = time.monotonic()
    flags = _with_evaluations(flags)
    settings = arguments_of(flags, env_id, COMMAND.prog).settings
    config = Config(**settings)
    refuse_objects(settings, "which the process of the doctor cannot be given")

    def show(stage: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {stage} ...", file=sys.stderr, flush=True)

    facts = examine(plain(settings), seconds, show)
    advice_on_way = []
    best = best_way(facts, config, settings.keys()) if "update_s" in facts else None
    if best is not None:  # from here on, the report is about these settings
        config = best.config
        facts = best.facts
        flags = flags | dict(best.way.settings)
        settings = settings | dict(best.way.settings)
        advice_on_way = [best.advice()]
    needed = in_processes_of_their_own(facts, config)
    if needed:
        config = Config(**leave_out_ineffective(settings, needed))
    report = {
        "facts": facts,
        "findings": [(severity, in_flags(text)) for severity, text in findings(facts, config)],
    }
    if "update_s" not in facts:
        return report
    candidates = list(plans(facts, config))
    in_process = candidates[0].speed
    expected = [asdict(plan) | {"speed_up": plan.speed / in_process} for plan in candidates]
    recommended_settings = _recommended_settings(facts, config, flags, env_id)
    words = as_words(recommended_settings)
    return report | {
        "expected": expected,
        "advice": [*advice_on_way, *advice(facts, config), *_advice_on_prior(facts, config)],
        "command": command("train", config.env_name, *words),
    }


def _advice_on_prior(facts: Facts, config: Config) -> Iterator[str]:
    """Advise to start from the baseline, unless it fails, or is not better than zero and random actions."""
    name = str(config.baseline_name)
    if config.baseline is None or config.prior is not None or facts.get("controllers_failed"):
        return
    returns = facts.get("controllers")
    if returns is not None and not is_better_than_chance(returns, name):
        return
    with suppress(ConfigError):  # settings with which no controller can begin a run
        replace(config, prior=config.baseline)
        yield (
            f"--prior {name} starts training from your controller; --never-worse deploys a policy only if an "
            f"evaluation shows that it is better."
        )


def _with_evaluations(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags with evaluations, which a baseline needs in a run, every tenth of it."""
    if "baseline" not in flags or "eval_every" in flags:
        return flags
    with suppress(ValueError):  # an invalid number is refused later
        steps = int(flags.get("total_timesteps", default_of("total_timesteps")))
        return flags | {"eval_every": str(max(1, steps // 10))}
    return flags


def _recommended_settings(
    facts: Facts, config: Config, flags: dict[str, Any], env_id: str | None
) -> dict[str, Any]:
    """Return the user's flags, with those that the plan, faults and leaks need, and without those that it makes idle.

    Args:
        config: the settings that the plan is for.
    """
    settings = arguments_of(flags, env_id, COMMAND.prog).settings
    plan = recommended(facts, config)
    chosen = {"num_actors": plan.actors, "env_threads": plan.threads}
    chosen |= in_processes_of_their_own(facts, config)
    effective = leave_out_ineffective(settings, chosen).keys() - chosen.keys() | set(EXTRA)
    effective_flags = {name: value for name, value in flags.items() if name in effective}
    defaults = {name: default_of(name) for name in chosen}
    defaults |= arguments_of(effective_flags, env_id, COMMAND.prog).settings
    effective_flags |= {name: value for name, value in chosen.items() if defaults[name] != value}
    leaks = facts.get("leak_mb", 0.0) > LEAK_MB
    if leaks and plan.actors and config.recycle_after == "never":
        samplers_per_actor = config.num_samplers / max(1, plan.actors)
        envs_gb = samplers_per_actor * config.envs_per_sampler * facts["env_mb"] / 1000
        # twice that, so that it is a rare event
        effective_flags["recycle_after"] = f"{max(2, math.ceil(2 * envs_gb))}GB"
    needed, _ = faults(facts, config)
    return effective_flags | (needed or {})


def _print(report: dict[str, Any], *, as_json: bool) -> int:
    """Print a report; return 1 if something in it makes training impossible."""
    severities = [severity for severity, _ in report["findings"]]
    code = int("error" in severities)
    if as_json:
        print(json.dumps(report | {"can_train": not code}, indent=1, default=float))
        return code
    lines = list(_measured(report.get("facts", {})))
    lines += [f"{severity:8} {text}" for severity, text in report["findings"]]
    lines += _speeds(report.get("expected", []))
    lines += [f"advice   {text}" for text in report.get("advice", [])]
    if "command" in report:
        lines.append(f"\n{report['command']}")
    print_lines(*lines)
    return code


def _speeds(expected: list[dict[str, Any]]) -> Iterator[str]:
    for plan in expected:
        processes = counted(plan["actors"], "actor") if plan["actors"] else "no actors"
        if plan["threads"]:
            processes += ", threads"
        decimals = 0 if plan["speed"] > 99 else 1
        line = f"expect   {processes:18} {plan['speed']:9,.{decimals}f} env steps/s {plan['speed_up']:6.1f} x"
        if plan["samplers"] > expected[0]["samplers"]:
            line += f", with --num-samplers {plan['samplers']}"
        yield line


def _measured(facts: Facts) -> Iterator[str]:
    """Yield lines about the facts that were measured."""
    if "make_s" in facts:
        yield f"spaces   {facts['spaces']}"
        packages = ", ".join(" ".join(item) for item in facts["packages"].items())
        yield f"versions {packages}; hash of the first steps: {facts.get('fingerprint') or '-'}"
        yield f"network  {facts['network'].removeprefix('Network: ')}"
        starts = [f"{facts['make_s']:.2f} s"]
        if "next_make_s" in facts:  # one process and this machine may have two instances
            starts.append(f"again {facts['next_make_s']:.2f} s")
        yield f"start    {', '.join(starts)}, {facts['env_mb']:.0f} MB"
    for name in ("step", "reset"):
        if name in facts:
            yield f"{name:8} {_times(facts[name])}"
    if "busy" in facts:
        limits = " to ".join(f"{reward:g}" for reward in facts["rewards"]) or "no valid step"
        yield f"rewards  from {limits}; {counted(len(facts['returns']), 'episode')}"
    if "controllers" in facts:
        returns = facts["controllers"]
        count = counted(len(next(iter(returns.values()))), "episode")
        yield f"returns  {described(returns)}; {count} of each"
    if "busy" in facts:
        yield f"CPU      busy for {facts['busy']:.0%} of the time in steps and resets"
    yield from _machine(facts)
    if "update_s" in facts:
        yield f"update   {facts['update_s']:.3g} s of CPU time"


def _machine(facts: Facts) -> Iterator[str]:
    """Yield a line if other work took the cores while they were needed here."""
    share = min(facts.get("core_share", 1.0), facts.get("core_share_of_updates", 1.0))
    if share >= QUIET_SHARE:
        return
    load = ""
    if facts["load"]:
        load = f"the load average is {facts['load']:.1f} on {counted(facts['cpus'], 'core')}, and "
    yield (
        f"machine  busy with other work: {load}this process got {share:.0%} of the CPU time that it needed. The times "
        f"of start, step and reset include its waits; the predictions are for a quiet machine"
    )


def _times(times: dict[str, Any]) -> str:
    unit = "ms"
    scale = 1e3
    if times["median"] > 0.1:
        unit = "s"
        scale = 1.0
    quantiles = ", ".join(f"{name} {scale * times[name]:.3g}" for name in QUANTILES)
    highest = max(times["bins"])
    heights = [math.ceil(8 * count / highest) for count in times["bins"]]
    has_blocks = str(sys.stdout.encoding).lower().startswith("utf")
    symbols = BARS if has_blocks else ASCII_BARS
    bars = "".join(symbols[height] for height in heights)
    return f"{quantiles} {unit}  |{bars}|  {times['count']:,} calls"
