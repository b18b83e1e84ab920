"""SerialSubEnvs: environments that step one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.closing import close_all
from dppo.envs.episode import CheckedEnv, GroupSettings, ResetOptions
from dppo.envs.own_state import OwnStates, offers_state
from dppo.envs.restoring import Restorer
from dppo.envs.sub_envs.port import EnvState, RestoredGroup, SubEnvs
from dppo.envs.threads import Standby
from dppo.errors import ConfigError
from dppo.ppo.exchange.records import EnvLog, FatalStep, SamplerCarry

if TYPE_CHECKING:
    from dppo.envs.state_files import StatePlace


class SerialSubEnvs(SubEnvs):
    """E environments of their own, which step one by one; or `EnvThread`s, of which some reset in the background."""

    def __init__(
        self,
        envs: Sequence[Any],
        settings: GroupSettings,
        make: Callable[[int], Any] | None = None,
        standby: int = 0,
    ) -> None:
        """Take over `envs`; raise EnvironmentFault if their spaces differ.

        Args:
            make: creates the environment with an index again; None: none ever fails without ending the run.
            standby: `envs` are `EnvThread`s, and this many times E more, which reset for later episodes.
        """
        self.settings = settings
        self._make = make
        num_envs = len(envs) // (1 + standby)
        self.checks = SpaceChecks(envs, settings.spaces, settings.owner, limits=settings.limits)
        self._all = [self._checked(env, index % num_envs) for index, env in enumerate(envs)]
        self.envs = self._all[:num_envs]
        self._standby = Standby(self.envs, self._all[num_envs:]) if standby else None
        self._states: OwnStates | None = None
        self.inputs = settings.spaces.actions.each

    def _checked(self, env: Any, index: int) -> CheckedEnv:
        guidance = self.settings.guidance
        if guidance is None:
            return CheckedEnv(env, index, self.settings, self.checks)
        from dppo.envs.guided import GuidedEnv

        return GuidedEnv(env, index, self.settings, self.checks, guidance)

    def keep_states(self, env_state: EnvState, place: StatePlace | None) -> None:
        """Take the environments' own states after each segment, if all have `get_state` and `set_state`.

        Raise ConfigError if they have not, and `env_state` is "own".
        """
        if env_state == "off":
            return
        if all(offers_state(checked.env) for checked in self._all):
            settings = self.settings
            self._states = OwnStates(
                settings.owner,
                settings.spaces.obs,
                demanded=env_state == "own",
                place=place,
                sampler_id=settings.sampler_id,
            )
        elif env_state == "own":
            raise ConfigError(
                "env_state=own: the environment has no get_state() and set_state(state). Add both, or use "
                "`env_state=auto`."
            )

    def set_states_at_once(self) -> bool:
        """Rebuild environments from their own states: see `SubEnvs`."""
        if self._states is None:
            return False
        self._states.demanded = True
        return True

    def reset(self, env: int, episode: int, options: ResetOptions) -> np.ndarray:
        if self._standby is not None:
            return self._standby.reset(env, episode, options)
        return self.envs[env].reset(episode, options)

    def avoid(self, fatal: Sequence[FatalStep]) -> None:
        """Let these steps raise instead of stepping any environment of the slot that plays the episode."""
        for checked in self._all:
            for step in fatal:
                if step.env == checked.index:
                    checked.avoid(step)

    def make(self, env: int) -> Any:
        """Create the environment with this index again."""
        assert self._make is not None, (
            "a fault of an environment that cannot be made again ends the run"
        )
        return self._make(env)

    def begin_segment(self, log: EnvLog) -> None:
        if self._states is not None:
            self._states.begin(self.envs, log.index)

    def states(self, log: EnvLog) -> dict[str, np.ndarray]:
        if self._states is None:
            return {}
        return self._states.take(self.envs, log)

    def restore(
        self,
        group: RestoredGroup,
        carry: SamplerCarry,
        actions: tuple[np.ndarray, ...],
        log: EnvLog,
    ) -> list[str]:
        """Bring back one episode after the other."""
        options = [None] * len(self.envs)
        if carry.options is not None:
            options = json.loads(carry.options.tobytes())
        restorer = Restorer(self, group.repairs, self._states, carry, log)
        return [
            restorer.restore(env, actions[env] if actions else None, options[env])
            for env in range(len(self.envs))
        ]

    def close(self) -> None:
        """Close every environment, those on standby included."""
        close_all([checked.env for checked in self._all if checked.env is not None])
