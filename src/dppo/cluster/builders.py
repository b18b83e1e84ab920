"""Build samplers and trainers from their plans, in any process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dppo import streams
from dppo.cluster.plans import SamplerPlan, TrainerPlan
from dppo.cluster.spaces import spaces_of
from dppo.config.parts import Network
from dppo.envs.checks.faults import constructor_fault
from dppo.envs.checks.first_segment import FirstSegment
from dppo.envs.group import EnvGroup
from dppo.envs.make import close_all, make_env
from dppo.envs.progress import Phase, ProgressRecord, place_of
from dppo.errors import ConfigError, DppoError
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.learning.rewards import reward_shaping
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import Spaces
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.ppo.learning.parallel import Parallel
    from dppo.ppo.learning.trainer import PPOTrainer


@dataclass(frozen=True, slots=True)
class BuiltSampler:
    """A sampler with its environments and their spaces."""

    sampler: PPOSampler
    envs: EnvGroup
    spaces: Spaces


def build_sampler(plan: SamplerPlan, sampler_id: int, progress: ProgressRecord | None = None) -> BuiltSampler:
    """Build a sampler and its environments.

    Args:
        progress: record of the activity of the environments.

    Raises:
        EnvironmentFault: the constructor of an environment raised.
        ConfigError: the spaces are not supported, or the user's network breaks its contract.
    """
    owner = f"sampler {sampler_id} ({plan.env.env_name})"
    progress = progress or ProgressRecord()
    envs: list[Any] = []
    try:
        for env in range(plan.sampling.envs_per_sampler):
            progress.enter(place_of(Phase.MAKE, sampler_id, env))
            envs.append(_make_env(plan, f"{owner}, env {env}"))
        spaces = spaces_of(plan, envs[0])
        group = EnvGroup(
            envs,
            spaces,
            episode_seed=partial(streams.integer, plan.seed, Stream.EPISODES, sampler_id),
            owner=owner,
            sampler_id=sampler_id,
            progress=progress,
            drop_bad_steps=plan.env.on_bad_step == "drop",
            first_segment=FirstSegment(
                spaces,
                owner,
                sampler_id=sampler_id,
                integers=plan.network.dtype == "float32",
                masks=plan.env.action_mask == "auto",
            ),
        )
    except BaseException:
        close_all(envs)
        raise
    return BuiltSampler(_make_sampler(plan, sampler_id, spaces, group), group, spaces)


def _make_sampler(plan: SamplerPlan, sampler_id: int, spaces: Spaces, group: EnvGroup) -> PPOSampler:
    return PPOSampler(
        sampler_id,
        PPOAgent(network_spec(plan.network, spaces), spaces.mask),
        group,
        num_steps=plan.sampling.num_steps,
        gamma=plan.ppo.gamma,
        noise=partial(streams.generator, plan.seed, Stream.ACTIONS, sampler_id),
        track_returns=plan.ppo.norm_reward,
        shape_rewards=reward_shaping(plan.ppo),
        keep_successors=plan.ppo.recompute_advantages,
        sequence_length=plan.sizes.sequence_length,
    )


def _make_env(plan: SamplerPlan, owner: str) -> Any:
    try:
        return make_env(plan.env.env_id, plan.env.env_kwargs)
    except (DppoError, *INTERRUPTIONS):
        raise
    except BaseException as error:
        raise constructor_fault(owner, error) from None


def network_spec(network: Network, spaces: Spaces) -> NetworkSpec:
    """Return the network for these spaces: the user's own, or the one that fits them."""
    return choose_network(network, spaces).spec


def build_trainer(plan: TrainerPlan, spaces: Spaces, parallel: Parallel | None = None) -> PPOTrainer:
    """Build the trainer of a run, or one of several ranks; imports torch."""
    from dppo.ppo.learning.model import PPOModel
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.precision import learn_in_bfloat16

    device = _device(plan.learners.device)
    model = PPOModel(
        network_spec(plan.network, spaces),
        streams.integer(plan.seed, Stream.WEIGHTS),
        device=device,
        zeros_like=None if parallel is None else parallel.zeros_like,
    )
    if plan.learners.precision == "bfloat16":
        learn_in_bfloat16(model.network, device)
    return PPOTrainer(
        model,
        plan.ppo,
        minibatches=plan.sizes.minibatches_per_epoch,
        micro_batch_size=plan.learners.micro_batch_size,
        parallel=parallel,
        sequence_length=plan.sizes.sequence_length,
    )


def _device(wanted: str) -> str:
    """Return the device to train on; called only in the process that trains.

    Raises:
        ConfigError: torch sees no GPU.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={wanted}: torch {torch.__version__} sees no GPU in this process. Use device=cpu, or give learners "
            f"a GPU with num_learners=1 and learner_gpus=1."
        )
    return "cuda"
