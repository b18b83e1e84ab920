"""Experiment trackers: one module here for each, with a class `Backend`; packages add theirs as entry points.

Adding a tracker NAME takes one file, `dppo/tools/trackers/NAME.py`. A package adds one with an entry point NAME of the
group `dppo.trackers` that names its class.
"""

import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

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
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        built_in = module.name.rpartition(".")[2]
        if built_in not in SHARED_MODULES:
            entries[built_in] = EntryPoint(built_in, f"{module.name}:Backend", GROUP)
    if name not in entries:
        problem = unknown_name("tracker", name, entries)
        raise ConfigError(f"track={name}: {problem} Use {' or '.join(sorted(entries))}.")
    backend_class: type[Backend] = entries[name].load()
    return backend_class
