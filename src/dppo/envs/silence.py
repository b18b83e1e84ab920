"""SilenceWatch: logs where an environment of this process is while a call to it does not return."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dppo.envs.activity import Activity, ActivityRecord, Phase
from dppo.log import logger

FIRST_S = 10.0  # duration of a call after which it is logged
USUAL = 3.0  # times the longest call of its kind so far: a slow simulator is not silent
POLL_S = 1.0
FROZEN_S = 10.0  # time without Python in this process after which faulthandler writes where it is, for the first time

CALLS = {
    Phase.MAKE: "the constructor",
    Phase.RESET: "reset of episode {activity.episode}",
    Phase.STEP: "step {step} of episode {activity.episode}",
    Phase.REPLAY: "a step of a replay ({activity.replayed:,} of {activity.to_replay:,} are done)",
    Phase.CLOSE: "close",
    Phase.RESTART: "the restart of its program",
}


class Stillness:
    """Finds calls that do not return in looks at what a process does."""

    def __init__(self, owner: Callable[[Activity], str]) -> None:
        """Name the environment of an activity by `owner`: `sampler 0 (CartPole-v1), env 2`."""
        self._owner = owner
        self._num_calls = -1
        self._phase = Phase.IDLE
        self._since = 0.0
        self._longest_s = dict.fromkeys(Phase, 0.0)
        self._due_s = FIRST_S

    def look(self, activity: Activity, now: float) -> str:
        """Return a line if the call in progress is late, and again each time that it takes twice as long; or ""."""
        if activity.num_calls != self._num_calls:
            self._longest_s[self._phase] = max(self._longest_s[self._phase], now - self._since)
            self._num_calls = activity.num_calls
            self._phase = activity.phase
            self._since = now
            self._due_s = max(FIRST_S, USUAL * self._longest_s[activity.phase])
        silent_s = now - self._since
        if activity.phase not in CALLS or silent_s < self._due_s:
            return ""
        self._due_s = 2 * silent_s
        call = CALLS[activity.phase].format(activity=activity, step=activity.length + 1)
        return f"{self._owner(activity)}: {call} has not returned for {silent_s:.0f} s"


def name_sampler(env_name: str) -> Callable[[Activity], str]:
    """Make a function that names the active environment of the samplers."""
    return lambda activity: f"sampler {activity.sampler_id} ({env_name}), env {activity.env}"


def name_env(env_name: str) -> Callable[[Activity], str]:
    return lambda activity: env_name


class SilenceWatch:
    """Looks at the activity of this process from a thread of its own, and logs a line when a call does not return.

    Native code that keeps the interpreter to itself also stops this thread. Then faulthandler, which needs no
    interpreter, writes the stacks of all threads to stderr.
    """

    def __init__(
        self, record: ActivityRecord, owner: Callable[[Activity], str], hint: str = ""
    ) -> None:
        """Watch `record`, with names by `owner`; `hint` ends the first line, unless the first constructor hangs."""
        self._record = record
        self._hint = hint
        self._stillness = Stillness(owner)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dppo silence", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(POLL_S)

    def __enter__(self) -> SilenceWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        armed = False
        frozen_s = FROZEN_S
        looked_at = time.monotonic()
        try:
            while not self._closed.wait(POLL_S):
                frozen_s = longer_patience(frozen_s, time.monotonic() - looked_at)
                looked_at = time.monotonic()
                activity = self._record.look()
                line = self._stillness.look(activity, time.monotonic())
                if line:
                    hint = "" if _makes_first_env(activity) else self._hint
                    logger.warning("%s%s", line, hint, extra={"at_once": True})
                    if hint:
                        self._hint = ""
                is_busy = activity.phase in CALLS
                if is_busy or armed:
                    _expect_python(frozen_s if is_busy else 0.0)
                armed = is_busy
        finally:
            if armed:
                _expect_python(0.0)


def _makes_first_env(activity: Activity) -> bool:
    """Return whether the first environment of the first sampler is being made: the process has no other one."""
    return activity.phase is Phase.MAKE and activity.sampler_id == 0 and activity.env == 0


def longer_patience(frozen_s: float, gap_s: float) -> float:
    """Return the seconds without Python after which the stacks are written next, after a gap between two looks.

    A solver that keeps the interpreter for 30 s in each step has them written once, not in each step.
    """
    if gap_s >= frozen_s:
        return max(frozen_s, USUAL * gap_s)
    return frozen_s


def _expect_python(within_s: float) -> None:
    """Let faulthandler write the stacks if this is not called again in time; 0: never."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # there is no stderr
        if within_s:
            faulthandler.dump_traceback_later(within_s, file=sys.__stderr__)  # type: ignore[arg-type]
        else:
            faulthandler.cancel_dump_traceback_later()
