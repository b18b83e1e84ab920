"""Lease cores of this machine, so that no two environments share one."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from dppo.errors import counted
from dppo.machine import cores_in_words, cores_of_affinity, usable_cores

LOCK = "dppo-core"  # and the number of the core
WAIT_S = 30.0  # longest wait for cores of the ranks of a killed process, or of an environment that moves away
POLL_S = 0.2


class NoCores(RuntimeError):
    """Too few cores are free on this machine."""


class Lease:
    """Cores that this process and its keepers have to themselves until all of them have closed it.

    An abstract Unix socket of the core's number is the lock: the kernel frees it with the last process that holds it,
    and no file is left.
    """

    def __init__(self, number: int, wait_s: float = WAIT_S) -> None:
        """Lease `number` cores; wait until enough are free. Raise NoCores after `wait_s`."""
        self._locks: dict[int, socket.socket] = {}
        until = time.monotonic() + wait_s
        while not self._take(number):
            num_free = len(self._locks)
            self.close()
            if time.monotonic() >= until:
                raise NoCores(
                    f"{counted(number, 'core')} are needed, and {num_free} are free: this process may use "
                    f"{cores_in_words()}, and other environments have the others. Use fewer actors or samplers here, "
                    f"lower `ranks_per_env` or `cores_per_rank`, or share cores with `cores_per_rank=0`"
                )
            time.sleep(POLL_S)

    def _take(self, number: int) -> bool:
        for core in cores_here():
            if len(self._locks) == number:
                break
            lock = socket.socket(socket.AF_UNIX)
            try:
                lock.bind(f"\0{LOCK}-{core}")
            except OSError:
                lock.close()
            else:
                self._locks[core] = lock
        return len(self._locks) == number

    @property
    def cores(self) -> list[int]:
        """The ids of the cores, as the kernel numbers them."""
        return list(self._locks)

    @property
    def handles(self) -> Sequence[int]:
        """The file descriptors that a keeper inherits, to hold the cores until all ranks have ended."""
        return [lock.fileno() for lock in self._locks.values()]

    def close(self) -> None:
        """Give the cores back, as far as this process is concerned. Safe to call twice."""
        for lock in self._locks.values():
            with suppress(OSError):
                lock.close()
        self._locks = {}


def cores_here() -> list[int]:
    """Return the ids of the cores that may be leased: as many as affinity and quota allow this process."""
    return sorted(cores_of_affinity() or ())[: usable_cores()]
