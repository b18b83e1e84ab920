"""Plans: the settings that samplers and trainers are built from, in any process.

They are plain data, made of parts of the settings, so that an actor imports neither pydantic nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dppo.config import Config
from dppo.config.parts import PPO, Env, Learners, Network, Sampling, Sizes


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Settings from which a sampler is built."""

    env: Env
    sampling: Sampling
    ppo: PPO
    network: Network
    sizes: Sizes
    seed: int


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings from which a trainer or rank is built; without the environment, whose module it need not import."""

    ppo: PPO
    network: Network
    learners: Learners
    sizes: Sizes
    seed: int


def sampler_plan(config: Config) -> SamplerPlan:
    """Return the parts of `config` that samplers are built from."""
    return SamplerPlan(config.env, config.sampling, config.ppo, config.network, config.sizes, config.seed)


def trainer_plan(config: Config) -> TrainerPlan:
    """Return the parts of `config` that trainers are built from."""
    return TrainerPlan(config.ppo, config.network, config.learners, config.sizes, config.seed)
