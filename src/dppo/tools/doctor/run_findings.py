"""Findings about a run, from its folder: what limited its speed, its incidents, and why it may not have learned."""

from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from dppo.config import Config
from dppo.config.resolve import value_of
from dppo.envs.names import solved_at
from dppo.errors import CheckpointError
from dppo.records.bottleneck import (
    MIN_GAIN,
    TimeSplit,
    bottleneck_line,
    evaluations_line,
    times_line,
    usual_rows,
)
from dppo.records.files.checkpoint import LoadedCheckpoint, find
from dppo.records.files.lock import goes_on, training_notes
from dppo.records.files.run_files import METRICS, stored_incidents
from dppo.records.files.run_folder import stored_config
from dppo.records.metrics.reading import Row, Rows, read_metrics
from dppo.records.notes import LearningNotes
from dppo.tools.doctor.speed import Findings

LONGER = "longer segments (--num-steps)"
PHASES = {  # what takes the time, and what to use
    "env": ("the environments", ""),  # see `_way_to_step_faster`
    "act": ("the policy", "several --envs-per-sampler, or a smaller network"),
    "wait": ("waiting for the slowest actor and for Ray", LONGER),
    "transfer": ("sending policies and segments", LONGER),
    "update": ("SGD", "fewer --update-epochs"),
    "other": ("files and displays", LONGER),
}
MAX_NAMED_PHASES = 2
MAX_MESSAGE = 1000  # characters of an incident's message
LOSSES = ("incidents/actor_hung", "incidents/actor_lost")
LOST_SHARE = 0.1  # lost actors per iteration, beyond which their replacement is named
SLOW_START_S = 10.0  # shortest first iteration that is named
# without a phase of a smaller share, a run would be less than MIN_GAIN times as fast
MIN_SHARE = 1 - 1 / MIN_GAIN
STRANGE = (ArithmeticError, KeyError, TypeError, ValueError)
"""Errors from rows of another version, or of another author."""


def findings_of_run(run: Path, rows: Rows | None = None) -> Findings:
    """Yield severity and text of findings about a run, or about a sample of its `rows`."""
    config = stored_config(run)
    if rows is None:
        rows = read_metrics(run)
    for note in training_notes(run):
        yield "note", note
    actions = None
    with suppress(CheckpointError):
        newest = find(run)
        actions = newest.actions
        yield from _missing_rows(run, rows, newest)
    notes = LearningNotes(config, actions, solved_at=solved_at(config.env_name))
    with suppress(*STRANGE):
        for row in rows:
            for note in notes.follow(row):
                yield "warning", note
        for note in notes.closing_notes():
            yield "warning", note
    last = {}
    if rows:
        last = rows[-1]
    if not goes_on(run) and last.get("iteration", 0) < config.iterations:
        yield from _ending(run, last)
    if not rows:
        yield "note", f"{METRICS} has no rows yet"
        return
    with suppress(*STRANGE):
        waited_s = last.get("time/eval_wait_s", 0.0)
        waits = evaluations_line(waited_s, last.get("time/training_s", 0.0), config)
        if waits:
            yield "warning", waits
        epochs = value_of("update_epochs", config, notes.action_dims)
        yield from _time_findings(rows, config, epochs)
    yield from _incident_findings(run, last)


def _missing_rows(run: Path, rows: Rows, newest: LoadedCheckpoint) -> Findings:
    """Yield a warning if the newest checkpoint is later than the last row, which is always written before it."""
    saved = newest.checkpoint.state["iteration"]
    last = max((row["iteration"] for row in rows), default=0)
    if saved > last and not goes_on(run):
        yield (
            "warning",
            f"{run / METRICS} ends with iteration {last:,.0f}, but the newest checkpoint is of iteration {saved:,}: "
            f"rows are missing, and figures are those of the rows. If the folder is a copy, copy this file again",
        )


def ending_incident(run: Path, last_row: Row) -> dict[str, Any]:
    """Return the newest incident that has ended the run after its last row; {} without one."""
    iteration = last_row.get("iteration", 0)
    incidents = list(stored_incidents(run))
    for incident in reversed(incidents):
        if incident.get("ended_after") == iteration:
            return incident
    return {}


def _ending(run: Path, last_row: Row) -> Findings:
    incident = ending_incident(run, last_row)
    if incident:
        folder = run / "incidents" / incident["number"]
        message = str(incident.get("message")).partition("\n")[0]
        yield (
            "warning",
            f"the run ended with {incident.get('kind')}, see {folder}: {message[:MAX_MESSAGE]}",
        )


def _time_findings(rows: Rows, config: Config, epochs: int | None) -> Findings:
    """Yield what took most of the time, and what would shorten it."""
    settled = usual_rows([row for row in rows if row["iteration"] > 1])
    split = TimeSplit.of(settled)
    first_s = sum(row["perf/iteration_s"] for row in rows if row["iteration"] == 1)
    later_s = split.iteration_s * (rows[-1]["iteration"] - 1)
    if first_s > max(SLOW_START_S, later_s):
        share = first_s / (first_s + later_s)
        text = f"{share:.0%} of the time went to the first iteration, which makes the environments"
        num_lost = sum(rows[0].get(key, 0) for key in LOSSES)
        if num_lost:
            text += f", and in which actors hung or died ({num_lost:g})"
        elif 0 < config.most_actors < config.num_samplers:
            text += ". More --num-actors make more of them at the same time"
        yield "note", text
        return
    if settled:
        shares = {
            phase: fmean(row[f"perf/{phase}_frac"] * row["perf/iteration_s"] for row in settled)
            / (split.iteration_s or 1.0)
            for phase in PHASES
        }
        for phase in sorted(shares, key=lambda phase: -shares[phase])[:MAX_NAMED_PHASES]:
            if shares[phase] < MIN_SHARE:
                break
            text = f"{shares[phase]:.0%} of the time after the first iteration went to {PHASES[phase][0]}"
            text += _remedy(phase, rows[-1], config, epochs)
            yield "note", text
    for line in (times_line(split, config, epochs), bottleneck_line(split, config)):
        if line:
            yield "note", line


def _remedy(phase: str, last_row: Row, config: Config, epochs: int | None) -> str:
    """Return the end of a sentence about a phase that took long: what would shorten it."""
    num_lost = sum(last_row.get(key, 0) for key in LOSSES)
    if phase == "wait" and num_lost > LOST_SHARE * last_row["iteration"]:
        return f", also because actors hung or died ({num_lost:g})"
    ways = _ways_to_shorten(phase, config, epochs)
    if not ways:
        return ""
    text = f". Use {', or '.join(ways)}"
    if phase != "env":
        text += ". This changes what is learned"
    return text


def _ways_to_shorten(phase: str, config: Config, epochs: int | None) -> list[str]:
    """Return what would shorten a phase; overlapping it with another one is the advice of `bottleneck_line`."""
    ways = [PHASES[phase][1]]
    if phase == "env":
        ways = [_way_to_step_faster(config)]
    elif phase == "update" and config.algo == "sac":
        ways = ["fewer --gradient-steps"]
    elif phase == "update" and epochs == 1:
        ways = []
    if phase == "wait" and config.num_actors != 0 and config.lag == 0:
        ways.append("--policy-lag 1")
    return [way for way in ways if way]


def _way_to_step_faster(config: Config) -> str:
    """Return advice on stepping more environments in parallel; "" if the run already follows it."""
    if config.most_actors < config.num_samplers:
        return f"more actors, up to --num-actors {config.num_samplers}, if there are CPUs for them"
    if config.envs_per_sampler > 1:
        samplers = config.num_samplers * config.envs_per_sampler
        return (
            f"--num-samplers {samplers} --envs-per-sampler 1 and as many actors: environments of one sampler step one "
            f"after the other"
        )
    return ""


def _incident_findings(run: Path, last_row: Row) -> Findings:
    for key, number in last_row.items():
        if key.startswith("incidents/"):
            folder = ""
            if (run / "incidents").is_dir():
                folder = f"{run / 'incidents'} and "
            yield (
                "warning",
                f"{number:g} x {key.removeprefix('incidents/')}: see {folder}docs/METRICS.md",
            )
