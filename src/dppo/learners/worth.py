"""Whether several learners are faster than one, in words."""

from dppo.hosts.plans import TrainerPlan
from dppo.ppo.networks.network import NetworkSpec


def worth_in_words(plan: TrainerPlan, spec: NetworkSpec, alone_ms: float, shared_ms: float, summing_ms: float) -> str:
    """Describe the times of `RayTrainers.worth`, and say whether several learners are faster than one."""
    facts = f"{plan.learners.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a "
    facts += f"minibatch of {plan.sizes.minibatch_rows:,} rows takes {shared_ms:.1f} ms, {summing_ms:.1f} ms of it for "
    facts += f"the sum; one learner takes {alone_ms:.1f} ms"
    if shared_ms < 0.95 * alone_ms:
        return f"{facts}. They are {alone_ms / shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay off here; num_learners=0 is faster."
