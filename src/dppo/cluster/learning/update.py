"""One PPO update from raw segments, shared by the trainer in this process and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dppo import streams
from dppo.cluster.plans import TrainerPlan
from dppo.config.parts import annealed
from dppo.ppo.exchange.normalizer import ObsScale
from dppo.ppo.exchange.records import Segment, Update
from dppo.ppo.learning.rewards import reward_shaping
from dppo.ppo.networks.torch_state import exact_on
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.ppo.learning.trainer import PPOTrainer


def train_on(
    trainer: PPOTrainer,
    plan: TrainerPlan,
    segments: Sequence[Segment],
    obs_scale: ObsScale | None,
    reward_scale: float | None,
    iteration: int,
    *,
    rank: int = 0,
    lagged: bool = False,
) -> Update:
    """Make a batch of `segments` and train on it.

    Args:
        segments: the segments of this rank, in sampler order.
        obs_scale: the scale with which they were collected.
        reward_scale: divisor of rewards; None if they are not normalised.
        lagged: the policy that collected is older than the one to update.
    """
    from dppo.ppo.learning.batch import make_batch

    batch = make_batch(
        segments,
        obs_scale,
        reward_scale,
        gamma=plan.ppo.gamma,
        gae_lambda=plan.ppo.gae_lambda,
        sequence_length=plan.sizes.sequence_length,
        shape_rewards=reward_shaping(plan.ppo),
    )
    # One learner draws the same numbers as training in the driver.
    index = (iteration,) if plan.learners.num_learners <= 1 else (iteration, rank)
    order = streams.generator(plan.seed, Stream.MINIBATCHES, *index)
    share = iteration / plan.sizes.iterations
    with exact_on(plan.learners.learner_threads):  # per thread, and Ray chooses the thread
        return trainer.update(batch, annealed(plan.ppo, share).learning_rate, order, share, lagged=lagged)
