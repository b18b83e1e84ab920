"""Progress: what the environments of a process are doing, for others to read while it cannot answer.

Pure memory: whether a file is behind it is the business of the process that makes the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Kinds of work."""

    IDLE = 0
    MAKE = 1
    RESET = 2
    STEP = 3
    REPLAY = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """A look at a record; its numbers may be one step apart from each other, for nothing is locked."""

    moves: int
    """Grows with each environment that is made or reset, and with each step; never shrinks."""
    began: int
    """`moves` when the present question began."""
    phase: Phase
    sampler_id: int
    env: int
    """The environment at work; in `STEP` the sampler's environments take turns, and this is 0."""
    replayed: int
    """Steps played again for the present question."""
    to_replay: int
    """Of so many."""
    steps: int = 0
    """Env steps made for the present question, without replays."""

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


class ProgressRecord:
    """Writes what the environments of a process are doing: a few stores a step, no lock, no system call."""

    def __init__(
        self, cells: memoryview | None = None, on_replay: Callable[[int, int], None] = lambda replayed, to_replay: None
    ) -> None:
        """Args:
        cells: `CELLS` int64 to write into, which another process may read; None: memory of its own.
        on_replay: called after each replayed step with their number and the number of all.
        """
        self._cells = memoryview(bytearray(BYTES)).cast("q") if cells is None else cells
        self._on_replay = on_replay
        self.on_step: Callable[[int], None] | None = None
        """Called after each env step with the number of steps made for the present question."""
        self.replay_s = 0.0
        """Seconds of replay for the present question."""

    def begin(self, to_replay: int = 0) -> None:
        """Begin a new question, with so many steps to play again."""
        cells = self._cells
        cells[_BEGAN], cells[_REPLAYED], cells[_TO_REPLAY] = cells[_MOVES], 0, to_replay
        cells[_STEPS] = 0
        self.replay_s = 0.0

    def enter(self, place: int) -> None:
        """Begin something, at a place from `place_of`."""
        cells = self._cells
        cells[_PLACE] = place
        cells[_MOVES] += 1

    def replay(self) -> None:
        """Count a step that was played again."""
        cells = self._cells
        cells[_MOVES] += 1
        cells[_REPLAYED] += 1
        self._on_replay(cells[_REPLAYED], cells[_TO_REPLAY])

    def stepped(self) -> None:
        """Count an env step."""
        cells = self._cells
        cells[_STEPS] += 1
        if self.on_step is not None:
            self.on_step(cells[_STEPS])

    def look(self) -> Progress:
        """Return what is recorded."""
        return look_at(self._cells)


def place_of(phase: Phase, sampler_id: int = 0, env: int = 0) -> int:
    """Return a phase and a place in one number, so that a record changes both at once."""
    return phase | env << 3 | sampler_id << 32


def look_at(cells: memoryview) -> Progress:
    """Return what is recorded in `cells` [CELLS]."""
    moves, began, place, replayed, to_replay, steps = cells.tolist()
    env = place >> 3 & 0x1FFFFFFF
    return Progress(moves, began, Phase(place & 7), place >> 32, env, replayed, to_replay, steps)


def replaying(replayed: int, to_replay: int) -> str:
    """Say how far a replay has come."""
    return f"replaying {replayed:,} of {to_replay:,} steps"
