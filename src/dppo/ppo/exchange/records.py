"""Records that the parts of a run exchange. They are frozen, and their arrays are read-only.

T steps, E environments of one sampler, B rows of a batch, *O and *A the shapes of one observation and action.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dppo.errors import EnvFault
from dppo.ppo.exchange.scales import ObsScale, ReadOnly, Statistics, ValueScale

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8, UInt32


@dataclass(frozen=True, slots=True)
class PolicySnapshot(ReadOnly):
    """A policy to act with. Every request carries one, so that actors keep no weights that could be lost."""

    version: int
    """Number of updates applied so far."""
    weights: Float[np.ndarray, " P"]
    """All parameters of the network, flat, in the order of `NetworkSpec.shapes`."""
    obs_scale: ObsScale | None = None
    """Scale of the observation normalizer; None if it is off."""
    value_scale: ValueScale | None = None
    """Unit of the network's values; None: the unit of rewards."""
    # options of the resets of this segment: see `RunInfo.set_env`
    env_options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ControllerTurn:
    """Asks for episodes of the user's controller, as a `PolicySnapshot` asks for episodes of a policy."""

    first_step_only: bool = False
    """True to end the first episode after its first step, which shows that the controller can act."""


@dataclass(frozen=True, slots=True)
class Experience:
    """All that one update learns from."""

    segments: Sequence[Any]
    """In sampler order; references to them if ranks fetch them from the actors."""
    policy: PolicySnapshot
    """The policy that collected them."""
    reward_scale: float | None
    """Divisor of rewards; None if they are not normalized."""
    iteration: int
    """0, 1, ..."""
    next_obs_scale: ObsScale | None = None
    """Scale of observations for the policy after the update; given where a controller collected, to clone it."""

    @property
    def lagged(self) -> bool:
        """True if the policy that collected is older than the policy to update."""
        return self.policy.version < self.iteration


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an update, besides the new weights."""

    figures: dict[str, float]
    """Losses and diagnostics by name, for the metrics."""
    learning_rate: float
    """Learning rate of the last step of SGD."""
    value_scale: ValueScale | None
    """Unit of the new network's values; None: the unit of rewards."""
    incidents: tuple[Incident, ...] = ()
    """Incidents of the trainers since the update before, all of them resolved."""


class TrainerState(NamedTuple):
    """All that a trainer is between two updates."""

    weights: Float[np.ndarray, " P"]
    """Weights of the policy."""
    state: dict[str, np.ndarray]
    """Everything else that later updates depend on, such as the optimizer."""


@dataclass(frozen=True, slots=True)
class Segment(ReadOnly):
    """T steps of the E environments of one sampler under one policy version.

    Row t of `obs` and `values` belongs to the state before action t, row t of the others to its consequences.
    Observations and rewards are not normalized; the trainer does that.
    """

    obs: Shaped[np.ndarray, "rows E *frame"]
    """[T, E, *O]; for a Dict or Tuple space [T, E] of a structured dtype. Of stacks of K images, each frame once:
    [T + K - 1, E, *frame], see `frames_of`."""
    actions: Shaped[np.ndarray, "T E *A"]
    """Sampled from the policy, before any clipping to the action space."""
    logprobs: Float[np.ndarray, "T E"]
    """Log-probabilities of `actions` under that policy."""
    values: Float[np.ndarray, "T E"]
    """Zeros if the algorithm of the run needs none, as `next_values`."""
    next_values: Float[np.ndarray, "T E"]
    """Value of the true successor of step t: the next state within an episode, the final observation at a time limit,
    the state after the last step at the end of the segment. Unused where terminated."""
    rewards: Float64[np.ndarray, "T E"]
    terminated: Bool[np.ndarray, "T E"]
    """The episode ended in a terminal state."""
    truncated: Bool[np.ndarray, "T E"]
    """The episode was cut off, for example by a time limit."""
    valid: Bool[np.ndarray, "T E"]
    """False for a row that is not a transition and must not affect training."""
    successors: Shaped[np.ndarray, " n *O"] | None = None
    """The observations that the rows of `followed` led to; None if their values are not needed again."""
    masks: Bool[np.ndarray, "T E M"] | None = None
    """The choices that were allowed; None if all always are."""
    states: Float[np.ndarray, "K E S"] | None = None
    """States of the memory before the first step of each of K sequences; None without memory."""
    successor_states: Float[np.ndarray, " n S"] | None = None
    """States of the memory to which `successors` belong."""
    intended: Shaped[np.ndarray, "T E *A"] | None = None
    """Actions of the controller that collected, before noise was added; None where the policy collected."""

    @property
    def stack(self) -> int:
        """Return K, the frames of an observation that are stored once each; 1 where rows are whole observations."""
        return len(self.obs) - len(self.values) + 1

    @property
    def followed(self) -> Bool[np.ndarray, "T E"]:
        """The rows whose successor is not a row of the batch: last steps, time limits, rows before an invalid one."""
        followed: np.ndarray = self.truncated & ~self.terminated
        followed[:-1] |= ~self.valid[1:]
        followed[-1] = True
        return followed


class InfoSum(NamedTuple):
    """A number in the info of several env steps."""

    steps: int
    """Steps that have it."""
    total: float
    least: float
    largest: float
    last: float


class EpisodeInfo(NamedTuple):
    """A number in the info of the env steps of an episode."""

    total: float
    mean: float
    """Over the steps that have it."""
    last: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    env: int  # index within the sampler, 0 <= env < E
    index: int
    """Number of episodes that this environment had started before."""
    episode_return: float
    """Undiscounted sum of raw rewards."""
    length: int
    """Env steps."""
    success: bool | None
    """`info["is_success"]` of the last step; None if the environment does not report it."""
    end: int = field(default=0, compare=False)  # steps of its last segment up to its end
    # checksum of the last observation and the return, to verify a replay
    checksum: int = field(default=0, compare=False)
    # all finite numbers in `info` of the last step, by name
    info: dict[str, float] = field(default_factory=dict)
    # options of the reset: see `RunInfo.set_env`
    options: dict[str, Any] | None = field(default=None, compare=False)
    # numbers of an evaluation by the names of `info_keys`
    measured: dict[str, EpisodeInfo] = field(default_factory=dict)
    at_bounds: np.ndarray | None = field(default=None, compare=False)
    """[2, width]: steps in which each element of the action was at its lower, at its upper bound; of evaluations."""
    # whether wide exploration or a controller chose some of its actions, so that its return is not the policy's
    explored: bool = field(default=False, compare=False)
    # False: an episode of a sub-environment, which depends on the others
    is_single: bool = field(default=True, compare=False)

    def segments(self, last: int, num_steps: int) -> range:
        """Return the indices of the segments of `num_steps` steps that it was in; it ended in the `last`."""
        earlier = math.ceil((self.length - self.end) / num_steps)
        return range(last - max(0, earlier), last + 1)


def success_rate(episodes: Iterable[Episode]) -> float | None:
    """Return the share of successful episodes among those that report success; None if none does."""
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        return fmean(successes)
    return None


class IncidentKind(str, Enum):
    """Kinds of incidents, under the names used in metrics and in the summary of a run."""

    ACTOR_LOST = "actor_lost"
    ACTOR_HUNG = "actor_hung"
    ACTOR_RECYCLED = "actor_recycled"
    SAMPLERS_MOVED = "samplers_moved"
    REPLAY_MISMATCH = "replay_mismatch"
    EPISODE_ABANDONED = "episode_abandoned"
    BAD_STEP = "bad_step"
    ENV_RAISED = "env_raised"
    PROGRAM_RESTARTED = "program_restarted"
    OUTSIDE_SPACE = "outside_space"
    OWN_STATE = "own_state"
    PRECISION_LOST = "precision_lost"
    IMAGE_CONSTANT = "image_constant"
    LARGE_OBSERVATIONS = "large_observations"
    SMALL_OBSERVATIONS = "small_observations"
    GLOBAL_STATE = "global_state"
    MASK_NOT_USED = "mask_not_used"
    OTHER_CPU = "other_cpu"
    LEARNERS_REBUILT = "learners_rebuilt"
    SEGMENTS_LOST = "segments_lost"
    CHECKPOINT_FAILED = "checkpoint_failed"
    EVALUATION_FAULT = "evaluation_fault"
    RUN_FAILED = "run_failed"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of_fault(cls, fault: EnvFault | None) -> IncidentKind:
        """Return the kind of a fault of an environment, which raised or returned something invalid."""
        if fault is not None and fault.error == "invalid":
            return cls.BAD_STEP
        return cls.ENV_RAISED


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that was handled; counted under its kind and reported at the end of a run."""

    kind: IncidentKind
    message: str
    """A sentence with the parts concerned, the event and its reason."""
    env: int | None = None
    """Index of the environment within its sampler; None if it does not concern one environment."""
    lost_steps: int = 0
    """Env steps of an open episode that was abandoned."""
    details: str = field(default="", compare=False)
    """Many lines, such as the stacks of a process that was hung."""
    fault: EnvFault | None = field(default=None, compare=False)
    """The place of an environment's fault in the run; None for other incidents."""


@dataclass(frozen=True, slots=True)
class CollectionProgress:
    """Progress within an iteration, while its segments are being collected."""

    iteration: int
    """1, 2, ..."""
    steps: int
    """Env steps made for this iteration so far, over all samplers."""
    global_step: int
    """Env steps of the run so far, including these."""
    processes: int
    """Processes that are making env steps: actors, or 1 for this process."""
    elapsed_s: float
    """Seconds since the segments were requested."""
    starting: int = 0
    """Actors that have made no env step for this iteration yet, such as those that are being replaced."""
    environments: int = 0
    """Environments that these processes have made since they started, sub-environments and standbys included."""


@dataclass(frozen=True, slots=True)
class SamplerCarry(ReadOnly):
    """State of a sampler between two segments; with its actions, enough to rebuild it in any process."""

    episodes: Int64[np.ndarray, " E"]
    """Index of the open episode of each environment."""
    episode_returns: Float64[np.ndarray, " E"]
    """Sum of the rewards of the open episode so far."""
    episode_lengths: Int64[np.ndarray, " E"]
    """Length of the open episode so far, in env steps."""
    discounted_returns: Float64[np.ndarray, " E"]
    """Running discounted return, for the reward normalizer."""
    checksums: UInt32[np.ndarray, " E"]
    """Checksum of the observation that the next segment starts from, to verify a replay."""
    memory: Float[np.ndarray, "E S"] | None = None
    """State of the policy's memory; None without memory."""
    states: UInt8[np.ndarray, " bytes"] | None = None
    """The environments' own states, packed; None if these have none."""
    proofs: UInt8[np.ndarray, " proof_bytes"] | None = None
    """The states before the last segment, and its actions, by which `states` are proven."""
    options: UInt8[np.ndarray, " option_bytes"] | None = None
    """JSON: a list of the options with which open episodes were reset."""
    files: UInt8[np.ndarray, " name_bytes"] | None = None
    """Names of the files of `states` and `proofs`, a line each; None if these hold no paths."""


@dataclass(frozen=True, slots=True)
class Rebuild(ReadOnly):
    """Instructions for rebuilding a lost sampler: reset with the episode's seed, then replay these actions."""

    carry: SamplerCarry
    actions: tuple[Shaped[np.ndarray, " _ *A"], ...]
    """E arrays [n, *A]: the actions of each open episode since its reset. If empty, nothing is replayed: the `states`
    of the carry are set; if there are none either, new episodes start instead."""


class FatalStep(NamedTuple):
    """A step of an environment that no process has survived: each one hung in it, or ended."""

    env: int
    episode: int
    step: int
    """1, 2, ... within the episode; 0 for its reset."""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """Request for one segment of a sampler."""

    sampler_id: int
    index: int
    """0, 1, 2, ... within the run. With the sampler's id it determines the stream of exploration noise."""
    rebuild: Rebuild | None = None
    """If given, discard the sampler's state and rebuild it first."""
    fatal: tuple[FatalStep, ...] = ()
    """Steps that count as faults of their environments, and are not taken."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of an actor's answer, in seconds."""

    total_s: float = 0.0
    env_s: float = 0.0
    """Spent in the environments' constructors, step and reset."""
    replayed_steps: int = 0
    """Env steps replayed to rebuild samplers."""
    replay_s: float = 0.0
    """Part of `env_s` that was spent on replay."""
    memory: int = 0
    """Bytes of an actor with its children; of several the most."""

    def __add__(self, other: Timings) -> Timings:
        return Timings(
            total_s=self.total_s + other.total_s,
            env_s=self.env_s + other.env_s,
            replayed_steps=self.replayed_steps + other.replayed_steps,
            replay_s=self.replay_s + other.replay_s,
            memory=max(self.memory, other.memory),
        )


@dataclass(frozen=True, slots=True)
class SegmentReport(ReadOnly):
    """Report on a segment: the small part, which always goes to the learner, even if the arrays do not."""

    sampler_id: int
    index: int
    policy_version: int
    steps: int
    """Transitions in the segment: T * E if all rows are valid."""
    carry: SamplerCarry
    open_actions: tuple[Shaped[np.ndarray, " _ *A"], ...]
    """E arrays [n, *A]: the actions in this segment since the last reset of each environment."""
    episodes: tuple[Episode, ...] = ()
    """Episodes that ended in this segment, in order."""
    statistics: Statistics = field(default_factory=Statistics)
    """Moments of raw observations and of running discounted returns in this segment."""
    incidents: tuple[Incident, ...] = ()
    env_s: float = 0.0
    """Seconds spent in the environments' step and reset."""
    info: dict[str, InfoSum] = field(default_factory=dict)
    """Sums over all env steps, by the names of `info_keys`."""
    # actions of each of `episodes` in this segment
    ended_actions: tuple[Shaped[np.ndarray, " _ *A"], ...] = ()


StepRows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Rows [E, ...] of one step: the actions, and what the environments of a sampler write, which is the observations from
which the next actions follow, rewards, terminated, truncated, and `valid`, which is True before. A plain tuple, because
one is made for each step."""


class TimeLimit(NamedTuple):
    """The end of an episode that was truncated and did not terminate."""

    step: int
    env: int
    obs: np.ndarray
    """The final observation."""


@dataclass(slots=True)
class EnvLog:
    """Episodes finished and time spent in the environments during one segment. Unlike the others, it is mutable."""

    index: int = 0  # index of the segment
    actions: np.ndarray | None = None
    """[T, E, *A]: actions of this segment so far; None between segments."""
    options: dict[str, Any] | None = None  # options of the resets of this segment
    episodes: list[Episode] = field(default_factory=list)
    """Episodes in the order in which they ended."""
    incidents: list[Incident] = field(default_factory=list)
    time_limits: list[TimeLimit] = field(default_factory=list)
    """In the order of steps."""
    info: dict[str, InfoSum] = field(default_factory=dict)
    """As in `SegmentReport`."""
    seconds: float = 0.0
    step: int = 0
    """Steps of this segment that each environment has finished."""
