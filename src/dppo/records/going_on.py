"""What to type after a run: it is done, was stopped, or has failed."""

from dppo.config.trust import object_name, resume_command, trust_flags
from dppo.errors import EnvironmentFault, TrainingDiverged
from dppo.invocation import command
from dppo.records.files.checkpoint import saved_iteration
from dppo.records.observer import Result


def how_to_go_on(result: Result, error: BaseException | None) -> str:
    """Return the last line of a run; `error` is the exception that ended it, if any."""
    if result.stopped_by is None:
        return _next(result)
    if isinstance(error, EnvironmentFault) and result.iterations == 0:
        return (
            "Nothing to resume: no iteration has finished. Start again, in another folder, once the cause is corrected."
        )
    resume = resume_command(result.env_name, result.run_dir, result.model_name, result.wrapper_names)
    if isinstance(error, TrainingDiverged):  # it would diverge again
        return f"Go on with other settings: {resume} --branch NEW_DIR"
    saved = saved_iteration(result.checkpoint)
    if saved is None or saved >= result.iterations:
        return f"Resume with: {resume}"
    return (
        f"Resume with: {resume}\nIt goes on after iteration {saved} of {result.iterations}: later ones are not saved."
    )


def _next(result: Result) -> str:
    """Return the commands that show a run that is done; no command can play in an environment of a Python program."""
    report = command("report", result.run_dir)
    names = result.env_name, result.model_name or "", *result.wrapper_names
    if any(map(object_name, names)):
        return f"Next: {report}"
    flags = trust_flags(result.env_name, result.model_name, result.wrapper_names)
    return f"Next: {command('eval', result.run_dir, *flags)}, or {report}"
