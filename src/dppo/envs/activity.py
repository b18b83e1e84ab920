"""Activity of the environments of a process, which other processes can read while it is busy.

This module only writes to memory; the process that creates the record may map it to a file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock


class Phase(IntEnum):
    """Current activity of a process."""

    IDLE = 0
    MAKE = 1
    RESET = 2
    STEP = 3
    REPLAY = 4
    CLOSE = 5
    BUILD = 6
    """After a constructor has returned: spaces, networks, imports."""
    RESTART = 8
    """An environment starts its program again: a bit beside the phase of the process, which may do something else."""


STARTS = (Phase.MAKE, Phase.BUILD, Phase.RESTART)
"""Phases that take as long as a constructor."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A copy of a record. It is made without a lock, so its numbers may be one step apart."""

    num_calls: int
    """Count of environments made, resets and steps; never decreases."""
    began: int
    """`num_calls` when the current question began."""
    phase: Phase
    sampler_id: int
    env: int
    """Index of the active environment."""
    replayed: int
    """Steps replayed so far for the current question."""
    to_replay: int
    """Steps to replay in total."""
    steps: int = 0
    """Env steps made for the current question, without replays."""
    episode: int = 0
    """Open episode of the active environment, or the one that it is reset for."""
    length: int = 0
    """Steps of that episode before the current one."""
    environments: int = 0
    """Environments that the process has made so far."""
    restarts: int = 0
    """Programs that were started again since the last answer that reports them."""

    def __str__(self) -> str:
        is_built = self.phase not in STARTS
        is_behind = is_built and self.replayed < self.to_replay and not self.steps
        if is_behind or self.phase is Phase.REPLAY:
            return replaying(self.replayed, self.to_replay)
        if self.phase is Phase.IDLE:
            return "idle"
        doing = {
            Phase.MAKE: "making",
            Phase.RESET: "resetting",
            Phase.STEP: "stepping",
            Phase.CLOSE: "closing",
            Phase.BUILD: "preparing",
            Phase.RESTART: "restarting the program of",
        }
        text = f"{doing[self.phase]} env {self.env} of sampler {self.sampler_id}"
        if self.phase in (Phase.RESET, Phase.STEP):
            text += f", episode {self.episode}"
        if self.phase is Phase.STEP:
            text += f", step {self.length + 1}"
        return text


CELLS = 10  # int64 each
BYTES = 8 * CELLS
_CALLS, _BEGAN, _PLACE, _REPLAYED, _TO_REPLAY = range(5)
_STEPS, _EPISODE, _LENGTH, _ENVIRONMENTS, _RESTARTS = range(5, CELLS)


class ActivityRecord:
    """Record the activity of a process's environments, with a few stores a step, no lock and no system call."""

    def __init__(
        self,
        cells: memoryview | None = None,
        on_replay: Callable[[int, int], None] = lambda replayed, to_replay: None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Write to `cells`, `CELLS` int64 that another process may read; None allocates private memory.

        `on_replay` is called after each replayed step with the number of steps replayed and to replay, `on_step` after
        each env step, and before and after each constructor, with the number of steps made for the current question.
        """
        self._cells = memoryview(bytearray(BYTES)).cast("q") if cells is None else cells
        self._on_replay = on_replay
        self._on_step = on_step
        self.replay_s = 0.0
        """Seconds spent on replay for the current question."""
        self._num_restarting = 0  # programs
        self._lock = Lock()

    def begin(self, to_replay: int = 0) -> None:
        """Begin a new question, with `to_replay` steps to replay."""
        cells = self._cells
        cells[_BEGAN] = cells[_CALLS]
        cells[_REPLAYED] = 0
        cells[_TO_REPLAY] = to_replay
        cells[_STEPS] = 0
        self.replay_s = 0.0

    def enter(self, place: int, episode: int = 0, length: int = 0) -> None:
        """Record a change of activity to `place`, a value of `place_of`, in an episode with `length` steps so far."""
        cells = self._cells
        cells[_PLACE] = place
        cells[_EPISODE] = episode
        cells[_LENGTH] = length
        cells[_CALLS] += 1

    def finish(self) -> None:
        """Record that the question is answered, with reports of all restarts."""
        self.enter(place_of(Phase.IDLE))
        self._cells[_RESTARTS] = 0

    def make(self, place: int) -> None:
        """Record that an environment is about to be made."""
        self.enter(place)
        self._report()

    def count_made(self, place: int, environments: int) -> None:
        """Record a change of activity after a constructor that has made this number of environments."""
        self.enter(place)
        self._cells[_ENVIRONMENTS] += environments
        self._report()

    def replay(self) -> None:
        """Count a replayed step."""
        cells = self._cells
        cells[_CALLS] += 1
        cells[_REPLAYED] += 1
        self._on_replay(cells[_REPLAYED], cells[_TO_REPLAY])

    @contextmanager
    def restarting(self) -> Iterator[Callable[[], None]]:
        """Context in which a program is started again within a call; the function that it yields shows progress."""
        cells = self._cells

        def show() -> None:
            cells[_PLACE] |= Phase.RESTART
            cells[_CALLS] += 1

        with self._lock:
            self._num_restarting += 1
            cells[_RESTARTS] += 1
            show()
        try:
            yield show
        finally:
            with self._lock:
                self._num_restarting -= 1
                if not self._num_restarting:  # else another thread waits for its program
                    cells[_PLACE] &= ~Phase.RESTART
                cells[_CALLS] += 1

    def stepped(self) -> None:
        """Count an env step."""
        self._cells[_STEPS] += 1
        self._report()

    def _report(self) -> None:
        if self._on_step is not None:
            self._on_step(self._cells[_STEPS])

    def record_threads(
        self,
        num_calls: int,
        environments: int,
        active: Activity | None,
        replayed: int,
        steps: int,
        restarts: int,
    ) -> None:
        """Record sums over the records of all threads, and the activity of one that has not finished, `active`."""
        cells = self._cells
        is_replaying = not steps
        if active is None:
            cells[_PLACE] = Phase.IDLE
            cells[_EPISODE] = 0
            cells[_LENGTH] = 0
            restarts = 0
        else:
            cells[_PLACE] = place_of(active.phase, active.sampler_id, active.env)
            cells[_EPISODE] = active.episode
            cells[_LENGTH] = active.length
            is_replaying = is_replaying or active.phase is Phase.REPLAY
        cells[_CALLS] = num_calls
        cells[_ENVIRONMENTS] = environments
        cells[_RESTARTS] = restarts
        cells[_REPLAYED] = replayed
        cells[_STEPS] = steps
        if is_replaying and replayed < cells[_TO_REPLAY]:
            self._on_replay(replayed, cells[_TO_REPLAY])
        self._report()

    @property
    def replayed(self) -> int:
        """Steps replayed for the current question."""
        return self._cells[_REPLAYED]

    def look(self) -> Activity:
        num_calls, began, place, *counts = self._cells.tolist()
        phase = Phase(place & 7)
        if place & Phase.RESTART:
            phase = Phase.RESTART
        return Activity(num_calls, began, phase, place >> 32, place >> 4 & 0xFFFFFFF, *counts)


def place_of(phase: Phase, sampler_id: int = 0, env: int = 0) -> int:
    """Encode a phase and a place in one number, so that a record changes both at once."""
    return phase | env << 4 | sampler_id << 32


def replaying(replayed: int, to_replay: int) -> str:
    """Describe the progress of a replay."""
    return f"replaying {replayed:,} of {to_replay:,} steps"
