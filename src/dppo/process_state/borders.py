"""The borders between dppo and code of users, which may change state of the whole process, and may fork.

`user_code` surrounds imports and constructors, `guarded_steps` segments and episodes. Each step has a `Guard`, which is
cheaper. A simulator that has replaced sys.stdout, gone to another folder, or let NumPy raise finds that again.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, current_thread, local, main_thread
from typing import Any

from dppo.numerics import arithmetic
from dppo.numerics.arithmetic import Arithmetic
from dppo.process_state.forks import FORKS, leave
from dppo.process_state.states import STATES, ProcessState, is_closed


class _Users:
    """State that code of users has set, and will find when it runs again."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Any, Any]] = {}
        """Name of the state -> dppo's value at that time, and the user code's value."""
        self.imported: dict[str, tuple[Any, Any]] = {}
        """Values that imports have set, which a process runs once: all of its runs find them."""
        self.arithmetic: Arithmetic | None = None  # as the last import or constructor has left it
        self.first_arithmetic: Arithmetic | None = None
        """The arithmetic with which each run begins, as the program or an import has set it."""
        self.noted: set[str] = set()
        self.changes: list[Change] = []
        self.lock = Lock()
        self.running = 0  # threads in which code of users runs
        self.runs_beside = 0  # runs that are in other threads than the main one
        self.states_before: list[Any] = []  # the states of dppo, from when the first of them began


_users = _Users()
_inside = local()


@contextmanager
def dppo_computes() -> Iterator[None]:
    """Context in which this thread computes as usual; environments still get the arithmetic of the program."""
    with arithmetic.as_usual() as program_arithmetic:
        if program_arithmetic is not None:
            _users.arithmetic = program_arithmetic
            _users.first_arithmetic = program_arithmetic
            note_changes("the program", program_arithmetic.words)
        yield


@contextmanager
def user_code(by: str) -> Iterator[None]:
    """Run code of the user in the process state that it has set before, and restore the state of dppo afterwards.

    `by`: name of this code in the note on changes, such as "importing mysim".
    """
    with guarded_steps(by) as outermost:
        if outermost and _users.arithmetic is not None:
            arithmetic.use(_users.arithmetic)
        try:
            yield
        finally:
            if outermost:
                _keep_arithmetic(by)


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Run the import of a module of the user as `user_code`; what it sets stays for later runs of this process."""
    earlier = dict(_users.values)
    earlier_arithmetic = _users.arithmetic
    try:
        with user_code(f"importing {name}"):
            yield
    finally:
        for state, values in _users.values.items():
            if earlier.get(state) != values:
                _users.imported[state] = values
        if _users.arithmetic != earlier_arithmetic:
            _users.first_arithmetic = _users.arithmetic


@contextmanager
def guarded_steps(by: str) -> Iterator[bool]:
    """Do as `user_code`, but let this thread compute as usual: each step has a `Guard`.

    Within another one it does nothing; yields whether it is the outermost.
    """
    pid = os.getpid()
    outermost = not getattr(_inside, "user_code", False)
    if outermost:
        _give_back()
        _inside.user_code = True
    try:
        yield outermost
    except BaseException as error:
        if os.getpid() != pid:
            leave(error)
        raise
    else:
        if os.getpid() != pid:
            leave(None)
    finally:
        if outermost:
            _inside.user_code = False
            _take_back(by)


def _give_back() -> None:
    with _users.lock:
        _users.running += 1
        if _users.running == 1:
            _users.states_before = [state.get() for state in STATES]
            if _users.values:
                _put_values()


def _put_values() -> None:
    """Set the values of users' code again before it runs, except values that the program has changed meanwhile."""
    for state, current in zip(STATES, _users.states_before, strict=True):
        if state.name in _users.values:
            value_before, value = _users.values.pop(state.name)
            if state.put is not None and value is not None and value_before == current:
                state.put(value)


def _keep_arithmetic(by: str) -> None:
    _users.arithmetic = None
    if arithmetic.changed():
        _users.arithmetic = arithmetic.current()
        arithmetic.use(None)
    if _users.arithmetic is not None:
        note_changes(by, _users.arithmetic.words)


def _take_back(by: str) -> None:
    """Restore what dppo depends on, keep what is to be given back, and note what was changed for the first time."""
    names: list[str] = []
    with _users.lock:
        _users.running -= 1
        if not _users.running:
            states_after = [state.get() for state in STATES]
            is_a_stream_closed = is_closed(sys.stdout) or is_closed(sys.stderr)
            if states_after != _users.states_before or is_a_stream_closed:
                names = _take_back_values(states_after)
    if names:
        note_changes(by, names)


def _take_back_values(states_after: list[Any]) -> list[str]:
    """Restore the states of dppo; return the names of those that code of users has changed."""
    states = zip(STATES, _users.states_before, states_after, strict=True)
    return [
        state.name
        for state, value_before, value_after in states
        if _take_back_one(state, value_before, value_after)
    ]


def _take_back_one(state: ProcessState, value_before: Any, value_after: Any) -> bool:
    """Restore dppo's value after code of users has run; return whether a change by that code is worth a note."""
    is_gone = is_closed(value_after)
    if value_after == value_before and not is_gone:
        return False
    if state.is_shared and _users.runs_beside:
        return False
    if state.put is not None:
        state.put(value_before)
        if state.given_back and not is_gone:
            _users.values[state.name] = value_before, value_after
    return state.noted


@dataclass(frozen=True, slots=True)
class Change:
    """State of this process that code of users has changed for the first time."""

    by: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.by} changed {', '.join(self.names)}, of the whole process; dppo goes on with its own"


def note_changes(by: str, names: list[str]) -> None:
    """Record that code of a user has changed the states of these names, except changes recorded before."""
    new_names = tuple(name for name in names if name not in _users.noted)
    if new_names:
        _users.noted.update(new_names)
        _users.changes.append(Change(by, new_names))


def forget_notes() -> None:
    """Begin a run, or an examination, whose notes do not depend on what was noted in this process before."""
    _users.noted.clear()
    _users.changes.clear()


@contextmanager
def separate_run() -> Iterator[None]:
    """Context of a run whose environments find nothing that those of other runs in this process have set.

    Without it, an environment would begin in the folder to which one of an earlier run has gone. A run within an
    observer of another one leaves that one's states and notes as they were.
    """
    saved_state = _users.values, _users.noted, _users.changes
    arithmetic_before = _users.arithmetic
    _users.values = dict(_users.imported)
    _users.arithmetic = _users.first_arithmetic
    _users.noted = set()
    _users.changes = []
    is_beside = current_thread() is not main_thread()
    _users.runs_beside += is_beside
    try:
        yield
    finally:
        _users.runs_beside -= is_beside
        _users.values, _users.noted, _users.changes = saved_state
        _users.values |= _users.imported
        _users.arithmetic = arithmetic_before or _users.first_arithmetic


def take_changes() -> list[Change]:
    changes = _users.changes.copy()
    _users.changes.clear()
    return changes


class Guard:
    """Guards the steps and resets of one environment: it finds the arithmetic that it has set, and dppo its own."""

    def __init__(self, by: str) -> None:
        """Begin with what imports and constructors have left; `by` names the environment in notes."""
        self._by = by
        self.process = FORKS.number
        self.arithmetic = _users.arithmetic

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function of the environment, and return its result."""
        if self.arithmetic is not None:
            self.enter()
        try:
            result = function()
        except BaseException as error:
            self.leave(error)
            raise
        if self.needed:
            self.leave()
        return result

    def enter(self) -> None:
        """Give back what the environment has set: before it steps, if there is any `arithmetic`."""
        arithmetic.use(self.arithmetic)

    @property
    def needed(self) -> bool:
        """True to call `leave` after a step that has not raised."""
        return self.arithmetic is not None or arithmetic.changed() or self.process != FORKS.number

    def leave(self, error: BaseException | None = None) -> None:
        """Compute as usual again after a step, which may have raised `error`; end a fork of this process."""
        if not self.needed:
            return
        if self.process != FORKS.number:
            leave(error)
        arithmetic_after = arithmetic.current()
        arithmetic.use(None)
        if arithmetic_after is not None and arithmetic_after != self.arithmetic:
            note_changes(f"a step or reset of {self._by}", arithmetic_after.words)
        self.arithmetic = arithmetic_after
