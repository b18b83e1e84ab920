"""Load the checkpoint that a run continues from, or branches off."""

from typing import Any

from dppo.config import Config
from dppo.config.groups import flattened
from dppo.config.programs import named_as_now
from dppo.config.resolve import steps_of_prior
from dppo.config.settings import Settings
from dppo.errors import CheckpointError, DppoError, printable
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.numerics.fingerprint import Expected, Fingerprint, Probe
from dppo.records.files.checkpoint import Checkpoint, LoadedCheckpoint
from dppo.records.files.run_folder import describe_process
from dppo.run.parts import Parts
from dppo.run.sources import warn_of_changed_sources
from dppo.run.state import RunState

STATES_OF_ENVS = (".states", ".proofs", ".files")
"""Ends of the names of arrays with the states that environments gave themselves."""


def load_start(start: LoadedCheckpoint, parts: Parts, config: Config, *, branch: bool) -> None:
    """Load a checkpoint into the learner; with `branch`, only the weights, the optimizer and the normalizers."""
    _check_model(start, parts.model, config.env_name, branch=branch)
    checkpoint = start.checkpoint
    try:
        if branch:
            RunState(checkpoint.arrays, checkpoint.state).branch_off(parts.learner)
            _keep_frozen(start, parts, config)
        else:
            _resume(checkpoint, parts, config)
        _warn_of_other_numerics(checkpoint.state, parts.numerics)
    except DppoError:
        raise
    except Exception as error:  # the content of a stranger's checkpoint may lead to any error
        raise CheckpointError(
            f"{start.path}: cannot be resumed by this version of dppo ({error!r}). Use the version that wrote it."
        ) from error


def _keep_frozen(origin: LoadedCheckpoint, parts: Parts, config: Config) -> None:
    """Keep the statistics that the origin of a branch has frozen for the clone of a controller, and log that.

    The branch has no controller, from which the default of `freeze_norm_after` would follow.
    """
    if config.freeze_norm_after is not None:
        return
    state = origin.checkpoint.state
    frozen_after = state.get("freeze_norm_after")  # a branch of a branch
    if frozen_after is None:
        settings = flattened(state["config"])
        has_own = settings.get("freeze_norm_after") is not None
        if settings.get("prior") is None or has_own:
            return
        stored_settings = Settings(**settings)
        if not (stored_settings.norm_obs or stored_settings.norm_reward):
            return
        frozen_after = steps_of_prior(stored_settings)
    steps_left = max(0, frozen_after - state["global_step"])
    parts.learner.inherit_freeze(steps_left)
    when = f"after {steps_left:,} env steps" if steps_left else "from the start"
    logger.info(
        "Normalization: its statistics stay as they are %s, as in the run that it starts from; %s updates them.",
        when,
        as_setting_and_flag("freeze_norm_after", config.total_steps),
    )


def _check_model(
    start: LoadedCheckpoint, model: dict[str, Any], env_name: str, *, branch: bool
) -> None:
    """Raise CheckpointError if a checkpoint has other spaces or another network than this run, described by `model`."""
    state = start.checkpoint.state
    program = describe_process()["program"]
    stored_model = named_as_now(state["model"], state.get("program"), model, program)
    for name in {**model, **stored_model}:
        ignored = branch and name == "deterministic"
        if stored_model.get(name) != model.get(name) and not ignored:
            verb = "Branch" if branch else "Resume"
            raise CheckpointError(
                f"{start.path}: its {name} is {stored_model.get(name)}, but that of {env_name} is {model.get(name)}. "
                f"{verb} with the environment of the original run."
            )


def _resume(checkpoint: Checkpoint, parts: Parts, config: Config) -> None:
    arrays = checkpoint.arrays
    if config.env_state == "off":
        samplers = arrays["samplers"].items()
        arrays["samplers"] = {
            name: array for name, array in samplers if not name.endswith(STATES_OF_ENVS)
        }
    learner = parts.learner
    RunState(arrays, checkpoint.state).restore(learner)
    warn_of_changed_sources(checkpoint.state, config)
    learner.ledger.check(learner.iteration, config.envs_per_sampler, learner.trainers.spec)


def _warn_of_other_numerics(state: dict[str, Any], numerics: Expected) -> None:
    """Log a warning if the process that wrote a checkpoint computed different last bits."""
    stored = state.get("numerics")
    if stored is None:
        return
    stored_numerics = Fingerprint(**stored["own"])
    probe = Probe(**stored["probe"] | {"widths": tuple(stored["probe"]["widths"])})
    explanation = stored_numerics.explanation(numerics.own)
    if explanation and probe == numerics.probe:  # a branch may have other sizes
        logger.warning("from here on, results differ by rounding: %s", printable(explanation))
