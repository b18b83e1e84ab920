"""What crosses a border between the parts of a run. All frozen, and the arrays in them not writeable.

T steps, E environments of one sampler, B rows of a batch, *O and *A the shapes of one observation and action.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.normalizer import ObsScale, Statistics
from dppo.ppo.readonly import ReadOnly

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt32


@dataclass(frozen=True, slots=True)
class PolicySnapshot(ReadOnly):
    """What a sampler needs to act: it rides with every request, so an actor has no weights to lose."""

    version: int
    """Number of updates behind these weights."""
    weights: Float[np.ndarray, " P"]
    """All parameters of the network, flat, in the order of `NetworkSpec.shapes`."""
    obs_scale: ObsScale | None = None
    """Scale of the observation normaliser, None where it is off."""


@dataclass(frozen=True, slots=True)
class Segment(ReadOnly):
    """T steps of the E environments of one sampler under one policy version: the arrays.

    Row t of `obs` and `values` belongs to the state before action t; row t of the others to what follows it.
    Observations and rewards are raw: normalisation happens where they are used.
    """

    obs: Shaped[np.ndarray, "T E *O"]
    """Of a Dict or a Tuple space [T, E] of a structured dtype."""
    actions: Shaped[np.ndarray, "T E *A"]
    """As the policy drew them, before any clipping to the action space."""
    logprobs: Float[np.ndarray, "T E"]
    """Log-probability of `actions` under the policy that drew them."""
    values: Float[np.ndarray, "T E"]
    next_values: Float[np.ndarray, "T E"]
    """Value of the true successor of step t: inside an episode the next state, at a time limit the
    final observation, at the segment's end the state after its last step. Unused where terminated."""
    rewards: Float64[np.ndarray, "T E"]
    terminated: Bool[np.ndarray, "T E"]
    """The episode reached an end of its own."""
    truncated: Bool[np.ndarray, "T E"]
    """The episode was cut, by a time limit say."""
    valid: Bool[np.ndarray, "T E"]
    """False where a row is no real transition and must be left out of the batch."""
    successors: Shaped[np.ndarray, " n *O"] | None = None
    """The observations that the rows of `followed` led to; None where their values are not needed again."""

    @property
    def followed(self) -> Bool[np.ndarray, "T E"]:
        """The rows whose successor is no row of a batch: of the last step, at a time limit, before an invalid row."""
        followed: np.ndarray = self.truncated & ~self.terminated
        followed[:-1] |= ~self.valid[1:]
        followed[-1] = True
        return followed


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


class IncidentKind(str, Enum):
    """Names the kinds of incidents, as they are counted in metrics and shown at the end of a run."""

    ACTOR_LOST = "actor_lost"
    ACTOR_HUNG = "actor_hung"
    SAMPLERS_MOVED = "samplers_moved"
    REPLAY_MISMATCH = "replay_mismatch"
    EPISODE_ABANDONED = "episode_abandoned"
    BAD_STEP = "bad_step"
    OUTSIDE_SPACE = "outside_space"
    PRECISION_LOST = "precision_lost"
    LEARNERS_REBUILT = "learners_rebuilt"
    SEGMENTS_LOST = "segments_lost"
    CHECKPOINT_FAILED = "checkpoint_failed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong and was dealt with; counted under its kind and shown at the end."""

    kind: IncidentKind
    message: str
    """The parts concerned, the event and its reason, in a sentence."""
    env: int | None = None
    """The environment's index within its sampler, where it is about one."""
    lost_steps: int = 0
    """Env steps of an open episode that were given up."""


@dataclass(frozen=True, slots=True)
class SamplerCarry(ReadOnly):
    """What a sampler takes from one segment into the next: enough, with the actions, to rebuild it anywhere."""

    episodes: Int64[np.ndarray, " E"]
    """Index of the open episode of each environment."""
    episode_returns: Float64[np.ndarray, " E"]
    """Return of the open episode so far."""
    episode_lengths: Int64[np.ndarray, " E"]
    """Its env steps so far."""
    discounted_returns: Float64[np.ndarray, " E"]
    """Running discounted return, for the reward normaliser."""
    checksums: UInt32[np.ndarray, " E"]
    """Of the observation that the next segment starts from: does a replay end in the same state?"""


@dataclass(frozen=True, slots=True)
class Rebuild(ReadOnly):
    """How to bring a lost sampler back: reset with the episode's seed, then these actions."""

    carry: SamplerCarry
    actions: tuple[Shaped[np.ndarray, " _ *A"], ...]
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
    """Where the time of an actor's answer went, in seconds."""

    total_s: float = 0.0
    env_s: float = 0.0
    """Inside the environments' step and reset."""
    replayed_steps: int = 0
    """Env steps that were played again, to rebuild samplers."""
    replay_s: float = 0.0
    """Of `env_s`, spent on that."""

    def __add__(self, other: Timings) -> Timings:
        return Timings(
            total_s=self.total_s + other.total_s,
            env_s=self.env_s + other.env_s,
            replayed_steps=self.replayed_steps + other.replayed_steps,
            replay_s=self.replay_s + other.replay_s,
        )


@dataclass(frozen=True, slots=True)
class SegmentReport(ReadOnly):
    """The small part of a segment, which always comes to the learner, even where the arrays do not."""

    sampler_id: int
    index: int
    policy_version: int
    steps: int
    """T * E"""
    carry: SamplerCarry
    open_actions: tuple[Shaped[np.ndarray, " _ *A"], ...]
    """E arrays [n, *A]: the actions of this segment since the last reset of each environment."""
    episodes: tuple[Episode, ...] = ()
    """Finished in this segment, in the order of their ends."""
    statistics: Statistics = field(default_factory=Statistics)
    """Moments of the raw observations and of the running discounted returns in this segment."""
    incidents: tuple[Incident, ...] = ()
    env_s: float = 0.0
    """Seconds inside the environments' step and reset."""


@dataclass(slots=True)
class EnvLog:
    """Episodes finished and time spent in the environments during one segment; unlike the rest, it is written to."""

    episodes: list[Episode] = field(default_factory=list)
    """In the order of their ends."""
    incidents: list[Incident] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Environments whose last step was invalid: it is not a transition, and its episode was dropped."""
    seconds: float = 0.0
