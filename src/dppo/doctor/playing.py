"""Segments that the samplers of the doctor play, and what two of them must have in common."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import PolicySnapshot, Rebuild, Segment, SegmentReport, SegmentRequest


def segments(samplers: Sequence[PPOSampler], sizes: Iterable[int]) -> Iterator[tuple[SegmentReport, Segment]]:
    """Yield segments of these sizes of the first of some samplers that act side by side, with an empty policy."""
    spec = samplers[0].agent.spec
    policy = PolicySnapshot(0, np.zeros(spec.num_parameters, spec.dtype))
    for number, size in enumerate(sizes):
        for sampler in samplers:
            sampler.num_steps = size
        index = {0: 1, 1: 0}.get(number, number)  # the second one is checked as the first of a run is
        yield collect_together(samplers, [SegmentRequest(one.sampler_id, index, None) for one in samplers], policy)[0]


def restored(of: PPOSampler, to: PPOSampler) -> str | None:
    """Return how steps differ after the state of an environment was set in another one; None if it has none."""
    spec = of.agent.spec
    policy, to.num_steps = PolicySnapshot(0, np.zeros(spec.num_parameters, spec.dtype)), of.num_steps
    carry = of.collect(SegmentRequest(0, 1, None), policy)[0].carry
    if carry.states is None:
        return None
    both = ((of, None), (to, Rebuild(carry, ())))
    one, other = (steps_of(*sampler.collect(SegmentRequest(0, 2, rebuild), policy)) for sampler, rebuild in both)
    return next((f"it differs at step {n}" for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), "")


def steps_of(report: SegmentReport, segment: Segment) -> list[tuple[int, float, int]]:
    """Return a checksum of each observation, the rewards, and the checksum of the episode at the last step."""
    ends = [0] * (len(segment.rewards) - 1) + [int(report.carry.checksums[0])]
    checksums = [zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in segment.obs[-len(ends) :]]
    return list(zip(checksums, segment.rewards[:, 0].tolist(), ends, strict=True))
