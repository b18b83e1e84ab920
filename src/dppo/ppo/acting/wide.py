"""Wide exploration: in every fourth stretch of a sampler's segments, actions far from the policy's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.noise import WhiteNoise
from dppo.ppo.acting.sampler import Act, Exploration, Rollout
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


class WideExploration(Exploration):
    """The segments in which samplers explore widely, in turns."""

    def __init__(self, num_steps: int, first_segment: int = 0) -> None:
        """Prepare for segments of `num_steps` steps; before `first_segment`, the policy does not act yet."""
        self._num_steps = num_steps
        self._first_segment = first_segment

    def covers(self, sampler_id: int, index: int) -> bool:
        """Decide whether a sampler explores widely in the segment `index`."""
        stretch = index // math.ceil(STRETCH_STEPS / self._num_steps)
        is_turn = (stretch + sampler_id + 1) % EVERY == 0
        return is_turn and index >= self._first_segment

    @override
    def act_in(self, rollout: Rollout) -> Act | None:
        flags = [self.covers(request.sampler_id, request.index) for request in rollout.requests]
        if any(flags):
            return WideAgent(rollout.agent, np.array(flags)).act
        return None

    @override
    def covers_episode(self, sampler_id: int, episode: Episode, segments: range) -> bool:
        """Return whether one of the `segments` of an episode explored widely.

        False for episodes so long that each of them has such a segment: no returns would be known without them.
        """
        is_wide = any(self.covers(sampler_id, index) for index in segments)
        return is_wide and episode.length <= LONGEST_WITHOUT

    def noise(self, sampler_id: int, white: WhiteNoise, index: int, steps: int) -> np.ndarray:
        """Return the noise of a segment, which is held now and then where the sampler explores widely."""
        generator = white.generators(index)
        noise = white.draw(generator, steps)
        if self.covers(sampler_id, index):
            return hold(noise, generator)
        return noise


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
