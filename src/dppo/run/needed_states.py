"""The files of states that checkpoints need: noted before a checkpoint is written, removed with the last one."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from dppo.config import Config
from dppo.envs.state_files import NEEDED, STATES, StatePlace, needed_names, remove_unneeded
from dppo.errors import CheckpointNotWritten, ConfigError
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_files import CHECKPOINTS, LOCK


def open_states(config: Config, run_dir: Path, stack: ExitStack) -> StatePlace | None:
    """Return where actors keep the files of states, in a run folder that this process has locked.

    Those that no checkpoint needs are removed now and when `stack` is closed.
    """
    _sweep(run_dir)
    stack.callback(_sweep, run_dir)
    if config.env_state == "off":
        return None
    folder = config.env.state_folder
    if folder is not None:
        folder = folder.absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"state_folder={folder}: is not a folder. Make it, on a disk that all actors see."
            )
    lock = run_dir / LOCK
    moments = 2 * config.lag + 4  # the ledger's, and those that an actor may be ahead of it
    return StatePlace(lock, lock.read_bytes(), moments, folder)


def names_in(samplers: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the files that the states of a ledger's arrays need."""
    texts = (array.tobytes() for name, array in samplers.items() if name.endswith(".files"))
    return b"\n".join(texts).decode().split()


def noted(
    write: Callable[[], Path], run_dir: Path, checkpoint: str, names: Collection[str]
) -> Path:
    """Write a checkpoint after the names that it needs, by the name of its file; waits for the disk."""
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
