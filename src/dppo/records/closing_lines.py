"""The last lines of a run: its result, and the command with which to go on."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from dppo.config import Config
from dppo.config.trust import object_name, resume_command, trust_flags
from dppo.errors import (
    ClusterError,
    ConfigError,
    ControllerFault,
    EnvironmentFault,
    TooManyFaults,
    TrainingDiverged,
    counted,
)
from dppo.invocation import as_setting_and_flag, command, flag
from dppo.records.files.checkpoint import saved_iteration
from dppo.records.observer import Result
from dppo.records.terminal.figures import number

MAX_FAULT_LINES = 5  # lines about environments that failed
FAULTS_OF_USER_CODE = (EnvironmentFault, ControllerFault, ConfigError)
"""Errors that come again, in a run that is resumed, until the user has corrected something."""
WITHOUT_WIDE = ", without episodes of wide exploration"
OTHER_CPU = (
    "The result depends on which process ran on which type of CPU: see docs/REPRODUCIBILITY.md."
)


def closing_lines(result: Result, error: BaseException | None = None) -> list[str]:
    """Return the last lines of a run's output; `error` is the exception that ended the run, if one did."""
    return [line for line in _all_lines(result, error) if line]


def _all_lines(result: Result, error: BaseException | None) -> Iterator[str]:
    """Yield the lines, where one that does not apply to this run is empty."""
    yield _ending(result, error)
    # the whole error is printed after the cluster has been left, which takes 10 s if it does not answer
    is_late = isinstance(error, ClusterError)
    if isinstance(error, Exception) and (is_late or not _errors_are_printed_here()):
        yield _cause(error)
    if result.recent_episodes:
        line = f"The only episode has a return of {number(result.episodic_return)}"
        if result.recent_episodes > 1:
            recent = counted(result.recent_episodes, "episode")
            line = f"Mean return of the last {recent}: {number(result.episodic_return)}"
        yield line + _kind_of_episodes(result.config)
    elif result.episodes:
        yield "No return of the policy yet: a controller or wide exploration took part in every episode so far."
    else:
        yield "No episode has finished yet."
    yield f"Checkpoint: {result.checkpoint}"
    if result.picture.exists():
        yield f"Picture: {result.picture}"
    yield f"Weights: sha256 {result.weights_sha256[:16]}"
    if result.incidents:
        yield "Incidents: " + ", ".join(
            f"{count} x {kind}" for kind, count in sorted(result.incidents.items())
        )
    yield from _fault_lines(result.env_faults)
    if "other_cpu" in result.incidents:
        yield OTHER_CPU
    yield result.times
    yield result.bottleneck
    yield from result.notes
    yield _how_to_go_on(result, error)


def _kind_of_episodes(config: Config | None) -> str:
    """Return how the last episodes differ from others of the run, such as evaluations; "" if there are no others."""
    if config is None:
        return ""
    if config.noise == "wide":
        return f", with exploration noise{WITHOUT_WIDE}"
    if config.eval_every is not None:
        return ", with exploration noise"
    return ""


def _ending(result: Result, error: BaseException | None) -> str:
    nothing_done = result.iterations == result.resumed_at
    if nothing_done and result.stopped_by is None:
        return nothing_to_do(result.global_step)
    if result.stopped_by is None:
        ending = "Done"
    elif isinstance(error, Exception):
        ending = f"Failed with {result.stopped_by}"
    else:
        ending = f"Stopped by {result.stopped_by}"
    speed = ""
    if not nothing_done:
        steps_per_s = f"{result.steps_per_s:.2g}"
        if result.steps_per_s >= 10:
            steps_per_s = f"{result.steps_per_s:,.0f}"
        speed = f", of which training took {result.training_s:.1f} s ({steps_per_s} steps/s)"
    progress = f"{counted(result.global_step, 'step')} and {counted(result.episodes, 'episode')}"
    if result.resumed_at and not nothing_done:
        since = counted(round(result.steps_per_s * result.training_s), "step")
        return f"{ending} after {progress}; the {since} since the resume took {result.wall_s:.1f} s{speed}."
    return f"{ending} after {progress} in {result.wall_s:.1f} s{speed}."


def nothing_to_do(global_step: int) -> str:
    """Return the line about a run that is resumed, and has completed all its steps."""
    more_steps = as_setting_and_flag("total_timesteps", 2 * global_step)
    return f"Nothing to do: the run has already completed its {global_step:,} steps. To go on, raise {more_steps}."


def _cause(error: Exception) -> str:
    """Return the first line of an error, which is reported as a whole where it is caught."""
    cause = str(error).strip().partition("\n")[0]
    if isinstance(error, EnvironmentFault):
        cause = cause.partition(". ")[0]  # the advice follows with the traceback
    return f"Cause: {cause}" if cause else ""


def _errors_are_printed_here() -> bool:
    """Return whether stdout and stderr are one terminal or file: the whole error then follows these lines."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # a stream without a file
        return False


def _fault_lines(env_faults: dict[str, int]) -> Iterator[str]:
    """Yield the faults of environments, the most frequent first."""
    counts = dict(env_faults)
    lost_steps = counts.pop("steps lost", 0)
    if lost_steps:
        yield f"Faults of environments, which cost {counted(lost_steps, 'env step')}:"
    by_frequency = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for name, count in by_frequency[:MAX_FAULT_LINES]:
        yield f"  {count} x {name}"
    omitted = by_frequency[MAX_FAULT_LINES:]
    if omitted:
        kinds = sorted({name.partition(": ")[2] for name, _ in omitted})
        yield f"  {sum(count for _, count in omitted)} more: {', '.join(kinds)}"


def _how_to_go_on(result: Result, error: BaseException | None) -> str:
    if result.stopped_by is None:
        return _next_commands(result)
    if isinstance(error, FAULTS_OF_USER_CODE) and result.iterations == 0:
        return (
            "Nothing to resume: no iteration has finished. Start again, in another folder, once the cause is "
            "corrected."
        )
    settings = _code_of(result)
    if result.baseline is not None:
        settings["baseline"] = result.baseline.name
    if result.config is not None:
        settings["prior"] = result.config.prior_name
    resume = resume_command(result.run_dir, settings)
    if _names_objects(settings):  # which no command can import
        resume = f"dppo.train(config, resume={str(result.run_dir)!r}), in the program that began it"
        if isinstance(error, TrainingDiverged):
            return f"Go on with other settings: {resume}, with branch=True and another run_dir"
    elif isinstance(error, TrainingDiverged):  # it would diverge again
        return f"Go on with other settings: {resume} --branch NEW_DIR"
    elif isinstance(error, TooManyFaults):
        resume += f" {flag('env_faults')} {error.allowing_rate}"
    saved = saved_iteration(result.checkpoint)
    if saved is None or saved >= result.iterations:
        return f"Resume with: {resume}"
    place = f"after iteration {saved} of {result.iterations}"
    return f"Resume with: {resume}\nIt goes on {place}: later ones are not saved."


def _next_commands(result: Result) -> str:
    """Return the commands that show a run that is done; no command can play in an environment of a Python program."""
    report = command("report", result.run_dir)
    settings = _code_of(result)
    if result.baseline is not None and result.baseline.deployed == "baseline":
        settings["baseline"] = result.baseline.name
    if _names_objects(settings):
        return f"Next: {report}"
    flags = trust_flags(settings)
    is_stochastic = result.config is not None and result.config.eval_stochastic
    if is_stochastic and "baseline" not in settings:
        flags = [*flags, "--stochastic"]
    return f"Next: {command('eval', result.run_dir, *flags)}, or {report}"


def _names_objects(settings: dict[str, Any]) -> bool:
    """Return whether one of these settings names an object of a Python program."""
    for value in settings.values():
        names = value if isinstance(value, tuple) else (value or "",)
        if any(map(object_name, names)):
            return True
    return False


def _code_of(result: Result) -> dict[str, Any]:
    """Return the settings that name code with which the policy of a run plays."""
    return {"env_id": result.env_name, "model": result.model_name, "wrappers": result.wrapper_names}
