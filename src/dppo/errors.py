"""The exceptions a user can meet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DppoError(Exception):
    """Base of all; its text is written for the person who reads it. `dppo` exits with `exit_code`."""

    exit_code = 1


class ConfigError(DppoError, ValueError):
    """A setting that cannot be, found before training starts."""

    exit_code = 2


class CheckpointError(DppoError):
    """A checkpoint that is missing, damaged, or of another run than asked for."""

    exit_code = 2


class CheckpointNotWritten(CheckpointError):
    """A checkpoint could not be written: the disk is full, for example. The earlier ones are untouched."""

    exit_code = 1


class EnvironmentFault(DppoError):
    """The user's environment raised, or returned something that is no observation or reward.

    Its text names sampler, env, seed and step; `remote_traceback` is the user's own.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message, remote_traceback)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.message}\n{self.remote_traceback}".rstrip()


class ClusterError(DppoError):
    """Ray could not be reached or started, has too little for this run, or lost more than may be lost."""


class SegmentsLost(ClusterError):
    """Segments went with the node that held them, before the learners had fetched them. They can be made again."""


class TrainingDiverged(DppoError):
    """A loss or gradient is not finite. The weights are those from before the minibatch."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 env`, `1,024 envs`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """`x is not a known setting. Did you mean y?`"""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{name} is not a known {kind}.{hint}"
