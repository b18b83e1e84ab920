"""Segments that the samplers of the doctor play, and facts about them."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from dppo.config import Config
from dppo.envs.group import EnvGroup
from dppo.envs.sharing import end_use
from dppo.hosts.plans import SamplerPlan, sampler_plan
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import (
    Episode,
    Incident,
    PolicySnapshot,
    Rebuild,
    Segment,
    SegmentReport,
    SegmentRequest,
)
from dppo.process_state.borders import guarded_steps
from dppo.slots.layout import PLAIN
from dppo.spaces.spaces import Spaces, leaves
from dppo.tools.doctor.speed import Facts

WITH_SECOND = "comparing with a second instance"
"""The stage from which on there are two instances in the process."""
FIRST_SIZES = (2, 16)
"""Steps of the first two segments, of which a fingerprint of the simulator is taken."""
FIRST_SHARE = 0.8  # share of the time for the first process; the second one repeats its episodes
QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "worst": 1.0}
HISTOGRAM_BINS = 16
MIN_GROWTH_MB = 2.0  # smaller growth is not reported as a leak


class StepFacts(NamedTuple):
    """Facts of a step that its repetition must have, too."""

    obs_checksum: int
    rewards: list[float]
    """Rewards of each environment."""
    episodes_checksum: int
    """Checksum of the open episodes at the last step of a segment; 0 at other steps."""
    faults: int
    """Faults of the segment, from its first row on that is not valid; from the start if a reset failed."""


@dataclass
class Played:
    """The steps and events of an environment while an untrained policy played."""

    trace: list[StepFacts] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Steps of each segment."""
    episodes: list[Episode] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    observed: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    """Kind, lowest and highest value of each part of the observation."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the valid steps of all environments."""
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Measurements: the number of env steps so far, and the MB of memory in use."""

    def add(self, report: SegmentReport, segment: Segment, spaces: Spaces) -> None:
        """Add a segment and its report."""
        self.sizes.append(len(segment.rewards))
        self.trace += steps_of(report, segment)
        self.rewards += segment.rewards[segment.valid].tolist()
        self.episodes += report.episodes
        self.incidents += report.incidents
        for name, leaf in leaves(segment.obs).items():
            kind: str = leaf.dtype.kind
            if name in spaces.categories:
                kind = "category"
            _, low, high = self.observed.get(name, (kind, np.inf, -np.inf))
            low = min(low, float(leaf.min()))
            high = max(high, float(leaf.max()))
            self.observed[name] = kind, low, high

    def growth_mb(self) -> float:
        return self.memory[-1][1] - self.memory[0][1]

    def leak_mb(self, examination_mb: float) -> float:
        """Return the growth of memory per 1,000 env steps in the second half of playing, without that of the start-up.

        Args:
            examination_mb: memory of the answers and segments that the examination itself keeps.
        """
        middle_step, middle_mb = self.memory[(len(self.memory) + 1) // 2]
        last_step, last_mb = self.memory[-1]
        growth_mb = last_mb - middle_mb
        if growth_mb <= MIN_GROWTH_MB + examination_mb:
            return 0.0
        return 1000 * growth_mb / (last_step - middle_step)


def plan_of(
    config: Config, make: Callable[..., Any], samplers: int = 1, envs: int = 1, length: int = 1
) -> SamplerPlan:
    """Return the plan of a run in these sizes, and with the environments that `make` makes."""

    def make_again(_: str, **env_kwargs: Any) -> Any:
        env = make(**env_kwargs)
        end_use(env)  # by an earlier plan
        return env

    # a text for messages that is also a factory of environments
    stand_in = type("StandIn", (str,), {"__call__": make_again})(config.env_name)
    plan = sampler_plan(config)
    sampling = replace(
        plan.sampling,
        num_samplers=samplers,
        envs_per_sampler=envs,
        standby_envs=0,
        env_threads=False,
    )
    sizes = replace(plan.sizes, sequence_length=length)
    env = replace(plan.env, env_id=stand_in)
    # `make` gives the environment its slots
    return replace(plan, env=env, sampling=sampling, sizes=sizes, layout=PLAIN)


def segments(
    samplers: Sequence[PPOSampler], sizes: Iterable[int]
) -> Iterator[tuple[SegmentReport, Segment]]:
    """Yield segments of these sizes of the first of some samplers that act side by side, with an empty policy."""
    policy = _empty_policy(samplers[0])
    for number, size in enumerate(sizes):
        for sampler in samplers:
            sampler.num_steps = size
        # the second segment has the index 0, so that it is checked as the first segment of a run
        index = {0: 1, 1: 0}.get(number, number)
        requests = [SegmentRequest(sampler.sampler_id, index, None) for sampler in samplers]
        yield collect_together(samplers, requests, policy)[0]


def _empty_policy(sampler: PPOSampler) -> PolicySnapshot:
    spec = sampler.agent.spec
    return PolicySnapshot(0, np.zeros(spec.num_parameters, spec.dtype))


def guard_each(steps: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of an iterator that plays; restore the state of the process after each of them."""
    while True:
        with guarded_steps("a step or reset"):
            item = next(steps, None)
        if item is None:
            return
        yield item


def difference_after_restoring(source: PPOSampler, target: PPOSampler) -> str | None:
    """Return how steps differ after the state of an environment was set in another one; None if it has none.

    Two segments of `source.num_steps` are played, and the second of them again.
    """
    assert isinstance(target.envs, EnvGroup)
    if not target.envs.sub_envs.set_states_at_once():
        return None
    policy = _empty_policy(source)
    target.num_steps = source.num_steps
    carry = source.collect(SegmentRequest(0, 1, None), policy)[0].carry
    if carry.states is None:
        return None
    steps = steps_of(*source.collect(SegmentRequest(0, 2, None), policy))
    rebuild = SegmentRequest(0, 2, Rebuild(carry, ()))
    repeated = steps_of(*target.collect(rebuild, policy))
    for number, (step, repeated_step) in enumerate(zip(steps, repeated, strict=True)):
        if step != repeated_step:
            return f"it differs at step {number}"
    return ""


def steps_of(report: SegmentReport, segment: Segment) -> list[StepFacts]:
    """Return the facts of each step of a segment that its repetition must have, too."""
    length = len(segment.rewards)
    phases = [incident.fault.phase for incident in report.incidents if incident.fault]
    valid_steps = segment.valid.all(1)
    only_steps_failed = set(phases) <= {"step"}
    first_fault = 0
    if only_steps_failed and not valid_steps.all():
        first_fault = int(valid_steps.argmin())
    observations = segment.obs[-length:]
    steps = [
        StepFacts(
            obs_checksum=zlib.crc32(obs.tobytes()),
            rewards=rewards.tolist(),
            episodes_checksum=0,
            faults=len(phases) if number >= first_fault else 0,
        )
        for number, (obs, rewards) in enumerate(zip(observations, segment.rewards, strict=True))
    ]
    episodes_checksum = zlib.crc32(report.carry.checksums.tobytes())
    steps[-1] = steps[-1]._replace(episodes_checksum=episodes_checksum)
    return steps


def fingerprint_of(trace: Sequence[Any]) -> str:
    """Return a hash of the first steps of a simulator, under actions that follow from the seed; "" if they are fewer.

    Args:
        trace: steps, as `StepFacts` or as a list of its fields, in segments of FIRST_SIZES.
    """
    first_steps = [list(step) for step in trace[: sum(FIRST_SIZES)]]
    if len(first_steps) < sum(FIRST_SIZES):
        return ""
    return hashlib.sha256(json.dumps(first_steps).encode()).hexdigest()[:16]


def spread(times: Sequence[float]) -> Facts:
    """Return quantiles and a histogram of seconds, and their mean without the first, which often takes longer."""
    quantiles = np.quantile(times, list(QUANTILES.values())).tolist()
    shortest = min(times)
    longest = 1.001 * max(times)
    edges = np.geomspace(shortest, longest, HISTOGRAM_BINS + 1)
    counts, _ = np.histogram(times, edges)
    facts = {
        "count": len(times),
        "mean": float(np.mean(times[1:] or times)),
        "bins": counts.tolist(),
    }
    return facts | dict(zip(QUANTILES, quantiles, strict=True))
