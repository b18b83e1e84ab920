"""The port between a group of environments and what steps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from dppo.envs.episode import CheckedEnv, GroupSettings, ResetOptions
from dppo.envs.repairs import Repairs
from dppo.ppo.exchange.records import EnvLog, FatalStep, SamplerCarry, StepRows

if TYPE_CHECKING:
    from dppo.envs.state_files import StatePlace

EnvState = Literal["auto", "own", "off"]


class Interruption(NamedTuple):
    """A sub-environment whose episode another one has ended, because all of their environment were reset."""

    env: int
    episode: int
    """The episode that follows."""
    lost_steps: int
    """Steps of the episode that was cut off; 0 if it had ended before."""


class RestoredGroup(Protocol):
    """A group of environments, for those who bring its episodes back."""

    repairs: Repairs

    def begin_episode(self, env: int, episode: int, log: EnvLog) -> np.ndarray:
        """Start an episode, or a later one if that fails; return the first observation."""

    def step(self, rows: StepRows, log: EnvLog) -> None:
        """Step each environment: see `Environments`."""


class SubEnvs(Protocol):
    """The E environments of a sampler: each on its own, or all part of one environment that steps them together."""

    settings: GroupSettings
    envs: list[CheckedEnv]
    are_joint: bool = False
    """They are part of one environment, and can end each other's episodes."""
    inputs: Callable[[np.ndarray], Sequence[Any]]
    """Returns what `CheckedEnv.step` of each sub-environment takes, for the actions [E, *A] as sampled."""
    make: Callable[[int], Any]
    """Returns another environment in place of one that failed; raises EnvironmentFault if its constructor does."""

    def reset(self, env: int, episode: int, options: ResetOptions) -> np.ndarray:
        """Start an episode of a sub-environment, return its first observation; raise EnvironmentFault if that fails."""

    def avoid(self, fatal: Sequence[FatalStep]) -> None:
        """Let these steps raise EnvironmentFault in place of being taken. Environments that step together take them."""
        return

    def step_arguments(self, actions: Sequence[Any]) -> Sequence[Any]:
        """Convert E actions of the environment's own space to E arguments of `CheckedEnv.step`."""
        return actions

    def interruptions(self) -> Iterable[Interruption]:
        """Yield those whose episodes were cut off in this step; each begins its next episode before the next step."""
        return ()

    def keep_states(self, env_state: EnvState, place: StatePlace | None) -> None:
        """Keep the environments' own states after each segment, as the setting `env_state` asks; raise ConfigError.

        Sub-environments of one environment have none. `place`: where files of states are kept.
        """
        return

    def set_states_at_once(self) -> bool:
        """Rebuild environments from their own states without a proof, from now on; return False if they have none."""
        return False

    def begin_segment(self, log: EnvLog) -> None:
        """Note the states of the environments before the segment of `log`."""
        return

    def states(self, log: EnvLog) -> dict[str, np.ndarray]:
        """Return the environments' own states after a segment, under their names in `SamplerCarry`, if they have any.

        `log` receives the time and incidents.
        """
        return {}

    def restore(
        self,
        group: RestoredGroup,
        carry: SamplerCarry,
        actions: tuple[np.ndarray, ...],
        log: EnvLog,
    ) -> list[str]:
        """Bring back the open episodes of `group`; return for each why that is impossible, "" if it is done.

        `actions`: for each sub-environment [n, *A], the actions since its reset; empty without a replay.
        """

    def shown_obs(self, env: int) -> np.ndarray:
        """Return the observation from which the next action of a sub-environment follows."""
        return self.envs[env].last_obs

    def played_envs(self) -> list[CheckedEnv]:
        """Return those that play an episode after which none follows: all agents, or the first sub-environment."""
        return self.envs[:1]

    def close(self) -> None:
        """Close every environment, also if some fail to close."""
