"""Close environments, whatever they do then."""

import traceback
from collections.abc import Sequence
from typing import Any

from dppo.process_state.borders import user_code
from dppo.signals import CLOSING_S, at_most


def close_all(envs: Sequence[Any]) -> None:
    """Close environments and print the traceback of each that raises, be it SystemExit."""
    for env in envs:
        try:
            with user_code(f"closing {type(env).__name__}"):
                env.close()
        except (Exception, SystemExit):
            traceback.print_exc()


def close_in_time(envs: Sequence[Any]) -> None:
    """Close environments of this process; leave one alone that does not close in time, with a traceback."""
    with at_most(CLOSING_S):
        close_all(envs)
