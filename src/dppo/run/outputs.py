"""The start of a run: check the code that it names, describe it, open its folder in the thread of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from dppo.config import Config
from dppo.config.memory import check_layers
from dppo.envs.arguments import check_all_arguments
from dppo.envs.make import wrapper_of
from dppo.envs.names import check_env_id
from dppo.errors import CheckpointNotWritten, ConfigError, counted, refusals_of, refuse
from dppo.log import logger
from dppo.ppo.networks.network import model_class
from dppo.records.files.run_folder import RunFolder
from dppo.records.metrics.reading import last_row
from dppo.records.observer import Display, EnvOptions, Result, RunInfo
from dppo.records.outside import ENDING_S, NoAnswer, OutsideThread
from dppo.records.run_lines import branch_line, hosting_line, prior_line, returns_line, sizes_line
from dppo.spaces.actions import Actions
from dppo.user_code import check_current_folder

T = TypeVar("T")


def check_is_config(config: object) -> None:
    """Raise ConfigError if this is not a Config."""
    if not isinstance(config, Config):
        env_id = repr(config) if isinstance(config, str) else "..."
        raise ConfigError(
            f"config={config!r}: must be a dppo.Config. Use dppo.Config(env_id={env_id})."
        )


def check_resume(resume: object, branch: object) -> None:
    """Raise ConfigError if these are not what `train` takes."""
    problems = []
    if isinstance(resume, bool):
        problems.append(
            ConfigError(
                f"resume={resume}: names no run. Pass its folder, or resume='auto' for the run in `run_dir`."
            )
        )
    elif not isinstance(resume, str | os.PathLike | Result | None):
        problems.append(
            ConfigError(
                f"resume={resume!r}: is not a path. Pass the folder of a run, or its result."
            )
        )
    if not isinstance(branch, bool):
        problems.append(
            ConfigError(
                f"branch={str(branch)!r}: must be True or False. Pass branch=True, and the new folder as `run_dir`."
            )
        )
    refuse(problems)


def check_code(config: Config) -> None:
    """Raise ConfigError if code that is named cannot be imported, or the network does not fit in memory."""
    check_current_folder()
    checks: list[Callable[[], object]] = [partial(_check_env, config)]
    checks += [partial(wrapper_of, wrapper) for wrapper in config.wrappers]
    checks.append(partial(check_layers, config))
    if config.model is not None:
        checks.append(partial(model_class, config.model))
    for name in ("baseline", "prior"):
        code = getattr(config, name)
        if code is not None:
            from dppo.policies.controller import Controller

            checks.append(partial(Controller, code, name))
    refuse(refusals_of(checks))


def _check_env(config: Config) -> None:
    check_env_id(config.env_id)
    check_all_arguments(config.env_id, config.env_kwargs, config.eval_env_kwargs)


def describe_run(config: Config, folder: RunFolder, actions: Actions | None = None) -> RunInfo:
    """Return the description of a run that is about to start, for its observers.

    `actions`: those of the environment, once it exists; until then, a checkpoint may know them.
    """
    start = folder.start or folder.origin
    if actions is None and start is not None:
        actions = start.actions
    lines = [sizes_line(config, actions), hosting_line(config), f"Run folder: {folder.path}"]
    if config.prior is not None:
        lines.insert(1, prior_line(config))
    if config.eval_every is not None:
        lines.insert(-1, returns_line(config))
    resumed_at = None
    env_options = EnvOptions()
    if folder.start is not None:
        state = folder.resumed_from
        resumed_at = state["iteration"]
        line = f"Resuming from {folder.start.path.stem} at step {state['global_step']:,}"
        last_iteration = last_row(folder.path).get("iteration", 0)
        if last_iteration > resumed_at:
            line += f"; later iterations, up to {last_iteration}, were not saved, and are repeated"
        lines.append(f"{line}.")
        env_options = EnvOptions(state.get("env_options"), fixed=True)
    if folder.origin is not None:
        lines.append(branch_line(folder.origin))
    return RunInfo(
        config=config,
        run_dir=folder.path,
        title=f"dppo: {config.algo.upper()} on {config.env_name}, seed {config.seed}",
        lines=tuple(lines),
        total_steps=config.total_steps,
        resumed_at=resumed_at,
        options=env_options,
    )


def starting_line(config: Config) -> str:
    if not config.num_actors:
        return f"Creating {config.env_name} ..."
    if config.elastic:
        return "Starting Ray actors ..."
    return f"Starting {counted(config.most_actors, 'Ray actor')} ..."


def notifier(display: Display) -> Callable[[str], None]:
    """Return a function that logs a line, and shows it at once, even while the run is not ready."""

    def notify(text: str) -> None:
        display.note(text)
        logger.warning("%s", text, extra={"shown": True})

    return notify


@contextmanager
def open_run_folder(
    folder: AbstractContextManager[RunFolder], disk: OutsideThread
) -> Iterator[RunFolder]:
    """Open a run folder in the thread of its disk, and unlock it there in the end; close the thread."""
    in_thread = ExitStack()
    try:
        run_folder = call_at_start(
            disk, "opening the run folder", partial(in_thread.enter_context, folder)
        )
        disk.place = f"the disk of {run_folder.path}"
        yield run_folder
    finally:
        try:
            disk.call("unlocking the run folder", in_thread.close, ENDING_S)
        except NoAnswer as error:
            logger.warning("%s; run.lock stays there, without effect", error)
        disk.close()


def call_at_start(disk: OutsideThread, action: str, function: Callable[[], T]) -> T:
    """Return the result of a call to the disk; raise ConfigError if the disk does not answer."""
    try:
        return disk.call(action, function)
    except NoAnswer as error:
        raise ConfigError(f"run_dir: {error}. Check the disk, or use another folder.") from None


def call_disk(disk: OutsideThread, action: str, function: Callable[[], T]) -> T:
    """Return the result of a call to the disk; raise CheckpointNotWritten if the disk does not answer."""
    try:
        return disk.call(action, function)
    except NoAnswer as error:
        raise CheckpointNotWritten(
            f"the checkpoint could not be written: {error}.\nEarlier checkpoints are untouched. Check the disk."
        ) from None
