"""ReusingTrainers: keep the segments of the last iterations, and train on them again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dppo.cluster.learning.trainers import Trainers
from dppo.ppo.exchange.records import PolicySnapshot, Segment, Update
from dppo.spaces.spaces import Spaces, leaves, walk

KEPT = "kept."  # begins the names of kept arrays in the state
OBSERVATIONS = {"obs": 2, "successors": 1}  # and the axes before those of an observation


def reusing(trainers: Trainers, reuse: int, spaces: Spaces) -> Trainers:
    """Let `trainers` train on the segments of the last `reuse` iterations."""
    return trainers if reuse == 1 else ReusingTrainers(trainers, reuse, spaces.of_network().obs)


class ReusingTrainers:
    """Trainers that train on the segments of the last R iterations in each update.

    This process keeps the R - 1 older ones, in the state, because only the policies that made them could make them
    again. So neither the loss of an actor, a rank or a node nor a resume changes what is trained on.
    """

    def __init__(self, trainers: Trainers, reuse: int, obs: np.dtype[Any]) -> None:
        """Wrap `trainers`; `obs` is the dtype of an observation in segments."""
        self._trainers, self._reuse, self._obs = trainers, reuse, obs
        self.spec, self.weights, self.close = trainers.spec, trainers.weights, trainers.close
        self._kept: list[list[Segment]] = []  # oldest first

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one update on these segments and the kept ones, sampler by sampler, so that ranks get equal shares."""
        batches = [*self._kept, segments]
        of_samplers = [batch[sampler] for sampler in range(len(segments)) for batch in batches]
        update = self._trainers.update(of_samplers, policy, reward_scale, iteration)
        newest = [_copied(_arrays(one), self._obs) for one in segments]  # views of Ray's store would fill it
        self._kept = [*self._kept, newest][1 - self._reuse :]
        return update

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of the trainers, and all kept segments."""
        return self._trainers.state() | {
            f"{KEPT}{number}.{sampler}.{name}": array
            for number, batch in enumerate(self._kept)
            for sampler, segment in enumerate(batch)
            for name, array in _arrays(segment).items()
        }

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; that of another run holds no segments."""
        self._trainers.load(weights, {name: array for name, array in state.items() if not name.startswith(KEPT)})
        kept: dict[int, dict[int, dict[str, np.ndarray]]] = {}
        for name, array in state.items():
            if name.startswith(KEPT):
                number, sampler, rest = name.removeprefix(KEPT).split(".", 2)
                kept.setdefault(int(number), {}).setdefault(int(sampler), {})[rest] = array
        batches = [[batch[sampler] for sampler in sorted(batch)] for _, batch in sorted(kept.items())]
        self._kept = [[_copied(arrays, self._obs) for arrays in batch] for batch in batches]


def _arrays(segment: Segment) -> dict[str, np.ndarray]:
    """Return the arrays of a segment by name; observations leaf by leaf."""
    columns = ((name, getattr(segment, name)) for name in Segment.__slots__)
    parts = (part for name, column in columns if column is not None for part in walk(column, name=name))
    return {name: np.ascontiguousarray(leaf) for name, leaf, is_leaf in parts if is_leaf}


def _copied(arrays: Mapping[str, np.ndarray], obs: np.dtype[Any]) -> Segment:
    """Return the segment of copies of these arrays, whose observations have dtype `obs`."""
    columns = {name: array.copy() for name, array in arrays.items() if name in Segment.__slots__}
    for name, axes in OBSERVATIONS.items():
        names = [leaf for leaf, _, is_leaf in walk(obs, name=name) if is_leaf]
        columns[name] = np.empty(arrays[names[0]].shape[:axes], obs)
        for leaf, to in zip(names, leaves(columns[name]).values(), strict=True):
            to[...] = arrays[leaf]
    return Segment(**columns)
