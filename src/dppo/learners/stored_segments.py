"""StoredSegments: the segments of earlier iterations, for runs with reuse."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dppo.learners.staged import RunStage
from dppo.learners.trainers import Trainers
from dppo.ppo.exchange.records import Experience, Segment
from dppo.ppo.learning.reuse import joined
from dppo.spaces.spaces import leaves

PREFIX = "kept."  # begins the names of stored arrays in the state
# columns, and the number of axes before an observation's
OBSERVATIONS = {"obs": 2, "successors": 1}


class StoredSegments(RunStage):
    """Lets each update train on the segments of the last R iterations; at first, on all that a controller collected.

    This process stores the older ones, and in each checkpoint, because only the policies that made them could make them
    again. So neither the loss of an actor, a rank or a node nor a resume changes what is trained on.
    """

    def __init__(self, reuse: int, obs: np.dtype[Any], prior_iterations: int = 0) -> None:
        """Begin without segments; `reuse` is R, `obs` the dtype of an observation in segments.

        `prior_iterations`: iterations in which a controller collects, including the policy lag.
        """
        self._reuse = reuse
        self._obs = obs
        self._prior_iterations = prior_iterations
        # of each iteration, the oldest first, in sampler order
        self._stored: list[list[Segment]] = []

    @contextmanager
    def around(self, experience: Experience, trainers: Trainers) -> Iterator[Experience]:
        """Yield the experience with the stored and the new segments of each sampler as one long segment."""
        if not self._stored and self._used_at(experience.iteration + 1) == 1:
            yield experience
            return
        # Views of Ray's store would fill it; and copies are equal to the byte, whatever padding the segments have.
        newest = [_segment(_arrays(segment), self._obs) for segment in experience.segments]
        iterations = [*self._stored, newest]
        yield replace(
            experience, segments=[joined(segments) for segments in zip(*iterations, strict=True)]
        )
        num_kept = self._used_at(experience.iteration + 1) - 1
        self._stored = iterations[max(0, len(iterations) - num_kept) :]

    def _used_at(self, iteration: int) -> int:
        """Return the number of iterations, up to this one, whose segments the update of this one trains on."""
        if iteration < self._prior_iterations:
            return iteration + 1
        return self._reuse

    def state(self) -> dict[str, np.ndarray]:
        return {
            f"{PREFIX}{number}.{sampler}.{name}": array
            for number, segments in enumerate(self._stored)
            for sampler, segment in enumerate(segments)
            for name, array in _arrays(segment).items()
        }

    def load(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restore the stored segments; another run's state has none. Return all other arrays."""
        # by number of the iteration and sampler
        arrays: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        remainder = {}
        for name, array in state.items():
            if name.startswith(PREFIX):
                number, sampler, column = name.removeprefix(PREFIX).split(".", 2)
                arrays.setdefault((int(number), int(sampler)), {})[column] = array
            else:
                remainder[name] = array
        stored: dict[int, list[Segment]] = {}
        for number_and_sampler in sorted(arrays):
            segment = _segment(arrays[number_and_sampler], self._obs)
            stored.setdefault(number_and_sampler[0], []).append(segment)
        self._stored = list(stored.values())
        return remainder


def _arrays(segment: Segment) -> dict[str, np.ndarray]:
    columns = {column: getattr(segment, column) for column in Segment.__slots__}
    return {
        name: np.ascontiguousarray(leaf)
        for column, value in columns.items()
        if value is not None
        for name, leaf in leaves(value, name=column).items()
    }


def _segment(arrays: Mapping[str, np.ndarray], obs: np.dtype[Any]) -> Segment:
    """Return the segment of copies of these arrays, whose observations have dtype `obs`."""
    columns = {name: array.copy() for name, array in arrays.items() if name in Segment.__slots__}
    for column, axes in OBSERVATIONS.items():
        first_leaf = next(iter(leaves(obs, name=column)))
        columns[column] = np.empty(arrays[first_leaf].shape[:axes], obs)
        for name, leaf in leaves(columns[column], name=column).items():
            leaf[...] = arrays[name]
    return Segment(**columns)
