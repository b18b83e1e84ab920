"""Acting: what decides on the actions of the episodes that `Playing` plays. Here: a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dppo import streams
from dppo.envs.checks.masks import MaskSetting
from dppo.envs.episode import CheckedEnv
from dppo.envs.spaces import describe_spaces
from dppo.errors import CheckpointError
from dppo.policies.bounds import BoundCounter
from dppo.policies.policy import Policy, spaces_summary
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import ControllerTurn, PolicySnapshot
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.actions import Actions, MultiDiscreteActions, NestedActions
from dppo.spaces.spaces import Spaces, holds_float64
from dppo.streams import Stream


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """Settings of the episodes that are played."""

    seed: int
    """Seed of the episodes and of sampled actions."""
    deterministic: bool = True
    """Take the most likely action; False samples actions."""
    info_keys: tuple[str, ...] = ()
    """Names of numbers in the info of steps to report."""


class Acting(Protocol):
    """Decides on actions, in one episode after the other."""

    def spaces_of(self, env: Any, env_name: str) -> Spaces:
        """Return the spaces in which observations of `env` are stored; raise CheckpointError if it does not fit."""

    def begin(self, sub_envs: Sequence[CheckedEnv], episode: int) -> None:
        """Prepare for the first step of an episode, before its reset."""

    def actions(self, sub_envs: Sequence[CheckedEnv]) -> Sequence[Any]:
        """Return an action of the environment's own space for each sub-environment, whose last observation it sees."""

    @property
    def at_bounds(self) -> np.ndarray | None:
        """[2, width] steps of the episode so far in which actions were at their bounds; None if not counted."""


ActingFor = Callable[[PolicySnapshot | ControllerTurn], Acting]
"""Returns what plays the episodes of a policy, or of the controller. It can be sent to other processes."""


class PolicyActing:
    """A policy, which takes its most likely action or samples one."""

    def __init__(self, policy: Policy, settings: PlaySettings) -> None:
        self._policy = policy
        self._settings = settings
        self._generator: np.random.Generator | None = None
        self._state: np.ndarray | None = None
        self._counter: BoundCounter | None = None
        """The actions at a bound in the present episode, if actions are deterministic."""
        self._num_sub_envs = 1

    def spaces_of(self, env: Any, env_name: str) -> Spaces:
        check_spaces(self._policy.spaces, env, env_name)
        return self._policy.spaces

    def begin(self, sub_envs: Sequence[CheckedEnv], episode: int) -> None:
        """Prepare for an episode: see `Acting`."""
        self._num_sub_envs = len(sub_envs)
        self._state = self._policy.start(len(sub_envs))
        if self._settings.deterministic:
            self._counter = BoundCounter(self._policy.spaces.actions)
        else:
            self._generator = streams.generator(self._settings.seed, Stream.EVALUATION, episode)

    def actions(self, sub_envs: Sequence[CheckedEnv]) -> Sequence[Any]:
        spaces = self._policy.spaces
        obs = np.empty(len(sub_envs), spaces.obs)
        for index, sub_env in enumerate(sub_envs):
            obs[index] = sub_env.last_obs
        actions, outputs = self._policy.decide(obs, self._state, self._generator)
        self._state = outputs.state
        if self._counter is not None:
            self._counter.add(actions)
        converted: Sequence[Any] = spaces.actions.each(actions)
        return converted

    @property
    def at_bounds(self) -> np.ndarray | None:
        """Steps in which the most likely actions were at their bounds: see `Acting`."""
        if self._counter is None:
            return None
        return self._counter.counts / self._num_sub_envs


class PolicyActingFor:
    """Lets snapshots of a policy play; loads each into the same agent: a user's network may take seconds to build."""

    def __init__(self, spaces: Spaces, spec: NetworkSpec, settings: PlaySettings) -> None:
        self._spaces = spaces
        self._spec = spec
        self._settings = settings
        self._agent: PPOAgent | None = None

    def __call__(self, snapshot: PolicySnapshot | ControllerTurn) -> Acting:
        assert isinstance(snapshot, PolicySnapshot), "there is no controller"
        if self._agent is None:
            self._agent = PPOAgent(self._spec, self._spaces.mask)
        return PolicyActing(Policy(self._spaces, self._agent, snapshot, {}), self._settings)


def check_spaces(trained: Spaces, env: Any, env_name: str) -> None:
    """Refuse an environment that the policy was not trained for."""
    action_mask: MaskSetting = "auto"
    if trained.mask is None:
        action_mask = "off"
    elif trained.mask == "info":
        action_mask = "info"
    obs_dtype = "float32"
    if holds_float64(trained.obs):
        obs_dtype = "float64"
    spaces = describe_spaces(
        env, drop_obs=trained.dropped, action_mask=action_mask, obs_dtype=obs_dtype
    )
    is_different = any(
        getattr(spaces, name) != getattr(trained, name)
        for name in ("obs", "categories", "one_of", "mask")
    )
    if is_different or _compared(spaces.actions) != _compared(trained.actions):
        env_summary = spaces_summary(spaces)
        trained_summary = spaces_summary(trained)
        if env_summary == trained_summary:
            trained_summary += " that differ, as in numbers of choices"
        raise CheckpointError(
            f"{env_name} has {env_summary}; the policy was trained with {trained_summary}. Use the environment of "
            f"the run."
        )


def _compared(actions: Actions) -> Any:
    """Return all of an action space but the bounds of a Box, which may differ."""
    if isinstance(actions, NestedActions):
        return actions.keys, [_compared(part) for part in actions.parts]
    if isinstance(actions, MultiDiscreteActions):
        return actions.counts, actions.starts
    return str(actions)
