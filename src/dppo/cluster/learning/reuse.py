"""ReusingTrainers: keep the segments of the last iterations, and train on them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dppo.cluster.learning.trainers import Trainers
from dppo.ppo.exchange.records import PolicySnapshot, Segment, Update
from dppo.spaces.spaces import leaves

KEPT = "kept"  # begins the names of kept arrays in the state
OF_OBSERVATIONS = {"obs": 2, "successors": 1}  # axes before those of an observation


class ReusingTrainers:
    """Trainers that train on the segments of the last R iterations in each update.

    This process keeps the segments of the last R - 1 iterations, and they are part of the state. So nothing is lost
    with an actor, a rank or a node, and a resumed run goes on with the same rows. Only the policies that made them
    could make them again.
    """

    def __init__(self, trainers: Trainers, reuse: int, obs: np.dtype[Any]) -> None:
        """Wrap `trainers`, to train on `reuse` iterations at once; `obs` is the dtype of an observation in segments."""
        self._trainers, self._reuse, self._obs = trainers, reuse, obs
        self.spec, self.weights = trainers.spec, trainers.weights
        self.take_incidents, self.close = trainers.take_incidents, trainers.close
        self._kept: list[list[Segment]] = []  # oldest first

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one update on these segments and the kept ones, sampler by sampler, so that ranks get equal shares."""
        batches = [*self._kept, segments]
        of_samplers = [batch[sampler] for sampler in range(len(segments)) for batch in batches]
        update = self._trainers.update(of_samplers, policy, reward_scale, iteration)
        # Copies, because views of Ray's store would fill it.
        newest = [_segment(_arrays(one), self._obs) for one in segments]
        self._kept = [*self._kept, newest][1 - self._reuse :]
        return update

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of the trainers, and all kept segments."""
        return self._trainers.state() | {
            f"{KEPT}.{number}.{sampler}.{name}": array
            for number, batch in enumerate(self._kept)
            for sampler, segment in enumerate(batch)
            for name, array in _arrays(segment).items()
        }

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; there are no kept segments in that of another run."""
        kept: dict[int, dict[int, dict[str, np.ndarray]]] = {}
        for name, array in state.items():
            if name.startswith(f"{KEPT}."):
                _, number, sampler, rest = name.split(".", 3)
                kept.setdefault(int(number), {}).setdefault(int(sampler), {})[rest] = array
        of_trainers = {name: array for name, array in state.items() if not name.startswith(f"{KEPT}.")}
        self._trainers.load(weights, of_trainers)
        batches = [[batch[sampler] for sampler in sorted(batch)] for _, batch in sorted(kept.items())]
        self._kept = [[_segment(arrays, self._obs) for arrays in batch] for batch in batches]


def _arrays(segment: Segment) -> dict[str, np.ndarray]:
    """Return the arrays of a segment by name; observations leaf by leaf."""
    found = {}
    for name in Segment.__slots__:
        array = getattr(segment, name)
        if array is not None:
            found |= {f"{name}.{leaf}".rstrip("."): np.ascontiguousarray(part) for leaf, part in leaves(array).items()}
    return found


def _segment(arrays: Mapping[str, np.ndarray], obs: np.dtype[Any]) -> Segment:
    """Return a copy of the segment of these arrays, whose observations have dtype `obs`."""
    whole = {name: array.copy() for name, array in arrays.items() if name in Segment.__slots__}
    for name, axes in OF_OBSERVATIONS.items():
        parts = {leaf: arrays[f"{name}.{leaf}".rstrip(".")] for leaf in leaves(obs)}
        stored = np.empty(next(iter(parts.values())).shape[:axes], obs)
        for leaf, view in leaves(stored).items():
            view[...] = parts[leaf]
        whole[name] = stored
    return Segment(**whole)
