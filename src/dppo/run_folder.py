"""The folder of a run: making it, and going on from what is in it."""

from __future__ import annotations

import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dppo.config import CLOSE_ON_RESUME, FREE_ON_RESUME, OF_ACTORS, OF_LEARNERS, Config, read_settings
from dppo.errors import CheckpointError, ConfigError
from dppo.records import checkpoint as checkpoints
from dppo.records import sealed
from dppo.records.metrics import FILE

CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a resumed run goes on from."""

    run_dir: Path
    checkpoint: Path
    arrays: dict[str, dict[str, np.ndarray]]
    state: dict[str, Any]
    damaged: tuple[str, ...]
    """Newer checkpoints that cannot be used."""
    close_changes: tuple[str, ...]
    """Settings that differ and make the results differ a little from here on, in words."""


def create(config: Config) -> Path:
    """Make the folder of a new run, with its settings in it.

    Raises:
        ConfigError: it cannot be written, or holds a run already.
    """
    run_dir = config.run_dir
    if run_dir is None:
        env = re.sub(r"[^A-Za-z0-9._-]+", "-", config.env_name).strip("-")
        run_dir = _free(Path("runs") / f"{env}__{config.name}__s{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        if any((run_dir / name).exists() for name in (FILE, checkpoints.FOLDER)):
            raise ConfigError(
                f"run_dir={run_dir}: holds a run already. Go on with it by --resume {run_dir}, or name another."
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        write_settings(config, run_dir)
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir}: cannot be written ({error.strerror or error}). Name another with --run-dir."
        ) from None
    return run_dir


def write_settings(config: Config, run_dir: Path) -> None:
    """Write down what is in force, for whoever reads or resumes the run.

    Raises:
        OSError: the disk is full, say. What was there is still there.
    """
    text = yaml.safe_dump(resolved(config) | {"versions": versions()}, sort_keys=False)
    sealed.write_file(run_dir / CONFIG, text.encode())


def discard_unused(run_dir: Path) -> None:
    """Remove what `create` made, if nothing has been trained: a mistake shall not leave folders behind."""
    if any((run_dir / name).exists() for name in (FILE, checkpoints.FOLDER)):
        return
    (run_dir / CONFIG).unlink(missing_ok=True)
    with suppress(OSError):  # it was there before, with something in it
        run_dir.rmdir()


def _free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3 ... that does not exist: two runs may start in the same second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def resolved(config: Config) -> dict[str, Any]:
    """All settings as plain values, with those filled in that default to something derived."""
    settings = config.model_dump(mode="json", exclude={"env_id", "run_dir"})
    return {
        "env_id": config.env_name,
        **settings,
        "num_samplers": config.samplers,
        "minibatch_size": config.minibatch_size or config.minibatch_rows,
    }


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("dppo", "ray", "torch", "gymnasium", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def config_of(path: Path) -> dict[str, Any]:
    """The settings of the run that `path` (its folder, or something in it) belongs to.

    Raises:
        CheckpointError: no run there.
    """
    return read_settings(_run_dir_of(path) / CONFIG)


def settings_to_resume(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run at `path` with `changes`; without those that lose their meaning by the changes."""
    settings = config_of(path)
    for count, names in (("num_actors", OF_ACTORS), ("num_learners", OF_LEARNERS)):
        if str(changes.get(count)) == "0":
            settings = {name: value for name, value in settings.items() if name not in names}
    return settings | changes


def _run_dir_of(path: Path) -> Path:
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / CONFIG).is_file():
            return folder
    raise CheckpointError(f"{path}: is not the folder of a run (it has no {CONFIG}). Give runs/...")


def open_to_resume(config: Config, path: Path) -> Start:
    """Find what to go on from, and see that `config` would go on with the same learning problem.

    Raises:
        CheckpointError: nothing (good) there.
        ConfigError: a setting differs that changes what is learnt; by name.
    """
    run_dir = _run_dir_of(path)
    found = checkpoints.find(path)
    checkpoint = checkpoints.load(found.path)
    before = checkpoint.state.get("config")
    if not isinstance(before, dict):
        raise CheckpointError(f"{found.path}: does not say what it was trained with. Give the folder of a run of dppo.")
    close_changes = _compare(before, config, found.path)
    return Start(run_dir, found.path, checkpoint.arrays, checkpoint.state, found.damaged, close_changes)


def _compare(before: dict[str, Any], config: Config, checkpoint: Path) -> tuple[str, ...]:
    """What differs and changes results a little.

    Raises:
        ConfigError: something differs that changes what is learnt.
    """
    free = set(FREE_ON_RESUME)
    if not config.anneal_lr:
        free.add("total_timesteps")  # else it is part of the learning rate's schedule
    changed = {
        name: value for name, value in resolved(config).items() if name not in free and before.get(name) != value
    }
    for name, value in changed.items():
        if name not in CLOSE_ON_RESUME:
            raise ConfigError(
                f"{name}={value}: {checkpoint} was made with {before.get(name)}, and resuming with another one would "
                f"not continue that run. Leave it out, or start a new run."
            )
    return tuple(f"{name}={value} instead of {before.get(name)}" for name, value in changed.items())
