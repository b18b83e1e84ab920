"""Build samplers and trainers from settings, in any process.

Plans are plain data, made of parts of the settings, so that an actor imports neither pydantic nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dppo import streams
from dppo.config.parts import PPO, Env, Learners, Network, Run, Sampling
from dppo.envs.checks.faults import constructor_fault
from dppo.envs.group import EnvGroup
from dppo.envs.make import close_all, make_env
from dppo.envs.progress import Phase, ProgressRecord, place_of
from dppo.envs.spaces.observation_spaces import describe_spaces
from dppo.errors import ConfigError, DppoError
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.exchange.inputs import normalized_shape
from dppo.ppo.learning.rewards import reward_shaping
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MOST_WHOLE, Spaces
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.config import Config
    from dppo.ppo.learning.parallel import Parallel
    from dppo.ppo.learning.trainer import PPOTrainer


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Settings from which a sampler is built."""

    env: Env
    sampling: Sampling
    ppo: PPO
    network: Network
    seed: int


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings from which a trainer or rank is built; without the environment, whose module it need not import."""

    sampling: Sampling
    ppo: PPO
    network: Network
    learners: Learners
    run: Run

    @property
    def minibatches_per_epoch(self) -> int:
        """Return the number of minibatches in an epoch."""
        return self.ppo.minibatches_of(self.sampling.batch_size, self.sequence_steps)

    @property
    def minibatch_rows(self) -> int:
        """Return the rows of the largest minibatch."""
        sequences = self.sampling.batch_size // self.sequence_steps
        return math.ceil(sequences / self.minibatches_per_epoch) * self.sequence_steps

    @property
    def sequence_steps(self) -> int:
        """Return L, the steps of the sequences that minibatches consist of; 1 without memory."""
        return self.network.sequence_steps(self.sampling.num_steps)

    def learning_rate_at(self, iteration: int) -> float:
        """Return Adam's step size in iteration 0, 1, ..."""
        return self.ppo.after(self.share_before(iteration)).learning_rate

    def share_before(self, iteration: int) -> float:
        """Return the share of the run that is done when an iteration begins, 0 <= share < 1."""
        return iteration / self.run.iterations_of(self.sampling.batch_size)


def sampler_plan(config: Config) -> SamplerPlan:
    """Return the parts of `config` that samplers are built from."""
    return SamplerPlan(config.env, config.sampling, config.ppo, config.network, config.seed)


def trainer_plan(config: Config) -> TrainerPlan:
    """Return the parts of `config` that trainers are built from."""
    return TrainerPlan(config.sampling, config.ppo, config.network, config.learners, config.run)


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
        spaces = _spaces(plan, envs[0])
        group = EnvGroup(
            envs,
            spaces,
            episode_seed=partial(streams.integer, plan.seed, Stream.EPISODES, sampler_id),
            owner=owner,
            sampler_id=sampler_id,
            progress=progress,
            drop_bad_steps=plan.env.on_bad_step == "drop",
            report_masks=plan.env.action_mask == "auto",
            watch_integers=plan.network.dtype == "float32",
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
        sequence_length=plan.network.sequence_steps(plan.sampling.num_steps),
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


def _spaces(plan: SamplerPlan, env: Any) -> Spaces:
    """Return the spaces of `env`.

    Raises:
        ConfigError: they cannot be learnt on, or `norm_obs` finds only images and categories.
    """
    of = plan.env
    spaces = describe_spaces(
        env,
        drop_obs=of.drop_obs,
        norm_obs_keys=plan.ppo.norm_obs_keys,
        action_bounds=of.action_bounds,
        action_mask=of.action_mask,
        obs_dtype=of.obs_dtype,
    )
    if of.obs_dtype == "float64" and not spaces.has_float64:
        raise ConfigError(
            "obs_dtype=float64 has no effect: the observation space contains neither float64 numbers nor a Box of "
            "integers beyond 2**24. Declare float64 in the environment if its numbers need that, or leave obs_dtype "
            "out."
        )
    read = spaces.of_network()
    alone = read.obs.names is None and read.categories
    if plan.ppo.norm_obs and (alone or normalized_shape(read.obs, spaces.normalized) == (0,)):
        raise ConfigError(
            "norm_obs=True has no effect: only floating-point numbers are normalised, and the observation holds images "
            "or categories. Use norm_obs=False."
        )
    _check_float64(plan, read)
    if plan.network.dtype == "float32":
        _check_categories(read)
    return spaces


def _check_categories(read: Spaces) -> None:
    """Refuse categories whose numbers a network of float32 would read as one another."""
    for name, found in read.categories.items():
        for count, start in zip(found.counts, found.starts, strict=True):
            if max(-start, start + count - 1) > MOST_WHOLE:
                raise ConfigError(
                    f"observation_space{f', leaf {name!r}' if name else ''}: has categories from {start} to "
                    f"{start + count - 1}, and the network reads them as float32, which cannot tell integers beyond "
                    f"2**24 apart. Subtract the start in the environment (gymnasium.wrappers.TransformObservation), or "
                    f"use dtype=float64."
                )


def _check_float64(plan: SamplerPlan, read: Spaces) -> None:
    """Refuse leaves that are kept in float64 and then reach a network of float32 without being normalised first."""
    if read.normalized is None or plan.network.dtype == "float64":
        return
    rounded = [name for name, leaf in read.leaves().items() if leaf.base == "f8" and name not in read.normalized]
    if rounded:
        raise ConfigError(
            f"norm_obs_keys={' '.join(plan.ppo.norm_obs_keys)}: leaves out {rounded[0]}, whose float64 numbers the "
            f"network would read as float32. Add {rounded[0]}, or use obs_dtype=float32."
        )


def build_trainer(plan: TrainerPlan, spaces: Spaces, parallel: Parallel | None = None) -> PPOTrainer:
    """Build the trainer of a run, or one of several ranks; imports torch."""
    from dppo.ppo.learning.model import PPOModel
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.precision import learn_in_bfloat16

    device = _device(plan.learners.device)
    model = PPOModel(
        network_spec(plan.network, spaces),
        streams.integer(plan.run.seed, Stream.WEIGHTS),
        device=device,
        zeros_like=None if parallel is None else parallel.zeros_like,
    )
    if plan.learners.precision == "bfloat16":
        learn_in_bfloat16(model.network, device)
    return PPOTrainer(
        model,
        plan.ppo,
        minibatches=plan.minibatches_per_epoch,
        micro_batch_size=plan.learners.micro_batch_size,
        parallel=parallel,
        sequence_length=plan.sequence_steps,
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
