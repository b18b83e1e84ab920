"""Wide exploration: in every fourth stretch of a sampler's segments, actions far from the policy's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import Episode
from dppo.ppo.networks.network import NetworkOutputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float

STRETCH_STEPS = 1024
"""Fewest steps of a stretch, which consists of whole segments."""
EVERY = 4  # one of EVERY stretches of a sampler is wide
LONGEST_WITHOUT = (EVERY - 1) * STRETCH_STEPS
"""Env steps of the longest episodes that may come between two wide stretches."""
LEAST_LOG_STD = 0.0  # log std before the tanh: nearly as wide as the bounds
HOLD_PROBABILITY = 0.2  # probability that a step begins to hold its noise
LONGEST_HOLD = 5  # log2 of the longest time for which noise is held, in steps


class WideExploration:
    """The segments in which a sampler explores widely.

    They depend on its number and their index alone, so that any process decides the same. Samplers take turns.
    """

    def __init__(self, sampler_id: int, num_steps: int, first_segment: int = 0) -> None:
        """Prepare for segments of `num_steps` steps; before `first_segment`, the policy does not act yet."""
        self._sampler_id = sampler_id
        self._num_steps = num_steps
        self._first_segment = first_segment

    def covers(self, index: int) -> bool:
        """Decide whether the sampler explores widely in the segment `index`."""
        stretch = index // math.ceil(STRETCH_STEPS / self._num_steps)
        is_turn = (stretch + self._sampler_id + 1) % EVERY == 0
        return is_turn and index >= self._first_segment

    def marked(self, episodes: Sequence[Episode], index: int) -> list[Episode]:
        """Return the episodes that ended in a segment, with `explored` set if some segment explored widely.

        `explored` is not set in episodes that are so long that all explore widely: no other returns would be known.
        """
        marked = []
        for episode in episodes:
            segments = episode.segments(index, self._num_steps)
            explored = episode.length <= LONGEST_WITHOUT and any(map(self.covers, segments))
            marked.append(replace(episode, explored=True) if explored else episode)
        return marked


def hold(
    noise: Float[np.ndarray, "steps envs size"], generator: np.random.Generator
) -> Float[np.ndarray, "steps envs size"]:
    """Return noise that keeps its value now and then, for 1, 2, 4, 8, 16 or 32 steps."""
    steps, num_envs = noise.shape[:2]
    begins = generator.random((steps, num_envs)) < HOLD_PROBABILITY
    lengths = 1 << generator.integers(0, LONGEST_HOLD + 1, (steps, num_envs))
    following = noise.copy()
    ends = np.zeros(num_envs, int)
    for step in range(steps):
        holds = step < ends
        following[step, holds] = following[step - 1, holds]
        starts = begins[step] & ~holds
        ends[starts] = step + lengths[step, starts]
    return following


def wide_agent(agent: PPOAgent, wide: Sequence[bool]) -> PPOAgent | WideAgent:
    """Return what acts for several samplers, of which those in `wide` explore widely."""
    return WideAgent(agent, np.array(wide)) if any(wide) else agent


class WideAgent:
    """Act as the policy does, with a standard deviation of at least 1 for some samplers.

    The head that it returns is that of the actions, so that their log-probabilities are true.
    """

    def __init__(self, agent: PPOAgent, wide: Bool[np.ndarray, " samplers"]) -> None:
        """Act for several samplers, of which those in `wide` explore widely; a single one has no axis of its own."""
        self._agent = agent
        least = np.where(wide, LEAST_LOG_STD, -np.inf).astype(agent.spec.dtype)
        self._least = least[0] if len(wide) == 1 else least.reshape(-1, 1, 1)

    def act(
        self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None = None
    ) -> tuple[np.ndarray, NetworkOutputs]:
        """Sample an action for each row of `obs`, as `PPOAgent.act`."""
        outputs = self._agent.outputs(obs, state)
        mean, log_std = np.split(outputs.head, 2, axis=-1)
        head = np.concatenate([mean, np.maximum(log_std, self._least)], axis=-1)
        return self._agent.distribution.sample(head, noise), outputs._replace(head=head)
