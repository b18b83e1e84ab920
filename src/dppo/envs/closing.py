"""Close environments, even if they raise or hang."""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from dppo.envs.sharing import end_use
from dppo.errors import counted
from dppo.process_state.borders import user_code
from dppo.signals import CLOSING_S, at_most
from dppo.user_code import PACKAGE


class _Errors:
    """Errors of the environments that are closed together, perhaps by several threads."""

    def __init__(self) -> None:
        self._lock = RLock()  # a signal may end the process by closing everything
        self._contexts = 0
        self._counts = Counter[str]()  # by type and place

    def enter(self) -> None:
        with self._lock:
            self._contexts += 1

    def print(self, error: BaseException) -> None:
        """Print a traceback, unless one of an error of the same kind was printed before."""
        kind = f"{type(error).__name__}{_place_in_user_code(error)}"
        with self._lock:
            self._counts[kind] += 1
            if self._counts[kind] == 1:
                traceback.print_exception(error)

    def leave(self) -> None:
        """After the last context, print how often each error was repeated."""
        with self._lock:
            self._contexts -= 1
            if self._contexts:
                return
            for kind, count in self._counts.items():
                if count > 1:
                    repeats = counted(count - 1, "other environment")
                    print(f"{repeats} raised the same in close(): {kind}", file=sys.stderr)
            self._counts.clear()


def _place_in_user_code(error: BaseException) -> str:
    """Return file and line of the innermost frame outside dppo, such as a call that took too long."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(PACKAGE)
    ]
    if frames:
        return f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return ""


_errors = _Errors()


@contextmanager
def closing_together() -> Iterator[None]:
    """Context in which environments that raise the same when they are closed are reported by one traceback."""
    _errors.enter()
    try:
        yield
    finally:
        _errors.leave()


def close(env: Any) -> None:
    """Close an environment, if it has a method `close`: only those of Gymnasium and PettingZoo always do."""
    if hasattr(env, "close"):
        env.close()


def close_all(envs: Sequence[Any]) -> None:
    """Close environments and print the traceback of each kind of error, be it SystemExit."""
    with closing_together():
        for env in envs:
            end_use(env)
            try:
                with user_code(f"closing {type(env).__name__}"):
                    close(env)
            except (Exception, SystemExit) as error:
                _errors.print(error)


def close_in_time(envs: Sequence[Any]) -> None:
    """Close environments of this process; leave one alone that does not close in time, with a traceback."""
    with at_most(CLOSING_S):
        close_all(envs)
