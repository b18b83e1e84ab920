"""Builds a sampler or a trainer from settings, in whatever process it is needed.

A `SamplerPlan` is all that an actor gets: plain data, so that an actor imports neither pydantic nor torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dppo import streams
from dppo.envs.group import EnvGroup, user_traceback
from dppo.envs.make import describe_spaces, make_env
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.ppo.agent import PPOAgent
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.sampler import PPOSampler
from dppo.spaces import Spaces
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.config import Config
    from dppo.ppo.parallel import Parallel
    from dppo.ppo.trainer import PPOTrainer


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """What every sampler of a run is built from."""

    env_id: str | Callable[..., Any]
    env_name: str
    env_kwargs: dict[str, Any]
    envs_per_sampler: int
    num_steps: int
    gamma: float
    seed: int
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: str
    norm_obs: bool
    norm_reward: bool


def sampler_plan(config: Config) -> SamplerPlan:
    """What actors need to know of `config`."""
    return SamplerPlan(
        env_id=config.env_id,
        env_name=config.env_name,
        env_kwargs=config.env_kwargs,
        envs_per_sampler=config.envs_per_sampler,
        num_steps=config.num_steps,
        gamma=config.gamma,
        seed=config.seed,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        dtype=config.dtype,
        norm_obs=config.norm_obs,
        norm_reward=config.norm_reward,
    )


@dataclass(frozen=True, slots=True)
class BuiltSampler:
    """A sampler with what its host must know of it."""

    sampler: PPOSampler
    envs: EnvGroup
    spaces: Spaces


def build_sampler(plan: SamplerPlan, sampler_id: int) -> BuiltSampler:
    """Make the environments of a sampler, and the sampler.

    Raises:
        EnvironmentFault: the environment's constructor raised.
        ConfigError: its spaces cannot be learnt on.
    """
    owner = f"sampler {sampler_id} ({plan.env_name})"
    envs: list[Any] = []
    try:
        for _ in range(plan.envs_per_sampler):
            envs.append(_make_env(plan, f"{owner}, env {len(envs)}"))
        spaces = describe_spaces(envs[0])
        group = EnvGroup(
            envs, spaces, episode_seed=partial(streams.integer, plan.seed, Stream.EPISODES, sampler_id), owner=owner
        )
    except BaseException:
        for env in envs:
            env.close()
        raise
    sampler = PPOSampler(
        sampler_id,
        PPOAgent(model_spec(plan, spaces)),
        group,
        num_steps=plan.num_steps,
        gamma=plan.gamma,
        noise=partial(streams.generator, plan.seed, Stream.ACTIONS, sampler_id),
        track_obs=plan.norm_obs,
        track_returns=plan.norm_reward,
    )
    return BuiltSampler(sampler, group, spaces)


def _make_env(plan: SamplerPlan, owner: str) -> Any:
    try:
        return make_env(plan.env_id, plan.env_kwargs)
    except DppoError:
        raise
    except (Exception, SystemExit) as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        raise EnvironmentFault(
            f"{owner}: the environment's constructor raised {summary}", user_traceback(error)
        ) from None


def model_spec(plan: SamplerPlan | Config, spaces: Spaces) -> ModelSpec:
    """The model for these spaces."""
    return ModelSpec.of(spaces, plan.hidden_sizes, plan.activation, plan.dtype)


def build_trainer(config: Config, spaces: Spaces, parallel: Parallel | None = None) -> PPOTrainer:
    """The trainer of a run, or one rank of several; imports torch."""
    from dppo.ppo.trainer import PPOTrainer, TrainerOptions

    options = TrainerOptions(
        update_epochs=config.update_epochs,
        minibatches=config.minibatches_per_epoch,
        micro_batch_size=config.micro_batch_size,
        norm_adv=config.norm_adv,
        clip_coef=config.clip_coef,
        clip_vloss=config.clip_vloss,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef,
        max_grad_norm=config.max_grad_norm,
        target_kl=config.target_kl,
    )
    return PPOTrainer(
        model_spec(config, spaces),
        streams.integer(config.seed, Stream.WEIGHTS),
        options,
        device=_device(config.device),
        parallel=parallel,
    )


def _device(wanted: str) -> str:
    """Where to train; torch is asked only here, in the process that trains.

    Raises:
        ConfigError: there is no GPU to be seen.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={wanted}: torch {torch.__version__} sees no GPU in this process. Use --device cpu, or give "
            f"learners one with --num-learners 1 --learner-gpus 1."
        )
    return "cuda"
