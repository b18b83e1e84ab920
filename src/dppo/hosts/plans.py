"""Plans: the settings from which samplers and trainers are built, in any process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dppo.config import Config
from dppo.config.parts import PPO, SAC, Env, Learners, Network, ResolvedPPO, Sampling
from dppo.config.sizes import Sizes
from dppo.slots.layout import PLAIN, Layout

if TYPE_CHECKING:
    from dppo.envs.state_files import StatePlace


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Settings from which a sampler is built: plain parts, so that an actor imports neither pydantic nor torch."""

    env: Env
    sampling: Sampling
    ppo: PPO
    network: Network
    sizes: Sizes
    seed: int
    layout: Layout = PLAIN
    # bytes and segments after which an actor is replaced
    recycling: tuple[float, float] = (math.inf, math.inf)
    state_place: StatePlace | None = None
    """Place of the files of environments' states; None: none are kept."""
    resumed_at: int | None = None
    """Iterations before this call; None: a new run, of which no constructor is known to work."""
    waits_s: Sequence[float] = ()
    """Waits before a constructor that is known to work, and raises, is called again in a process that starts."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings from which a trainer or rank is built; without the environment, whose module it need not import."""

    ppo: PPO
    """Resolved if it is the algorithm."""
    network: Network
    learners: Learners
    sizes: Sizes
    seed: int
    policy_lag: int = 0
    sac: SAC = field(default_factory=SAC)


def sampler_plan(config: Config) -> SamplerPlan:
    sampling = config.sampling
    if sampling.licences is not None:  # licences for evaluations are set aside
        sampling = replace(sampling, licences=sampling.licences - config.evaluators)
    parts = config.env, sampling, config.ppo, config.network, config.sizes, config.seed
    return SamplerPlan(*parts, config.layout, config.actors.recycling)


def trainer_plan(config: Config) -> TrainerPlan:
    """Return the settings from which a trainer is built; `config` must be resolved."""
    ppo = config.ppo if config.algo == "sac" else ResolvedPPO(**vars(config.ppo))
    return TrainerPlan(
        ppo,
        config.network,
        config.learners,
        config.sizes,
        config.seed,
        policy_lag=config.lag,
        sac=config.sac,
    )
