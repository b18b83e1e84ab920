"""Experiment trackers: one module here for each, with a class `Backend`; packages add theirs as entry points.

Adding a tracker NAME takes one file, `dppo/tools/trackers/NAME.py`. A package adds one with an entry point NAME of the
group `dppo.trackers` that names its class.
"""

import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from dppo.errors import ConfigError, unknown_name
from dppo.process_state.borders import importing
from dppo.records.observer import RunInfo
from dppo.user_code import in_a_line, place_of, require_package

GROUP = "dppo.trackers"
SHARED_MODULES = {"tracker"}
PARTS = ("remedy", "server", "check", "send", "end")
"""Attributes of the class of each tracker."""
FINISHED = "FINISHED"
FAILED = "FAILED"
KILLED = "KILLED"


class Backend(Protocol):
    """A run in a tracker. Its methods are called in one thread; they may raise anything, and may take long."""

    package: str
    """Name of the package for pip; only the trackers in this folder have it."""
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
    """Import and return the class of a tracker; raise ConfigError if there is none of that name, or it cannot work.

    A tracker here needs the package of its name; one of another package has been installed with what it needs.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        built_in = module.name.rpartition(".")[2]
        if built_in not in SHARED_MODULES:
            entries[built_in] = EntryPoint(built_in, f"{module.name}:Backend", GROUP)
    if name not in entries:
        problem = unknown_name("tracker", name, entries)
        raise ConfigError(f"track={name}: {problem} Use {' or '.join(sorted(entries))}.")
    backend_class = _loaded(name, entries[name])
    if entries[name].module.startswith(f"{__name__}."):
        require_package(f"track={name}:", name, backend_class.package)
    return backend_class


def _loaded(name: str, entry: EntryPoint) -> type[Backend]:
    try:
        with importing(entry.module):
            loaded: Any = entry.load()
    except (Exception, SystemExit) as error:  # a package may raise anything while it is imported
        raise ConfigError(
            f"track={name}: {entry.value} cannot be imported: {in_a_line(error)}{place_of(error)}. Correct its package."
        ) from error
    if not isinstance(loaded, type) or not all(hasattr(loaded, part) for part in PARTS):
        raise ConfigError(
            f"track={name}: {entry.value} is not the class of a tracker. Let the entry point name a class "
            f"(module:Class) with {', '.join(PARTS)}."
        )
    backend_class: type[Backend] = loaded
    return backend_class
