"""Faults of environments: invalid results, and tracebacks that show the user's code alone."""

from __future__ import annotations

import traceback
from pathlib import Path

from dppo.errors import EnvironmentFault
from dppo.user_code import in_a_line

REMEDY = "Correct the environment, or use on_bad_step=drop to leave such episodes out."
PACKAGE = str(Path(__file__).parents[2])


class BadStep(EnvironmentFault):
    """An environment returned an invalid result; the episode may be dropped."""

    def final(self) -> EnvironmentFault:
        """Return the error that ends the run."""
        return EnvironmentFault(f"{self.message} {REMEDY}")


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, starting at the first frame outside this package."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def constructor_fault(owner: str, error: BaseException) -> EnvironmentFault:
    """Return the fault of an environment's constructor that raised `error`."""
    text = f"{owner}: the environment's constructor raised {in_a_line(error)}"
    return EnvironmentFault(text, user_traceback(error))
