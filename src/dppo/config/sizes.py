"""Sizes of a run that follow from its settings."""

import math
from dataclasses import dataclass

from dppo.config.parts import PPO, Learners, Network, Run, Sampling

DEFAULT_SEQUENCE = 16  # steps of a sequence, where num_steps is a multiple of it
DEFAULT_MINIBATCH = 64  # rows
PRIOR_SHARE = 0.1  # share of the env steps that a controller collects at the start
MAX_PRIOR_STEPS = 20_000  # unless more are asked for
PRIOR_NOISE = 0.1  # share of half the distance between the bounds of an action
SMALL_PRIOR_NOISE = 0.03  # where the learning rate adapts to the change of the policy
CLONE_KL = 0.01  # nats, of an SGD step after a clone
MAX_MINIBATCHES = 32  # minibatches of an epoch: with more, a policy moves too far for one batch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run that follow from its settings."""

    iterations: int
    """The last iteration may exceed `total_timesteps` by less than one batch."""
    sequence_length: int
    """L, the steps of the sequences that minibatches consist of; 1 without memory."""
    minibatches_per_epoch: int
    """Minibatches that leave no row out, and differ by at most one sequence."""
    minibatch_rows: int
    """Rows of the largest minibatch."""
    prior_iterations: int = 0
    """Iterations that a controller collects before the policy is cloned; with a policy lag of K, it collects K more."""
    prior_noise: float = PRIOR_NOISE
    """Deviation of the noise around that controller's actions, a share of half the distance between the bounds."""
    clone_kl: float = 0.0
    """`desired_kl`, or its default after a clone with continuous actions; 0 if the learning rate cannot adapt."""


def sizes_of(sampling: Sampling, ppo: PPO, network: Network, learners: Learners, run: Run) -> Sizes:
    length = _sequence_length(network, sampling.num_steps)
    sequences = max(1, sampling.batch_size // length)
    rows = ppo.minibatch_size or max(DEFAULT_MINIBATCH, sampling.batch_size // MAX_MINIBATCHES)
    minibatches = math.ceil(sequences / max(1, rows // length))
    if ppo.minibatch_size is None and learners.num_learners > 1:  # they share each minibatch evenly
        share = max(1, sequences // learners.num_learners)
        minibatches = max(count for count in range(1, minibatches + 1) if share % count == 0)
    minibatch_rows = math.ceil(sequences / minibatches) * length
    if ppo.algo == "sac":  # draws rows of all iterations
        minibatch_rows = rows
    clone_kl = _clone_kl(ppo, minibatches)
    adapts = clone_kl > 0 or (ppo.algo == "ppo" and ppo.reuse > 1)
    noise = SMALL_PRIOR_NOISE if adapts else PRIOR_NOISE
    return Sizes(
        iterations=math.ceil(run.total_timesteps / sampling.batch_size),
        sequence_length=length,
        minibatches_per_epoch=minibatches,
        minibatch_rows=minibatch_rows,
        prior_iterations=_prior_iterations(sampling, run),
        prior_noise=sampling.prior_noise or noise,
        clone_kl=clone_kl,
    )


def _clone_kl(ppo: PPO, minibatches_per_epoch: int) -> float:
    has_one_step = ppo.update_epochs == 1 and minibatches_per_epoch == 1
    if ppo.algo == "sac" or ppo.anneal_lr or ppo.reuse > 1 or has_one_step:
        return 0.0
    return CLONE_KL if ppo.desired_kl is None else ppo.desired_kl


def _prior_iterations(sampling: Sampling, run: Run) -> int:
    if sampling.prior is None:
        return 0
    default = min(PRIOR_SHARE * run.total_timesteps, MAX_PRIOR_STEPS)
    return math.ceil((sampling.prior_steps or default) / sampling.batch_size)


def _sequence_length(network: Network, num_steps: int) -> int:
    if network.model is not None:
        return network.sequence_length or 1
    if network.memory == "none":
        return 1
    if network.sequence_length is not None:
        return network.sequence_length
    return max(steps for steps in range(1, DEFAULT_SEQUENCE + 1) if num_steps % steps == 0)
