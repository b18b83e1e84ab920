"""Build samplers from their plans, in any process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo import streams
from dppo.envs.activity import ActivityRecord
from dppo.envs.checks.first_segment import FirstSegment
from dppo.envs.closing import close_all
from dppo.envs.episode import GroupSettings, InfoMeter
from dppo.envs.group import EnvGroup
from dppo.envs.repairs import FIRST_STEPS, FaultPolicy
from dppo.envs.sub_envs.choice import make_all, sub_envs_of
from dppo.errors import EnvironmentFault
from dppo.hosts.environments import make_in_turn, spaces_of
from dppo.hosts.plans import SamplerPlan
from dppo.log import logger
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.noise import PinkNoise, WhiteNoise
from dppo.ppo.acting.sampler import Exploration, PPOSampler
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import Incident
from dppo.ppo.networks.choice import choose_network
from dppo.spaces.spaces import Spaces, is_image
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.envs.guidance import Guidance


@dataclass(slots=True)
class BuiltSampler:
    """A sampler with its environments and their spaces."""

    sampler: PPOSampler
    envs: EnvGroup
    spaces: Spaces
    instances: int = 1
    """Environments that were made; one that steps several sub-environments counts once."""
    next: int = 0  # index of its next segment, unless it is rebuilt


def build_sampler(
    plan: SamplerPlan,
    sampler_id: int,
    progress: ActivityRecord | None = None,
    *,
    works: bool = False,
) -> BuiltSampler:
    """Build a sampler and its environments, whose activity `progress` records.

    `works`: another environment of the run could be made, so that a constructor that raises is called again.

    Raise EnvironmentFault if a constructor raised, and ConfigError if spaces or the user's network are refused.
    """
    owner = f"sampler {sampler_id} ({plan.env.env_name})"
    if progress is None:
        progress = ActivityRecord()
    envs: list[Any] = []
    restarts: list[Incident] = []
    try:
        make = partial(make_in_turn, plan, sampler_id, progress, restarts)
        make_all(
            lambda env: make(env, plan.waits_s if envs or works else ()),
            plan.sampling.envs_per_sampler,
            plan.sampling.standby_envs,
            envs,
        )
        spaces = spaces_of(plan, envs[0])
        settings = GroupSettings(
            owner,
            spaces,
            episode_seed=partial(streams.integer, plan.seed, Stream.EPISODES, sampler_id),
            sampler_id=sampler_id,
            progress=progress,
            meter=InfoMeter(plan.env.info_keys) if plan.env.info_keys else None,
            limits=plan.env.on_env_fault == "rebuild",
            guidance=_guidance(plan),
            restarts=restarts,
        )
        sub_envs = sub_envs_of(envs, settings, make, plan.sampling.standby_envs)
        sub_envs.keep_states(plan.env.env_state, plan.state_place)
        group = EnvGroup(
            sub_envs, _fault_policy(plan), _first_segment(plan, sampler_id, spaces, owner)
        )
    except BaseException as error:
        close_all(envs)
        if not isinstance(error, EnvironmentFault):
            raise
        for incident in restarts:  # no report will hold them
            logger.warning("%s", incident.message)
        raise error.with_instances(len(envs)) from None
    return BuiltSampler(_make_sampler(plan, sampler_id, spaces, group), group, spaces, len(envs))


def _guidance(plan: SamplerPlan) -> Guidance | None:
    if plan.sampling.prior is None:
        return None
    from dppo.envs.guidance import Guidance
    from dppo.policies.controller import Controller, ControllerInstance

    controller = Controller(plan.sampling.prior, "prior")
    return Guidance(partial(ControllerInstance, controller))


def _first_segment(plan: SamplerPlan, sampler_id: int, spaces: Spaces, owner: str) -> FirstSegment:
    return FirstSegment(
        spaces,
        owner,
        sampler_id=sampler_id,
        integers=plan.network.dtype == "float32",
        masks=plan.env.action_mask == "auto",
        scales=not plan.ppo.norm_obs and plan.network.model is None,
        normalizes=plan.ppo.norm_obs,
    )


def _fault_policy(plan: SamplerPlan) -> FaultPolicy:
    num_envs = plan.sampling.envs_per_sampler * plan.sampling.num_samplers
    raise_before = {"raise": math.inf, "auto": math.ceil(FIRST_STEPS / num_envs), "rebuild": 0}
    max_faults, _ = plan.env.fault_budget
    max_in_a_row = min(FIRST_STEPS, max_faults)
    return FaultPolicy(raise_before[plan.env.on_env_fault], max_in_a_row=max_in_a_row)


def _make_sampler(
    plan: SamplerPlan, sampler_id: int, spaces: Spaces, group: EnvGroup
) -> PPOSampler:
    spec = choose_network(plan.network, spaces).spec
    agent = PPOAgent(spec, spaces.mask, estimates_values=plan.ppo.algo == "ppo")
    num_steps = plan.sampling.num_steps
    generators = partial(streams.generator, plan.seed, Stream.ACTIONS, sampler_id)
    white = WhiteNoise(generators, spec.distribution, group.num_envs, spec.dtype)
    noise: Callable[[int, int], np.ndarray] = white.of_segment
    explorations: list[Exploration] = []
    if plan.sampling.noise == "pink":
        noise = PinkNoise(white).of_segment
    elif plan.sampling.noise == "wide":
        from dppo.ppo.acting.wide import WideExploration

        wide = WideExploration(num_steps, _segments_of_prior(plan))
        noise = partial(wide.noise, sampler_id, white)
        explorations.append(wide)
    if plan.sampling.prior is not None:
        from dppo.ppo.acting.guided import GuidedExploration

        phase = ControllerPhase.of(
            spaces.actions, plan.sizes.prior_iterations, plan.sizes.prior_noise
        )
        explorations.append(GuidedExploration(phase, _segments_of_prior(plan)))
    return PPOSampler(
        sampler_id,
        agent,
        group,
        ppo=plan.ppo,
        num_steps=num_steps,
        noise=noise,
        sequence_length=plan.sizes.sequence_length,
        stack=plan.env.frame_stack if is_image(spaces.of_network().obs) else 1,
        explorations=explorations,
    )


def _segments_of_prior(plan: SamplerPlan) -> int:
    """Return the number of segments of a sampler in which a controller acts."""
    versions = plan.sizes.prior_iterations
    return versions + plan.sampling.lag if versions else 0
