"""The files of states that checkpoints need: noted before a checkpoint is written, removed with the last one."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from dppo.config import Config
from dppo.envs.state_files import NEEDED, STATES, StatePlace, needed_names, remove_unneeded
from dppo.errors import CheckpointNotWritten, ConfigError
from dppo.log import logger
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_files import CHECKPOINTS, LOCK
from dppo.records.files.run_folder import RunFolder
from dppo.records.outside import ENDING_S, NoAnswer, OutsideThread
from dppo.run.outputs import call_at_start


@contextmanager
def states_of_run(config: Config, run_dir: Path, disk: OutsideThread) -> Iterator[None]:
    """Remove files of states that no checkpoint needs, before and after a run, in the thread of the disk.

    Raises ConfigError if `state_folder` is not a folder.
    """
    call_at_start(disk, "looking for files of states", partial(_begin, config, run_dir))
    try:
        yield
    finally:
        try:
            disk.call("removing files of states", partial(_sweep, run_dir), ENDING_S)
        except NoAnswer as error:
            logger.warning("%s; files of states are removed when the run is resumed", error)


def _begin(config: Config, run_dir: Path) -> None:
    folder = config.env.state_folder
    if config.env_state != "off" and folder is not None and not folder.is_dir():
        raise ConfigError(
            f"state_folder={folder.absolute()}: is not a folder. Make it, on a disk that all actors see."
        )
    _sweep(run_dir)


def state_place(config: Config, folder: RunFolder) -> StatePlace | None:
    """Return where actors keep the files of states, in a run folder that this process has locked."""
    if config.env_state == "off":
        return None
    state_folder = config.env.state_folder
    if state_folder is not None:
        state_folder = state_folder.absolute()
    moments = 2 * config.lag + 4  # the ledger's, and those that an actor may be ahead of it
    return StatePlace(folder.path / LOCK, folder.owner, moments, state_folder)


def names_in(samplers: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the files that the states of a ledger's arrays need."""
    texts = (array.tobytes() for name, array in samplers.items() if name.endswith(".files"))
    return b"\n".join(texts).decode().split()


def write_with_names(
    write: Callable[[], Path], run_dir: Path, checkpoint: str, names: Collection[str]
) -> Path:
    """Write the names of the states that a checkpoint needs, then the checkpoint; waits for the disk."""
    folder = run_dir / STATES / NEEDED
    path = folder / checkpoint
    with writing(path, CheckpointNotWritten):
        make_folder(folder)
        _forget_deleted(run_dir)
        earlier = path.read_text().split() if path.exists() else []  # before the run was resumed
        write_file(path, "\n".join(sorted({*names, *earlier})).encode())
    return write()


def _sweep(run_dir: Path) -> None:
    """Remove all files of states that no checkpoint needs; none of the run's environments may exist."""
    states = run_dir / STATES
    if not states.is_dir():
        return
    _forget_deleted(run_dir)
    needed = needed_names(run_dir)
    for sampler in os.scandir(states):
        if sampler.name != NEEDED and sampler.is_dir(follow_symlinks=False):
            remove_unneeded(list(os.scandir(sampler.path)), needed)
            with suppress(OSError):  # it is not empty
                os.rmdir(sampler.path)
    if not needed:
        shutil.rmtree(states, ignore_errors=True)


def _forget_deleted(run_dir: Path) -> None:
    """Remove the notes of checkpoints that no longer exist."""
    folder = run_dir / STATES / NEEDED
    if folder.is_dir():
        for entry in os.scandir(folder):
            if not (run_dir / CHECKPOINTS / entry.name).exists():
                os.unlink(entry.path)
