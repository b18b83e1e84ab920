"""RunClock: the time by which a run measures deadlines. It stands still while no process could have answered."""

import threading
import time
from collections.abc import Callable

BEAT_S = 0.25
MOST_S = 2.0  # counted between two beats; if they are further apart, this process was stopped


class RunClock:
    """Seconds for which this process was running: not stopped (SIGSTOP, a suspended laptop or virtual machine).

    `patience` does not count the time during which the network is silent, either: an actor whose answers cannot arrive
    is not late. A thread beats four times a second; all methods may be called by any thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._beat_at = now()
        self._awake_s = now()
        self._patience_s = now()
        self._silent = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Beat from now on."""
        threading.Thread(target=self._beat_until_closed, name="dppo-clock", daemon=True).start()

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()

    def awake(self) -> float:
        """Return the time in seconds, without those for which this process was stopped."""
        with self._lock:
            return self._awake_s + self._since_beat()

    def patience(self) -> float:
        """Return the time in seconds, without those for which this process was stopped or the network was silent."""
        with self._lock:
            if self._silent:
                return self._patience_s
            return self._patience_s + self._since_beat()

    def set_silent(self, silent: bool) -> None:
        """Note whether the network is silent from now on."""
        self.beat()
        with self._lock:
            self._silent = silent

    def beat(self) -> None:
        """Count the time since the last beat."""
        with self._lock:
            since_s = self._since_beat()
            self._awake_s += since_s
            if not self._silent:
                self._patience_s += since_s
            self._beat_at = self._now()

    def _since_beat(self) -> float:
        return min(MOST_S, self._now() - self._beat_at)

    def _beat_until_closed(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.beat()
