"""Speedup of several learners over one learner."""

from typing import NamedTuple

from dppo.hosts.plans import TrainerPlan
from dppo.ppo.networks.network import NetworkSpec

PAYS_OFF_BELOW = 0.95  # share of the time of one learner


class Speedup(NamedTuple):
    """Milliseconds of the gradient of one minibatch."""

    alone_ms: float
    """On one learner alone."""
    shared_ms: float
    """On all learners, including the sum of their gradients."""
    summing_ms: float
    """Milliseconds of that sum."""


def describe_speedup(plan: TrainerPlan, spec: NetworkSpec, speedup: Speedup) -> str:
    """Return the measured times in a sentence, and whether several learners are faster than one."""
    facts = (
        f"{plan.learners.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a "
        f"minibatch of {plan.sizes.minibatch_rows:,} rows takes {speedup.shared_ms:.1f} ms, {speedup.summing_ms:.1f} "
        f"ms of it for the sum; one learner takes {speedup.alone_ms:.1f} ms"
    )
    if speedup.shared_ms < PAYS_OFF_BELOW * speedup.alone_ms:
        return f"{facts}. They are {speedup.alone_ms / speedup.shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay off here; num_learners=0 is faster."
