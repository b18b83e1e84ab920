"""`dppo doctor`: find out what is wrong with an environment or a run, how fast it can be, and what to set."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from dppo.commands.flags import EXTRA, as_words, flag, in_flags
from dppo.commands.train import Command, arguments_of
from dppo.config import Config
from dppo.config.parts import default_of
from dppo.config.plain import plain, refuse_objects
from dppo.config.resolve import TaskFacts, facts_of, value_of
from dppo.config.resume import leave_out_ineffective
from dppo.errors import CheckpointError, ConfigError, printable
from dppo.invocation import command
from dppo.policies.policy import read
from dppo.records.bottleneck import TimeSplit, bottleneck_line, times_line
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.metrics.reading import read_metrics
from dppo.records.notes import MIN_EPISODES, RISE, LearningNotes
from dppo.spaces.actions import actions_from_json

DESCRIPTION = (
    "Examine an environment in a process of its own, without Ray: what is wrong with it, how long its steps take, how "
    "fast a run with these settings would be, and how many actors are worthwhile. With the folder of a RUN: what "
    "limited it, and what went wrong. The exit code is 1 if the environment cannot be trained on."
)
NO_EFFECT = "the doctor trains nothing"
COMMAND = Command(
    prog="dppo doctor",
    usage="ENV_ID [--seconds S] [--json] [--flag value ...]\nRUN [--json]",
    description=DESCRIPTION,
    title="doctor",
    own={
        "--seconds S": "Time for all of it. (default: 60)",
        "--json": "Print all that is known as JSON.",
    },
    refused=dict.fromkeys(("run_dir", "resume", "branch", "trust", "progress"), NO_EFFECT),
)
RETURN = "charts/episodic_return"
LONGER = "longer segments (--num-steps)"
PHASES = {  # what takes the time, and what to use
    "env": ("the environments", ""),  # see `_way_to_step_faster`
    "act": ("the policy", "several --envs-per-sampler, or a smaller network"),
    "wait": ("waiting for the slowest actor and for Ray", LONGER),
    "transfer": ("sending policies and segments", LONGER),
    "update": ("SGD", "fewer --update-epochs"),
    "other": ("files and displays", LONGER),
}


def main(argv: list[str]) -> int:
    """Examine an environment or a run, and print what is found; return the exit code."""
    own, given, word = COMMAND.split(argv, "ENV_ID or RUN")
    if word is not None and Path(word).is_dir():
        for name in (*given, *(own.keys() - {"json"})):
            raise ConfigError(f"{flag(name)} has no effect here: the files of a run are only read. Leave it out.")
        return _print({"findings": list(of_run(Path(word)))}, as_json="json" in own)
    if not 0 < (seconds := own.get("seconds", 60.0)) < math.inf:
        raise ConfigError(f"seconds={seconds:g}: must be a finite number above 0.")
    return _print(_of_environment(given, word, seconds), as_json="json" in own)


def _of_environment(given: dict[str, Any], env_id: str | None, seconds: float) -> dict[str, Any]:
    from dppo.tools.doctor.diagnosis import (
        LEAK_MB,
        advice,
        faults,
        findings,
        in_processes_of_their_own,
        plans,
        recommended,
    )
    from dppo.tools.doctor.watching import examine

    settings, began = arguments_of(given, env_id, COMMAND.prog).settings, time.monotonic()
    config = Config(**settings)
    refuse_objects(settings, "which the process of the doctor cannot be given")

    def show(stage: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {stage} ...", file=sys.stderr, flush=True)

    facts = examine(plain(settings), seconds, show)
    report = {"facts": facts, "findings": [(kind, in_flags(text)) for kind, text in findings(facts, config)]}
    if "update_s" not in facts:
        return report
    alone = in_processes_of_their_own(facts, config)
    if alone:
        config = Config(**leave_out_ineffective(settings | {"env_threads": False}, alone))
    in_process = next(plans(facts, config)).speed
    expected = [one._asdict() | {"speed_up": one.speed / in_process} for one in plans(facts, config)]
    best = recommended(facts, config)
    chosen = {"num_actors": best.actors, "env_threads": best.threads} | alone
    kept = leave_out_ineffective(settings, chosen).keys() - chosen.keys() | set(EXTRA)
    others = {name: value for name, value in given.items() if name in kept}
    before = {name: default_of(name) for name in chosen} | arguments_of(others, env_id, COMMAND.prog).settings
    others |= {name: value for name, value in chosen.items() if before[name] != value}
    leaks = facts.get("leak_mb", 0.0) > LEAK_MB and best.actors and config.recycle_after == "never"
    hosted_gb = config.num_samplers / max(1, best.actors) * config.envs_per_sampler * facts["env_mb"] / 1000
    others |= {"recycle_after": f"{max(2, math.ceil(2 * hosted_gb))}GB"} if leaks else {}  # not at every segment
    words = [config.env_name, *as_words(others | faults(facts, config)[0])]
    typed = command("train", *words)
    return report | {"expected": expected, "advice": list(advice(facts, config)), "command": typed}


def of_run(run: Path, rows: Sequence[dict[str, float]] | None = None) -> Iterator[tuple[str, str]]:
    """Yield findings about a run, or a sample of its `rows`: its limits, incidents, and why it may not have learned."""
    config, split = Config(**settings_to_resume(run, read_only=True)), TimeSplit()
    rows = read_metrics(run) if rows is None else rows
    epochs = value_of("update_epochs", config, TaskFacts(action_dims=1))  # until the actions are known
    with suppress(CheckpointError, KeyError, TypeError, ValueError):
        actions = actions_from_json(read(run).checkpoint.state["model"]["actions"])
        epochs = value_of("update_epochs", config, facts_of(actions))
        notes = LearningNotes(config, actions)
        yield from (("warning", note) for row in rows for note in notes.notes(row))
    if (flat := _flat(rows, config)) is not None:
        yield "warning", flat
    with suppress(KeyError):  # rows of another version, or of another author
        for row in (settled := [row for row in rows if row["iteration"] > 1]):
            split = split.plus(row)
        shares = {name: fmean(row[f"perf/{name}_frac"] for row in settled) for name in PHASES if settled}
        for name in sorted(shares, key=lambda name: -shares[name])[:2]:
            lag_helps = name in ("wait", "update") and config.num_actors != 0 and config.lag == 0
            what, remedy = PHASES[name]
            ways = [_way_to_step_faster(config)] if name == "env" else [remedy] * (name != "update" or epochs > 1)
            ways += ["--policy-lag 1"] * lag_helps
            ways = [way for way in ways if way]
            yield "note", f"{shares[name]:.0%} of the time went to {what}{'. Use ' * bool(ways)}{', or '.join(ways)}"
        lines = times_line(split, config, epochs), bottleneck_line(split, config)
        yield from (("note", line) for line in lines if line)
    for key, number in rows[-1].items() if rows else ():
        if key.startswith("incidents/"):
            where = f"{run / 'incidents'} and " if (run / "incidents").is_dir() else ""
            yield "warning", f"{number:g} x {key.removeprefix('incidents/')}: see {where}docs/METRICS.md"


def _way_to_step_faster(config: Config) -> str:
    """Return what lets more environments step at the same time, and has not been done; "" if nothing is left."""
    if config.most_actors < config.num_samplers:
        return f"more actors, up to --num-actors {config.num_samplers}, if there are CPUs for them"
    if config.envs_per_sampler > 1:
        samplers = config.num_samplers * config.envs_per_sampler
        return (
            f"--num-samplers {samplers} --envs-per-sampler 1 and as many actors: environments of one sampler step one "
            f"after the other"
        )
    return ""


def _flat(rows: Sequence[dict[str, float]], config: Config) -> str | None:
    """Return what to try if the mean return has not risen in the last third of the run or longer; else None."""
    known = [
        row
        for row in rows
        if row.get("charts/episodes", 0) >= MIN_EPISODES and math.isfinite(row.get(RETURN, math.nan))
    ]
    if not known or known[-1]["global_step"] - known[0]["global_step"] < known[-1]["global_step"] / 3:
        return None
    first, last = known[0][RETURN], known[-1][RETURN]
    best = max(row[RETURN] for row in known)
    if best - first > RISE * max(abs(best), abs(first)):
        return None
    steps = known[-1]["global_step"] - known[0]["global_step"]
    fact = f"the mean return has not risen in the last {steps:,.0f} env steps: {first:.4g} at first, {last:.4g} now"
    if config.reuse > 1:
        return f"{fact}. If more is possible, see docs/YOUR_SIMULATOR.md, When it does not learn"
    return f"{fact}. If more is possible, try --reuse 4 --num-steps 32 in a new run: it trains on each step more often"


def _print(report: dict[str, Any], *, as_json: bool) -> int:
    """Print a report; return 1 if something in it makes training impossible."""
    code = int(any(kind == "error" for kind, _ in report["findings"]))
    if as_json:
        print(json.dumps(report | {"can_train": not code}, indent=1, default=float))
        return code
    lines = [*_measured(report.get("facts", {})), *(f"{kind:8} {text}" for kind, text in report["findings"])]
    for one in report.get("expected", ()):
        where = f"{one['actors'] or 'no'} actor{'s' * (one['actors'] != 1)}{', threads' * one['threads']}"
        more = f", with --num-samplers {one['samplers']}" * (one["samplers"] > report["expected"][0]["samplers"])
        speed = f"{one['speed']:9,.{0 if one['speed'] > 99 else 1}f} env steps/s {one['speed_up']:6.1f} x"
        lines.append(f"expect   {where:18} {speed}{more}")
    lines += [f"advice   {one}" for one in report.get("advice", ())]
    for line in [*lines, f"\n{report['command']}" if "command" in report else ""]:
        print(printable(line))
    return code


def _measured(f: dict[str, Any]) -> Iterator[str]:
    if "make_s" in f:
        yield f"spaces   {f['spaces']}"
        yield f"network  {f['network'].removeprefix('Network: ')}"
        yield f"start    {f['make_s']:.2f} s, again {f.get('next_make_s', 0):.2f} s, {f['env_mb']:.0f} MB"
    for name in ("step", "reset"):
        if name in f:
            of, high = f[name], max(f[name]["bins"])
            unit, scale = ("s", 1) if of["median"] > 0.1 else ("ms", 1e3)
            figures = ", ".join(f"{point} {scale * of[point]:.3g}" for point in ("median", "p95", "p99", "worst"))
            bars = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * one // high)] for one in of["bins"])
            yield f"{name:8} {figures} {unit}  |{bars}|  {of['count']:,} calls"
    if "busy" in f:
        yield f"rewards  from {f['rewards'][0]:g} to {f['rewards'][1]:g}; {len(f['returns'])} episodes"
        yield f"CPU      used {f['busy']:.0%} of the time of steps and resets; else it waits"
    if "update_s" in f:
        yield f"update   {f['update_s']:.3g} s"
