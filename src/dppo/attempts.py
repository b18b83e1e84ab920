"""Attempts: repeat a call that may fail for a while, such as a constructor whose licence is not free at once."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

WAITS_S = (1, 2, 4, 8, 16, 30)
POLL_S = 0.25  # between signs of life while waiting

Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)


def attempted(
    call: Callable[[], Result],
    error_type: type[Error],
    note: Callable[[Error, float], object],
    show: Callable[[], object],
    waits_s: Sequence[float],
) -> Result:
    """Return the result of a call, which is repeated after each of these waits while it raises such an error.

    `note` gets each error with the wait after it; the error of the last attempt is raised. `show` is called several
    times a second during a wait.
    """
    for wait_s in waits_s:
        try:
            return call()
        except error_type as error:
            note(error, wait_s)
        for _ in range(round(wait_s / POLL_S)):
            show()
            time.sleep(POLL_S)
    return call()
