"""Make the environments of a sampler, in turn, and describe their spaces."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dppo import streams
from dppo.attempts import attempted
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making
from dppo.envs.closing import close_all
from dppo.envs.instance import Instance
from dppo.envs.kinds import refuse_sub_envs
from dppo.envs.preparation import make_prepared
from dppo.envs.spaces import describe_spaces, with_critic_obs
from dppo.envs.statistics import check_statistics
from dppo.envs.sub_envs.choice import adapted, check_size
from dppo.envs.sub_envs.joint import JointEnv
from dppo.envs.threads import EnvThread
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.keeper import MARKER
from dppo.hosts.plans import SamplerPlan
from dppo.hosts.sac import check_actions, check_observations
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.spaces.actions import is_continuous
from dppo.spaces.spaces import MAX_WHOLE, Spaces, holds_float64
from dppo.streams import Stream

POLL_S = 0.25
_starting = threading.Lock()  # held while an environment of this process gets its turn to start
_last_start = [-math.inf]  # the time of the last start in this process


def make_in_turn(
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

    def start() -> Any:
        _wait_for_start(plan.sampling.start_interval_s, enter)
        make = partial(_make_env, plan, owner, instance, start)
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


def _make_env(plan: SamplerPlan, owner: str, instance: Instance, remake: Callable[[], Any]) -> Any:
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
            adapted_env = adapted(env, remake)
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
