"""What crosses a border between the parts of a run. All frozen; arrays are never written after construction.

T steps, E environments of one sampler, B rows of a batch, *O and *A the shapes of one observation and action.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dppo.ppo.normalizer import Statistics


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """What a sampler needs to act: it rides with every request, so an actor has no weights to lose."""

    version: int
    """Number of updates behind these weights."""
    weights: np.ndarray
    """[P] all parameters of the model, flat, in the order of `ModelSpec.shapes`."""
    obs_mean: np.ndarray | None = None
    """[*O] statistics of the observation normaliser, None where it is off."""
    obs_std: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """T steps of the E environments of one sampler under one policy version: the arrays.

    Row t of `obs` and `values` belongs to the state before action t; row t of the others to what follows it.
    Observations and rewards are raw: normalisation happens where they are used.
    """

    obs: np.ndarray
    """[T, E, *O]"""
    actions: np.ndarray
    """[T, E, *A] as the policy drew them, before any clipping to the action space."""
    logprobs: np.ndarray
    """[T, E] log-probability of `actions` under the policy that drew them."""
    values: np.ndarray
    """[T, E]"""
    next_values: np.ndarray
    """[T, E] value of the true successor of step t: inside an episode the next state, at a time limit the
    final observation, at the segment's end the state after its last step. Unused where terminated."""
    rewards: np.ndarray
    """[T, E] float64"""
    terminated: np.ndarray
    """[T, E] bool: the episode reached an end of its own."""
    truncated: np.ndarray
    """[T, E] bool: the episode was cut, by a time limit say."""
    valid: np.ndarray
    """[T, E] bool: false where a row is no real transition and must be left out of the batch."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    env: int
    """Index within the sampler, 0 <= env < E."""
    index: int
    """How many episodes this environment had begun before this one."""
    episode_return: float
    """Undiscounted sum of raw rewards."""
    length: int
    """Env steps."""
    success: bool | None
    """`info["is_success"]` of the last step, None where the environment does not say."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong and was dealt with; counted under its kind and shown at the end."""

    kind: str
    """A short key: `replay_mismatch`, `episode_abandoned`, `actor_lost`, `actor_hung` ..."""
    message: str
    """Who, what and why, in a sentence."""
    env: int | None = None
    """The environment's index within its sampler, where it is about one."""
    lost_steps: int = 0
    """Env steps of an open episode that were given up."""


@dataclass(frozen=True, slots=True)
class SamplerCarry:
    """What a sampler takes from one segment into the next: enough, with the actions, to rebuild it anywhere."""

    episodes: np.ndarray
    """[E] int64: index of the open episode of each environment."""
    episode_returns: np.ndarray
    """[E] float64: return of the open episode so far."""
    episode_lengths: np.ndarray
    """[E] int64: its env steps so far."""
    discounted_returns: np.ndarray
    """[E] float64: running discounted return, for the reward normaliser."""
    checksums: np.ndarray
    """[E] uint32 of the observation that the next segment starts from: does a replay end in the same state?"""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How to bring a lost sampler back: reset with the episode's seed, then these actions."""

    carry: SamplerCarry
    actions: tuple[np.ndarray, ...]
    """E arrays [n, *A]: the actions since the reset of each open episode. Empty tuple: do not replay, begin
    fresh episodes."""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """Ask a sampler for one segment."""

    sampler_id: int
    index: int
    """0, 1, 2 ... within the run: with the sampler's id it names the stream of the action noise."""
    rebuild: Rebuild | None = None
    """Not None: forget what the sampler holds and rebuild it first."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one segment went, in seconds."""

    total_s: float = 0.0
    env_s: float = 0.0
    """Inside the environments' step and reset."""


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """The small part of a segment, which always comes to the learner, even where the arrays do not."""

    sampler_id: int
    index: int
    policy_version: int
    steps: int
    """T * E"""
    carry: SamplerCarry
    open_actions: tuple[np.ndarray, ...]
    """E arrays [n, *A]: the actions of this segment since the last reset of each environment."""
    episodes: tuple[Episode, ...] = ()
    """Finished in this segment, in the order of their ends."""
    statistics: Statistics = field(default_factory=Statistics)
    """Moments of the raw observations and of the running discounted returns in this segment."""
    incidents: tuple[Incident, ...] = ()
    timings: Timings = field(default_factory=Timings)
