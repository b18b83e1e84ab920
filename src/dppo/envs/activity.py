"""Activity of the environments of a process, which other processes can read while it is busy.

This module only writes to memory; the process that creates the record may map it to a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Current activity of a process."""

    IDLE = 0
    MAKE = 1
    RESET = 2
    STEP = 3
    REPLAY = 4


@dataclass(frozen=True, slots=True)
class Activity:
    """A copy of a record. It is made without a lock, so its numbers may be one step apart."""

    moves: int
    """Count of environments made, resets and steps; never decreases."""
    began: int
    """`moves` when the current question began."""
    phase: Phase
    sampler_id: int
    env: int
    """Index of the active environment; always 0 in `STEP`, where the sampler's environments take turns."""
    replayed: int
    """Steps replayed so far for the current question."""
    to_replay: int
    """Steps to replay in total."""
    steps: int = 0
    """Env steps made for the current question, without replays."""

    def __str__(self) -> str:
        if self.phase is Phase.REPLAY or self.replayed < self.to_replay:
            return replaying(self.replayed, self.to_replay)
        place = f"sampler {self.sampler_id}"
        if self.phase is Phase.STEP:
            return f"stepping the environments of {place}"
        if self.phase is Phase.IDLE:
            return "idle"
        return f"{'making' if self.phase is Phase.MAKE else 'resetting'} env {self.env} of {place}"


CELLS = 6  # int64 each
BYTES = 8 * CELLS
_MOVES, _BEGAN, _PLACE, _REPLAYED, _TO_REPLAY, _STEPS = range(CELLS)


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
        each env step with the number of steps made for the current question.
        """
        self._cells = memoryview(bytearray(BYTES)).cast("q") if cells is None else cells
        self._on_replay = on_replay
        self._on_step = on_step
        self.replay_s = 0.0
        """Seconds spent on replay for the current question."""

    def begin(self, to_replay: int = 0) -> None:
        """Begin a new question, with `to_replay` steps to replay."""
        cells = self._cells
        cells[_BEGAN], cells[_REPLAYED], cells[_TO_REPLAY], cells[_STEPS] = cells[_MOVES], 0, to_replay, 0
        self.replay_s = 0.0

    def enter(self, place: int) -> None:
        """Record a change of activity to `place`, a value of `place_of`."""
        self._cells[_PLACE] = place
        self._cells[_MOVES] += 1

    def replay(self) -> None:
        """Count a replayed step."""
        cells = self._cells
        cells[_MOVES] += 1
        cells[_REPLAYED] += 1
        self._on_replay(cells[_REPLAYED], cells[_TO_REPLAY])

    def stepped(self) -> None:
        """Count an env step."""
        cells = self._cells
        cells[_STEPS] += 1
        if self._on_step is not None:
            self._on_step(cells[_STEPS])

    def show(self, moves: int, place: int, replayed: int, steps: int) -> None:
        """Record the sums over several threads, which have records of their own, and the place of one of them."""
        cells = self._cells
        cells[_MOVES], cells[_PLACE], cells[_REPLAYED], cells[_STEPS] = moves, place, replayed, steps
        if replayed < cells[_TO_REPLAY]:
            self._on_replay(replayed, cells[_TO_REPLAY])
        if self._on_step is not None:
            self._on_step(steps)

    def look(self) -> Activity:
        """Return a copy of the record."""
        return look_at(self._cells)


def place_of(phase: Phase, sampler_id: int = 0, env: int = 0) -> int:
    """Encode a phase and a place in one number, so that a record changes both at once."""
    return phase | env << 3 | sampler_id << 32


def look_at(cells: memoryview) -> Activity:
    """Return a copy of the record in `cells` [CELLS]."""
    moves, began, place, replayed, to_replay, steps = cells.tolist()
    env = place >> 3 & 0x1FFFFFFF
    return Activity(moves, began, Phase(place & 7), place >> 32, env, replayed, to_replay, steps)


def replaying(replayed: int, to_replay: int) -> str:
    """Describe the progress of a replay."""
    return f"replaying {replayed:,} of {to_replay:,} steps"
