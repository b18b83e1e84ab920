"""Segments that the samplers of the doctor play, what two of them must have in common, and facts about them."""

import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dppo.config import Config
from dppo.envs.group import EnvGroup
from dppo.envs.rows.serial import SerialRows
from dppo.hosts.plans import SamplerPlan, sampler_plan
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import PolicySnapshot, Rebuild, Segment, SegmentReport, SegmentRequest
from dppo.process_state.borders import guarded_steps

WITH_SECOND = "comparing with a second instance"
"""The stage from which on there are two instances in the process."""
PLACES = "in a new instance", "after other episodes", "beside another instance"


def plan_of(config: Config, make: Callable[..., Any], samplers: int = 1, envs: int = 1, length: int = 1) -> SamplerPlan:
    """Return the plan of a run in these sizes, and with the environments that `make` makes."""
    # The name of an environment that can be called: code that makes one calls it, and messages show the name.
    stand_in = type("StandIn", (str,), {"__call__": lambda _, **env_kwargs: make(**env_kwargs)})(config.env_name)
    few: dict[str, Any] = {"num_samplers": samplers, "envs_per_sampler": envs, "standby_envs": 0, "env_threads": False}
    plan = sampler_plan(config)
    sampling, sizes = replace(plan.sampling, **few), replace(plan.sizes, sequence_length=length)
    return replace(plan, env=replace(plan.env, env_id=stand_in), sampling=sampling, sizes=sizes)


def segments(samplers: Sequence[PPOSampler], sizes: Iterable[int]) -> Iterator[tuple[SegmentReport, Segment]]:
    """Yield segments of these sizes of the first of some samplers that act side by side, with an empty policy."""
    spec = samplers[0].agent.spec
    policy = PolicySnapshot(0, np.zeros(spec.num_parameters, spec.dtype))
    for number, size in enumerate(sizes):
        for sampler in samplers:
            sampler.num_steps = size
        index = {0: 1, 1: 0}.get(number, number)  # the second one is checked as the first of a run is
        yield collect_together(samplers, [SegmentRequest(one.sampler_id, index, None) for one in samplers], policy)[0]


def guarded(made: Iterator[Any]) -> Iterator[Any]:
    """Yield what the iterator of a function that plays yields; process-wide state is taken back after each."""
    while True:
        with guarded_steps("a step or reset"):
            item = next(made, None)
        if item is None:
            return
        yield item


def restored(of: PPOSampler, to: PPOSampler) -> str | None:
    """Return how steps differ after the state of an environment was set in another one; None if it has none."""
    spec = of.agent.spec
    policy, to.num_steps = PolicySnapshot(0, np.zeros(spec.num_parameters, spec.dtype)), of.num_steps
    carry = of.collect(SegmentRequest(0, 1, None), policy)[0].carry
    if carry.states is None:
        return None
    assert isinstance(to.envs, EnvGroup)
    assert isinstance(to.envs.rows, SerialRows)  # others have no states
    to.envs.rows.set_states_at_once()
    both = ((of, None), (to, Rebuild(carry, ())))
    one, other = (steps_of(*sampler.collect(SegmentRequest(0, 2, rebuild), policy)) for sampler, rebuild in both)
    return next((f"it differs at step {n}" for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), "")


def steps_of(report: SegmentReport, segment: Segment) -> list[tuple[int, list[float], int, int]]:
    """Return of each step: a checksum of the observations, the rewards, a checksum of episodes at the end, and faults.

    The number of faults of the segment counts from its first row that is not valid; from the start if a reset failed.
    """
    faults, whole = [one.fault.phase for one in report.incidents if one.fault], segment.valid.all(1)
    since = 0 if {*faults} - {"step"} or whole.all() else int(whole.argmin())
    ends = [0] * (len(segment.rewards) - 1) + [zlib.crc32(report.carry.checksums.tobytes())]
    checksums = [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in segment.obs[-len(ends) :]]
    failed = [len(faults) * (at >= since) for at in range(len(ends))]
    return list(zip(checksums, segment.rewards.tolist(), ends, failed, strict=True))


def agreement(before: dict[str, Any], where: str, trace: Iterable[Any], again: Iterable[Any]) -> dict[str, Any]:
    """Return the facts `before`, and how steps differ `where` they were made again, up to a fault in one of the two."""
    pairs = enumerate(zip(map(tuple, trace), map(tuple, again), strict=False))
    number, fault = next(((n, bool(a[-1] or b[-1])) for n, (a, b) in pairs if a != b), (before["compared"], None))
    same = before["same"] | {where: f"it differs at step {number}" if fault is False else ""}
    unlike = before["unlike"] + [where] * bool(fault)
    return before | {"compared": min(number, before["compared"]), "same": same, "unlike": unlike}


def in_order(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of `agreement` with their places in the order in which they say most."""
    same = {where: facts["same"][where] for where in sorted(facts["same"], key=_rank)}
    return facts | {"same": same, "unlike": sorted(facts["unlike"], key=_rank)}


def _rank(where: str) -> int:
    return PLACES.index(where) if where in PLACES else len(PLACES)


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Return quantiles and a histogram of seconds, and their mean without the first, which often takes longer."""
    points = np.quantile(times, (0.5, 0.95, 0.99, 1)).tolist()
    bins, _ = np.histogram(times, np.geomspace(min(times), 1.001 * max(times), 17))
    facts = {"count": len(times), "mean": float(np.mean(times[1:] or times)), "bins": bins.tolist()}
    return facts | dict(zip(("median", "p95", "p99", "worst"), points, strict=True))


def global_state() -> dict[str, Any]:
    """Return state of the whole process that an environment might change, by name, besides that of `process_state`."""
    _, numbers, place, *_ = np.random.get_state()
    found = {
        "NumPy's global generator": (np.asarray(numbers).tobytes(), place),
        "the global generator of random": random.getstate(),
        "a timer of the process": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }
    if torch := sys.modules.get("torch"):
        found["torch's threads"] = torch.get_num_threads()
        found["torch's global generator"] = torch.get_rng_state().numpy().tobytes()
    return found
