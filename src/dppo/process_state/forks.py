"""Processes that a simulator forks: one that comes back from its code must not go on as a twin of ours."""

import os
import sys
import traceback
from contextlib import suppress
from threading import Timer
from typing import NoReturn

PATIENCE_S = 5.0


class _Forks:
    """Counts the forks among the ancestors of this process, so that a fork knows itself without a system call."""

    def __init__(self) -> None:
        self.number = 0
        os.register_at_fork(after_in_child=self._count)

    def _count(self) -> None:
        self.number += 1


FORKS = _Forks()


def leave(error: BaseException | None) -> NoReturn:
    """End a fork of a process of dppo, which has come back from code of a user, as Python would end a script.

    It must not go on as a twin. Nothing is cleaned up: folders, locks and sockets belong to the other process.
    """
    code = 0
    with suppress(BaseException):
        # a thread that is no more may hold the lock of a stream
        Timer(PATIENCE_S, os._exit, (1,)).start()
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
