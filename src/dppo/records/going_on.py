"""What to do after a run that was stopped, or has failed."""

from dppo.config.trust import resume_command
from dppo.errors import EnvironmentFault, TrainingDiverged
from dppo.records.observer import Result


def how_to_go_on(result: Result, error: BaseException | None) -> str:
    """Return the last line of a run that has not reached its end; `error` is the exception that ended it, if any."""
    if isinstance(error, EnvironmentFault) and result.iterations == 0:
        return (
            "Nothing to resume: no iteration has finished. Start again, in another folder, once the cause is corrected."
        )
    command = resume_command(result.env_name, result.run_dir, result.model_name, result.wrapper_names)
    if isinstance(error, TrainingDiverged):  # it would diverge again
        return f"Go on with other settings: {command} --branch NEW_DIR"
    return f"Resume with: {command}"
