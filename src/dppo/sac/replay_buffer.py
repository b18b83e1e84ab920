"""ReplayBuffer: the transitions of earlier segments, from which minibatches are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dppo.ppo.exchange.records import Segment
from dppo.ppo.learning.batch import merged
from dppo.spaces.spaces import leaves

PREFIX = "rows."  # begins the names of all arrays of the state
COLUMNS = ("obs", "actions", "logprobs", "rewards", "terminated", "valid")
INTENDED = "intended"  # a column as long as the policy is held near a controller
LOGPROBS = PREFIX + "logprobs"
EXIT_PLACES = PREFIX + "exits"
EXIT_OBS = PREFIX + "exit_obs"


class LaterRows(NamedTuple):
    """Raw rows [n] that may extend the horizon of rows drawn before them."""

    obs: np.ndarray
    actions: np.ndarray
    """Sampled actions, before squashing."""
    logprobs: np.ndarray
    """Log-probabilities of the actions under the policy that chose them."""


Extends = Callable[[int, np.ndarray, LaterRows], np.ndarray]
"""Function of a step (1, 2, ...), the indices of drawn rows, and the rows of that step: True for rows that extend the
horizon."""


class DrawnRows(NamedTuple):
    """Raw rows [n], each with the steps after it, at most `n_step` together."""

    obs: np.ndarray
    actions: np.ndarray
    """Sampled actions, before squashing."""
    rewards: np.ndarray
    """[n_step, n]: rewards of these steps; 0 behind the last of them."""
    num_steps: np.ndarray
    terminated: np.ndarray
    """True where the last of the steps ended in a terminal state."""
    successors: np.ndarray
    """Observations after the last of the steps; any observations where terminated."""
    intended: np.ndarray | None
    """Actions of a controller, before noise was added, nan in rows of the policy; None once nobody needs them."""


@dataclass(frozen=True, slots=True)
class Exits:
    """Observations after rows without a next row that holds them: at time limits, at losses, after the newest rows.

    The arrays are replaced, never changed.
    """

    places: np.ndarray
    """[n], ascending places of the rows; the place of a row is step * E + environment."""
    obs: np.ndarray
    """[n, *O]"""

    def find(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the exits among `places`, and the observations there."""
        indices = np.searchsorted(self.places, places)
        is_exit = indices < len(self.places)
        is_exit[is_exit] = self.places[indices[is_exit]] == places[is_exit]
        return is_exit, self.obs[indices[is_exit]]

    def where(self, chosen: np.ndarray) -> Exits:
        return Exits(self.places[chosen], self.obs[chosen])

    def followed_by(self, later: Exits) -> Exits:
        places = np.concatenate([self.places, later.places])
        return Exits(places, np.concatenate([self.obs, later.obs]))


class BufferSnapshot(NamedTuple):
    """The rows at some time, as indices and references."""

    first: int
    end: int
    exits: Exits


class ReplayBuffer:
    """The last steps of all E environments of this rank, in the order of steps, samplers and environments.

    Rows are kept raw, and each observation once. New rows do not overwrite the rows that they replace, so
    `restore` can undo an append without a copy.
    """

    def __init__(self, limit: int, obs: np.dtype[Any]) -> None:
        """Begin without rows; the oldest steps are dropped when there are more than `limit` rows.

        `obs`: the dtype of an observation.
        """
        self._limit = limit
        self._obs = obs
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, np.ndarray] = {}  # [capacity, E, ...], a ring of steps
        self._exits = Exits(np.zeros(0, np.int64), np.zeros(0, self._obs))
        self._first = 0  # number of the oldest step that is kept
        self._end = 0

    @property
    def num_steps(self) -> int:
        """Kept steps of each environment."""
        return self._end - self._first

    @property
    def num_envs(self) -> int:
        """E; 0 before the first rows."""
        if self._columns:
            return self._columns["valid"].shape[1]
        return 0

    def append(self, segments: Sequence[Segment], *, keeps_intended: bool = False) -> None:
        """Keep the rows of segments, which are in sampler order.

        Args:
            keeps_intended: rows of the policy do not end the column of a controller's actions.
        """
        columns = {name: merged(segments, name) for name in COLUMNS}
        # rows of older checkpoints have no controller's actions
        has_intended = not self.num_steps or INTENDED in self._columns
        if has_intended and segments[0].intended is not None:
            columns[INTENDED] = merged(segments, INTENDED)
        elif keeps_intended and INTENDED in self._columns:
            columns[INTENDED] = np.full_like(columns["actions"], np.nan)
        else:
            self._columns.pop(INTENDED, None)
        num_steps, num_envs = columns["valid"].shape
        kept_steps = max(num_steps, self._limit // num_envs)
        self._reserve(kept_steps + num_steps, columns)
        continued = self._continued_by(columns["obs"][0], columns["valid"][0])
        exits = self._exits.where(~continued).followed_by(_exits_of(segments, self._end))
        positions = np.arange(self._end, self._end + num_steps) % self._capacity
        for name, column in columns.items():
            self._columns[name][positions] = column
        self._end += num_steps
        self._first = max(self._first, self._end - kept_steps)
        self._exits = exits.where(exits.places >= self._first * num_envs)

    @property
    def _capacity(self) -> int:
        return len(self._columns["valid"])

    def _reserve(self, capacity: int, template: Mapping[str, np.ndarray]) -> None:
        """Make room for `capacity` steps of columns like those of `template`.

        The system provides the memory of a step when it is written.
        """
        if self._columns and self._capacity == capacity:
            return
        steps = np.arange(self._first, self._end)
        columns = {}
        for name, column in template.items():
            columns[name] = np.empty((capacity, *column.shape[1:]), column.dtype)
            if self.num_steps:
                columns[name][steps % capacity] = self._columns[name][steps % self._capacity]
        self._columns = columns

    def _continued_by(self, starts: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Return which exits are the observations [E] of the next step, from which a transition follows."""
        continued = np.zeros(len(self._exits.places), bool)
        steps, envs = np.divmod(self._exits.places, len(starts))
        for number in np.flatnonzero(steps == self._end - 1):
            env = envs[number]
            is_same = self._exits.obs[number].tobytes() == starts[env].tobytes()
            continued[number] = is_same and valid[env]
        return continued

    def transitions(self) -> np.ndarray:
        """List the places of all rows that are transitions, in their order."""
        steps = np.arange(self._first, self._end)
        valid = self._columns["valid"][steps % self._capacity]
        return self._first * self.num_envs + np.flatnonzero(valid)

    def draw(
        self, places: np.ndarray, n_step: int = 1, extends: Extends | None = None
    ) -> DrawnRows:
        """Return the rows at `places`, each with the steps after it.

        The steps of a row end with its episode, at a loss, after `n_step` steps, or before a step refused by `extends`.
        """
        rewards = np.zeros((n_step, len(places)))
        rewards[0] = self._at("rewards", places)
        num_steps = np.ones(len(places), np.int64)
        last = places.copy()
        indices = np.arange(len(places))  # rows that may have a further step
        for step in range(1, n_step):
            indices = indices[self._has_next(last[indices])]
            if extends is not None:
                later = self._later(last[indices] + self.num_envs)
                indices = indices[extends(step, indices, later)]
            last[indices] += self.num_envs
            num_steps[indices] += 1
            rewards[step, indices] = self._at("rewards", last[indices])
        is_exit, exit_obs = self._exits.find(last)
        terminated = self._at("terminated", last)
        following = np.where(is_exit | terminated, last, last + self.num_envs)
        successors = self._at("obs", following)
        successors[is_exit] = exit_obs
        obs = self._at("obs", places)
        actions = self._at("actions", places)
        intended = self._at(INTENDED, places) if INTENDED in self._columns else None
        return DrawnRows(obs, actions, rewards, num_steps, terminated, successors, intended)

    def _has_next(self, places: np.ndarray) -> np.ndarray:
        """Mark the `places` that have a next row in the same episode."""
        is_exit, _ = self._exits.find(places)
        return ~is_exit & ~self._at("terminated", places)

    def _later(self, places: np.ndarray) -> LaterRows:
        """Gather the rows at `places`, as `extends` of `draw` gets them."""
        obs = self._at("obs", places)
        actions = self._at("actions", places)
        logprobs = self._at("logprobs", places)
        return LaterRows(obs, actions, logprobs)

    def _at(self, name: str, places: np.ndarray) -> np.ndarray:
        """Copy the values of a column at these places."""
        steps, envs = np.divmod(places, self.num_envs)
        column: np.ndarray = self._columns[name][steps % self._capacity, envs]
        return column

    # ------------------------------------------------------------------ state

    def snapshot(self) -> BufferSnapshot:
        """Return the rows for `restore`, which is possible until a second `append`."""
        return BufferSnapshot(self._first, self._end, self._exits)

    def restore(self, snapshot: BufferSnapshot) -> None:
        self._first, self._end, self._exits = snapshot

    def state(self) -> dict[str, np.ndarray]:
        """Return all rows as arrays [steps, E, ...], which are views if possible; observations leaf by leaf."""
        if not self.num_steps:
            return {}
        state: dict[str, np.ndarray] = {}
        for name, column in self._columns.items():
            state |= leaves(self._in_order(column), name=PREFIX + name)
        state[EXIT_PLACES] = self._exits.places - self._first * self.num_envs
        return state | leaves(self._exits.obs, name=EXIT_OBS)

    def _in_order(self, column: np.ndarray) -> np.ndarray:
        start = self._first % self._capacity
        end = start + self.num_steps
        if end <= self._capacity:
            return column[start:end]
        return np.concatenate([column[start:], column[: end - self._capacity]])

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the rows that `state` returned; become empty if it holds none."""
        self._clear()
        if EXIT_PLACES not in state:
            return
        shape = state[PREFIX + "valid"].shape
        # Older checkpoints have no log-probabilities. With infinity in their place, the relative likelihoods are 0.
        defaults = {LOGPROBS: np.full(shape, np.inf, np.float32)}
        columns = defaults | dict(state)
        for name in (*COLUMNS[1:], INTENDED):
            if PREFIX + name in columns:
                self._columns[name] = columns[PREFIX + name]
        self._columns["obs"] = _structured(PREFIX + "obs", state, shape, self._obs)
        places = state[EXIT_PLACES]
        exits = Exits(places, _structured(EXIT_OBS, state, places.shape, self._obs))
        self._end = shape[0]
        self._first = max(0, self._end - max(1, self._limit // shape[1]))
        self._exits = exits.where(places >= self._first * shape[1])


def rows_of_rank(state: Mapping[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
    """Return the part of `ReplayBuffer.state` that one of several ranks stores: the rows of its samplers."""
    if EXIT_PLACES not in state:
        return {}
    num_envs_of_all = state[PREFIX + "valid"].shape[1]
    num_envs = num_envs_of_all // ranks
    steps, envs = np.divmod(state[EXIT_PLACES], num_envs_of_all)
    first = rank * num_envs
    is_exit_of_rank = envs // num_envs == rank
    share = {}
    for name, array in state.items():
        if name.startswith(EXIT_OBS):
            share[name] = array[is_exit_of_rank]
        elif name.startswith(PREFIX) and name != EXIT_PLACES:
            share[name] = array[:, first : first + num_envs]
    places = steps * num_envs + envs - first
    return share | {EXIT_PLACES: places[is_exit_of_rank]}


def _exits_of(segments: Sequence[Segment], step: int) -> Exits:
    """Return the exits of segments that begin at `step`; the observation after a terminal state is not needed."""
    followed = np.stack([segment.followed for segment in segments])
    samplers, steps, envs = np.nonzero(followed)
    num_envs = followed.shape[2]
    columns = samplers * num_envs + envs
    places = (step + steps) * (len(segments) * num_envs) + columns
    terminated = merged(segments, "terminated")[steps, columns]
    order = np.argsort(places)
    chosen = order[~terminated[order]]
    return Exits(places[chosen], merged(segments, "successors", axis=0)[chosen])


def _structured(
    name: str, state: Mapping[str, np.ndarray], shape: tuple[int, ...], obs: np.dtype[Any]
) -> np.ndarray:
    """Put the leaves of a column together as observations."""
    column = np.empty(shape, obs)
    for leaf_name, leaf in leaves(column, name=name).items():
        leaf[...] = state[leaf_name]
    return column
