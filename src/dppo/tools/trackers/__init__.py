"""Experiment trackers: one module here for each, with a class `Backend`; packages add theirs as entry points.

Adding a tracker NAME takes one file, `dppo/tools/trackers/NAME.py`. A package adds one with an entry point NAME of the
group `dppo.trackers` that names its class.
"""

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from dppo.errors import ConfigError, unknown_name
from dppo.records.observer import RunInfo

GROUP = "dppo.trackers"
SHARED_MODULES = {"tracker"}
FINISHED = "FINISHED"
FAILED = "FAILED"
KILLED = "KILLED"


class Backend(Protocol):
    """A run in a tracker. Its methods are called in one thread; they may raise anything, and may take long."""

    package: str
    """Name of the package for pip."""
    remedy: str
    """Remedy for an error of `check`."""
    id: str
    """The run's id in the tracker, with which a resumed run continues it."""
    place: str
    """Address or folder of the run, for the log."""

    @staticmethod
    def server() -> str:
        """Name the server, for messages."""

    @staticmethod
    def check() -> None:
        """Raise if the tracker cannot be used."""

    def __init__(self, run: RunInfo, known_id: str | None) -> None:
        """Begin a run, or continue the one with the id `known_id`."""

    def send(self, row: dict[str, float | None]) -> None:
        """Send a row of metrics."""

    def end(self, state: str) -> None:
        """End the run as FINISHED, FAILED, or KILLED by a signal."""


def backend(name: str) -> type[Backend]:
    """Import and return the class of a tracker; raise ConfigError if there is none of that name."""
    loaders = _loaders()
    if name not in loaders:
        problem = unknown_name("tracker", name, loaders)
        raise ConfigError(f"track={name}: {problem} Use {' or '.join(sorted(loaders))}.")
    backend_class: type[Backend] = loaders[name]()
    return backend_class


def _built_in(name: str) -> Any:
    return import_module(f"{__name__}.{name}").Backend


def _loaders() -> dict[str, Callable[[], Any]]:
    loaders: dict[str, Callable[[], Any]] = {
        entry.name: entry.load for entry in entry_points(group=GROUP)
    }
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in SHARED_MODULES:
            loaders[module.name] = partial(_built_in, module.name)
    return loaders
