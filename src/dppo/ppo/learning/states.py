"""States of a network's memory along segments that another network has collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dppo.ppo.exchange.inputs import reader_of
from dppo.ppo.exchange.records import Segment
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import merged
from dppo.ppo.networks.choice import acting_network
from dppo.ppo.networks.network import NetworkSpec


class StatesAlongSegments:
    """Computes the states that a network with memory has in segments, step by step from their start.

    The segments hold the states of the network that was there while they were collected. For a network that has been
    trained on them in many epochs, those are wrong.
    """

    def __init__(
        self, spec: NetworkSpec, segments: Sequence[Segment], scale: ObsScale | None
    ) -> None:
        """Read the observations; `segments` are those of all samplers, of equal T, and begin with new episodes.

        `scale`: of the observations, as the network is trained on them.
        """
        self._spec = spec
        self._segments = segments
        self._network = acting_network(spec)
        self._reader = reader_of(spec.spaces.obs, np.dtype(spec.dtype))
        self._reader.load(scale)
        self._obs = merged(segments, "obs")
        self._done = merged(segments, "terminated") | merged(segments, "truncated")

    def by(self, weights: np.ndarray, sequence_length: int) -> list[Segment]:
        """Return the segments with the states of the network with these `weights`, for sequences of this length."""
        self._network.load(weights)
        shape = (*self._done.shape, self._spec.state_size)
        states_before = np.zeros(shape, self._spec.dtype)
        states_after = np.zeros_like(states_before)
        state = np.zeros(shape[1:], self._spec.dtype)
        for t, done in enumerate(self._done):
            states_before[t] = state
            states_after[t] = self._network.step(self._reader.read(self._obs[t]), state).state
            state = states_after[t].copy()
            state[done] = 0.0
        num_samplers = len(self._segments)
        at_starts = np.split(states_before[::sequence_length], num_samplers, axis=1)
        after_steps = np.split(states_after, num_samplers, axis=1)
        return [
            replace(segment, states=states, successor_states=following[segment.followed])
            for segment, states, following in zip(
                self._segments, at_starts, after_steps, strict=True
            )
        ]
