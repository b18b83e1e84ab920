"""Build samplers and trainers from their plans, in any process."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo import streams
from dppo.attempts import attempted
from dppo.config.parts import ResolvedPPO
from dppo.config.sizes import Sizes
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making
from dppo.envs.checks.first_segment import FirstSegment
from dppo.envs.closing import close_all
from dppo.envs.episode import GroupSettings, InfoMeter
from dppo.envs.group import EnvGroup
from dppo.envs.instance import Instance
from dppo.envs.kinds import refuse_sub_envs
from dppo.envs.preparation import make_prepared
from dppo.envs.repairs import FIRST_STEPS, FaultPolicy
from dppo.envs.spaces import describe_spaces, with_critic_obs
from dppo.envs.statistics import check_statistics
from dppo.envs.sub_envs.choice import adapted, check_size, make_all, sub_envs_of
from dppo.envs.sub_envs.joint import JointEnv
from dppo.envs.threads import EnvThread
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.keeper import MARKER
from dppo.hosts.plans import SamplerPlan, TrainerPlan
from dppo.hosts.sac import check_actions, check_observations
from dppo.log import logger
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.noise import PinkNoise, WhiteNoise
from dppo.ppo.acting.sampler import Exploration, PPOSampler
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.ppo.networks.choice import choose_network
from dppo.spaces.actions import is_continuous
from dppo.spaces.spaces import MAX_WHOLE, Spaces, holds_float64, is_image
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.envs.guidance import Guidance
    from dppo.hosts.trainer import Trainer
    from dppo.ppo.learning.parallel import Parallel
    from dppo.ppo.learning.stages import Stage
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.network import NetworkSpec
    from dppo.sac.trainer import SACTrainer


FEW_ROWS = 64  # rows of zeros with which a GPU is tested before the first segment
POLL_S = 0.25
# Buffers of cuBLAS with which a product has the same bits in each run; it reads the variable at its first product.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
_starting = threading.Lock()  # held while an environment of this process gets its turn to start
_last_start = [-math.inf]  # the time of the last start in this process


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
        make = partial(_make_in_turn, plan, sampler_id, progress, restarts)
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

        phase = _phase(plan.sizes, spaces)
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


def _phase(sizes: Sizes, spaces: Spaces) -> ControllerPhase:
    return ControllerPhase.of(spaces.actions, sizes.prior_iterations, sizes.prior_noise)


def _make_in_turn(
    plan: SamplerPlan,
    sampler_id: int,
    progress: ActivityRecord,
    restarts: list[Incident],
    env_index: int,
    waits_s: Sequence[float] = (),
) -> Any:
    """Make an environment, in a thread of its own if it has standbys; wait `start_interval_s` after the last start.

    `waits_s`: waits before its constructor is called again while it raises.
    """
    enter = partial(progress.make, place_of(Phase.MAKE, sampler_id, env_index))
    owner = f"sampler {sampler_id} ({plan.env.env_name}), env {env_index}"

    def note_restart(reason: str) -> None:
        message = f"{owner}: {reason}"
        if MARKER in os.environ:  # for the log of an actor, which may be lost with its answer
            logger.warning("%s", message)
        restarts.append(Incident(IncidentKind.PROGRAM_RESTARTED, message, env_index))

    instance = Instance(
        sampler_id,
        env_index,
        seed=streams.integer(plan.seed, Stream.EPISODES, sampler_id, 0, 0),
        num_sub_envs=plan.sampling.envs_per_sampler,
        max_steps=plan.env.most_steps,
        layout=plan.layout,
        progress=progress,
        on_restart=note_restart,
    )
    make = partial(_make_env, plan, owner, instance)

    def start() -> Any:
        _wait_for_start(plan.sampling.start_interval_s, enter)
        if plan.sampling.standby_envs:
            return EnvThread(make, owner)
        return make()

    def note(fault: EnvironmentFault, wait_s: float) -> None:
        text = f"{fault.message}, and was called again after {wait_s:g} s."
        restarts.append(Incident(IncidentKind.ENV_RAISED, text, env_index))

    env = attempted(start, EnvironmentFault, note, enter, waits_s)
    environments = len(env.sub_envs) if isinstance(env, JointEnv) else 1
    progress.count_made(place_of(Phase.BUILD, sampler_id, env_index), environments)
    return env


def _wait_for_start(interval_s: float, enter: Callable[[], None]) -> None:
    """Wait for the turn of an environment of this process; `enter` shows that it is not hung."""
    enter()
    while interval_s:
        with _starting:
            now = time.monotonic()
            left_s = _last_start[0] + interval_s - now
            if left_s <= 0:
                # the time of the start itself, so that after a late start the next one still waits
                _last_start[0] = now
                return
        time.sleep(min(left_s, POLL_S))
        enter()


def _make_env(plan: SamplerPlan, owner: str, instance: Instance) -> Any:
    """Make an environment of a sampler; raise EnvironmentFault if its constructor raises."""
    settings = plan.env
    with making(owner, instance.sampler_id, instance.env_index, env_name=settings.env_name):
        env = make_prepared(settings, instance)
        check_statistics(env, settings.running_statistics)
        if settings.info_keys:
            refuse_sub_envs(
                env,
                "info_keys",
                "are not read from environments with sub-environments. Leave it out.",
            )
        if plan.sampling.prior is not None:
            refuse_sub_envs(
                env,
                f"prior={plan.sampling.prior_name}",
                "a controller acts in single environments, not in vectors or for several agents. Leave it out.",
            )
        try:
            adapted_env = adapted(env, partial(_make_env, plan, owner, instance))
            check_size(adapted_env, plan.sampling.envs_per_sampler, plan.sampling.standby_envs)
        except BaseException:
            close_all([env])
            raise
        return adapted_env


def spaces_of(plan: SamplerPlan, env: Any) -> Spaces:
    """Return the spaces of `env`; raise `ConfigError` if they cannot be learned on, or a setting does not fit them."""
    if plan.ppo.algo == "sac":
        check_actions(env.action_space)
    spaces = describe_spaces(
        env,
        drop_obs=plan.env.drop_obs,
        norm_obs_keys=plan.ppo.norm_obs_keys,
        action_bounds=plan.env.action_bounds,
        action_mask=plan.env.action_mask,
        obs_dtype=plan.env.obs_dtype,
    )
    if plan.network.critic_obs:
        spaces = with_critic_obs(spaces, plan.network.critic_obs)
    if plan.env.obs_dtype == "float64" and not holds_float64(spaces.obs):
        raise ConfigError(
            "obs_dtype=float64 has no effect: the observation space contains neither float64 numbers nor a Box of "
            "integers beyond 2**24. Declare float64 in the environment if its numbers need it, or leave it out."
        )
    if plan.ppo.algo == "sac":
        check_observations(spaces)
    if plan.sampling.noise == "pink" and not is_continuous(spaces.actions):
        raise ConfigError(
            f"noise=pink has no effect on choices, and the action space is {spaces.actions}. Leave it out."
        )
    if plan.network.dtype == "float32":
        _check_float32(plan.ppo.norm_obs_keys, spaces.of_network())
    return spaces


def _check_float32(norm_obs_keys: tuple[str, ...], spaces: Spaces) -> None:
    """Refuse leaves of float64 that are not normalized first, and categories that float32 cannot distinguish."""
    rounded = []
    if spaces.normalized is not None:
        doubles = [name for name, leaf in spaces.leaves().items() if leaf.base == "f8"]
        rounded = [name for name in doubles if name not in spaces.normalized]
    if rounded:
        raise ConfigError(
            f"norm_obs_keys={' '.join(norm_obs_keys)}: leaves out {rounded[0]}, whose float64 numbers the network "
            f"would read as float32. Add {rounded[0]}, or use `obs_dtype=float32`."
        )
    for name, categories in spaces.categories.items():
        label = "observation_space"
        if name:
            label = f"observation_space, leaf {name!r}"
        for count, start in zip(categories.counts, categories.starts, strict=True):
            last = start + count - 1
            if max(-start, last) > MAX_WHOLE:
                raise ConfigError(
                    f"{label}: has categories from {start} to {last}, and the network reads them as float32, which "
                    f"cannot tell integers beyond 2**24 apart. Subtract the start in the environment "
                    f"(gymnasium.wrappers.TransformObservation), or use `dtype=float64`."
                )


def build_trainer(plan: TrainerPlan, spaces: Spaces, parallel: Parallel | None = None) -> Trainer:
    """Build the trainer of a run, or one of several ranks; imports torch."""
    from dppo.ppo.learning.gpu import repeatable_on, starting_on
    from dppo.ppo.learning.parallel import Parallel

    device = _device(plan.learners.device)
    spec = choose_network(plan.network, spaces).spec
    with starting_on(device, spec.as_json().get("model", "the built-in network")):
        trainer = TRAINERS[plan.ppo.algo](device, plan, spec, parallel or Parallel())
        if device != "cpu":
            with repeatable_on(trainer.device):
                trainer.rehearse(FEW_ROWS)
    return trainer


def _sac_trainer(
    device: str, plan: TrainerPlan, spec: NetworkSpec, parallel: Parallel
) -> SACTrainer:
    from dppo.hosts.sac import sac_trainer

    assert device == "cpu"
    return sac_trainer(plan, spec, parallel)


def _ppo_trainer(
    device: str, plan: TrainerPlan, spec: NetworkSpec, parallel: Parallel
) -> PPOTrainer:
    from dppo.ppo.learning.adam import MAX_RATE
    from dppo.ppo.learning.model import PPOModel
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.modules import learn_in_bfloat16

    model = PPOModel(
        spec,
        streams.integer(plan.seed, Stream.WEIGHTS),
        device=device,
        zeros_like=parallel.zeros_like,
        log_std=plan.network.log_std_init,
    )
    assert isinstance(plan.ppo, ResolvedPPO)
    if plan.learners.precision == "bfloat16":
        learn_in_bfloat16(model.network, device)
    starts_from_clone = plan.sizes.prior_iterations > 0
    return PPOTrainer(
        model,
        plan.ppo,
        minibatches=plan.sizes.minibatches_per_epoch,
        micro_batch_size=plan.learners.micro_batch_size,
        parallel=parallel,
        sequence_length=plan.sizes.sequence_length,
        stages=stages_of(plan, parallel, spec),
        iterations=plan.sizes.iterations,
        seed=plan.seed,
        max_rate=plan.ppo.learning_rate if starts_from_clone else MAX_RATE,
    )


TRAINERS: dict[str, Callable[[str, TrainerPlan, NetworkSpec, Parallel], Trainer]] = {
    "ppo": _ppo_trainer,
    "sac": _sac_trainer,
}
"""The trainer of each value of `algo`."""


def stages_of(plan: TrainerPlan, parallel: Parallel, spec: NetworkSpec) -> list[Stage]:
    """Make the stages that a run adds to its updates; by default none."""
    from dppo.ppo.learning.prior import Prior
    from dppo.ppo.learning.reuse import OlderPolicies
    from dppo.ppo.learning.stages import LagCorrection, RecomputedAdvantages

    stages: list[Stage] = []
    if plan.ppo.reuse > 1:
        stages.append(OlderPolicies(plan.ppo, parallel))
    elif plan.policy_lag > 0:
        stages.append(LagCorrection())
    if plan.ppo.recompute_advantages:
        stages.append(RecomputedAdvantages(plan.ppo))
    if plan.sizes.prior_iterations > 0:
        stages.append(Prior(plan.ppo, _phase(plan.sizes, spec.spaces)))
    return stages


def _device(setting: str) -> str:
    """Choose the device to train on; called only in the process that trains."""
    import torch

    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={setting}: torch {torch.__version__} sees no GPU in this process. Use `device=cpu`, or "
            f"`num_learners=1` with `learner_gpus=1`."
        )
    os.environ.setdefault(CUBLAS, FIXED_WORKSPACE)
    return "cuda"
