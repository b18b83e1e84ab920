"""JointSubEnvs: the environments of a sampler are part of one environment, which steps all of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.closing import close_all
from dppo.envs.episode import CheckedEnv, GroupSettings, ResetOptions, SkippedStep
from dppo.envs.repairs import FIRST_STEPS
from dppo.envs.restoring import NO_REPLAY
from dppo.envs.sub_envs.port import Interruption, RestoredGroup, SubEnvs
from dppo.ppo.exchange.records import EnvLog, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.spaces.actions import with_allowed_choices
from dppo.spaces.spaces import MASK, masks_of


class SubEnv:
    """One of the environments of a `JointEnv`, with their interface; it returns its part of the common step."""

    def __init__(self, joint: JointEnv, index: int) -> None:
        self.index = index
        self.joint = joint
        self.step_result: Any = None
        """Result of the next `step`, or a `SkippedStep`."""
        self.reset_result: Any = None
        """Result of the next `reset`, if that reset has been made."""
        self.is_waiting = False
        """The episode has ended, and the next one begins in a later step."""
        self.restarts = -1
        """`JointEnv.restarts` at the last reset of this sub-environment."""
        self.is_open = True
        self.last_reset: Any = None
        """Observation of the last reset, and an info with its mask."""

    def __getattr__(self, name: str) -> Any:
        if name in ("observation_space", "action_space", "spec", "unread_masks"):
            return getattr(self.joint, name)
        raise AttributeError(name)

    def step(self, actions: Sequence[Any]) -> Any:
        """Return the result of this sub-environment in the common step; raise SkippedStep if it took no step.

        `actions` are those of all sub-environments, which are stepped in order: the first one steps all of them.
        """
        if self.index == 0:
            self.joint.step_all(actions)
        if isinstance(self.step_result, SkippedStep):
            raise self.step_result
        return self.step_result

    def reset(self, *, seed: int, options: ResetOptions = None) -> Any:
        """Start an episode; raise ValueError for options, which cannot be given to one sub-environment."""
        if options is not None:
            raise ValueError(
                f"options={options} of a reset are not for environments with sub-environments"
            )
        if self.reset_result is None or (self.joint.plays_once and self.index == 0):
            try:
                self.joint.begin(self, seed)
            except BaseException as error:
                self.joint.error = error
                raise
        obs, info = self.reset_result
        self.reset_result = None
        self.is_waiting = False
        mask = {}
        # Only the mask is copied: an info may be None, or hold objects that cannot be copied.
        if isinstance(info, dict) and MASK in info:
            mask[MASK] = info[MASK]
        self.last_reset = deepcopy((obs, mask))
        self.restarts = self.joint.restarts
        return self.last_reset

    def close(self) -> None:
        """Close the environment, if it is broken or this is its last sub-environment."""
        self.is_open = False
        self.joint.close_unused()


class JointEnv(ABC):
    """An environment that steps E sub-environments at once."""

    observation_space: Any
    action_space: Any
    spec: Any = None
    shared = False
    """True if the sub-environments have their episodes in common."""
    unread_masks = False
    """The environments have a method for action masks that is never called."""
    plays_once = False
    """No episode follows when all sub-environments have ended theirs, and the first reset of an episode resets all."""
    next_seed: Callable[[int], int]
    """Returns the seed of the next episode of a sub-environment."""

    def __init__(self, env: Any, make: Callable[[], JointEnv], num_sub_envs: int) -> None:
        self.env = env
        self._make = make
        self.sub_envs = [SubEnv(self, index) for index in range(num_sub_envs)]
        self.restarts = 0
        """Times that all sub-environments were reset at once, which ended their episodes."""
        self.error: BaseException | None = None
        """The error that broke the environment."""
        self.last_obs: Any = None
        """Observations of all sub-environments; None before the first reset."""

    @abstractmethod
    def step(self, actions: Sequence[Any]) -> None:
        """Step each sub-environment; set `step_result` of all, and `reset_result` of those that were reset."""

    @abstractmethod
    def begin(self, sub_env: SubEnv, seed: int) -> None:
        """Reset a sub-environment, or all sub-environments if the environment cannot reset one alone."""

    def step_all(self, actions: Sequence[Any]) -> None:
        """Step all sub-environments. If that raises, it is the error of the first one, and the others take no step."""
        try:
            self.step(actions)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            self.error = error
            for sub_env in self.sub_envs:
                sub_env.step_result = SkippedStep(is_last=False)
            raise

    def remake(self, index: int) -> SubEnv:
        """Open a failed sub-environment again and return it; make a new `env` if the failure closed the old one."""
        if self.env is None:
            fresh = self._make()
            self.env = fresh.env
            self.observation_space = fresh.observation_space
            self.action_space = fresh.action_space
            self.last_obs = None
            self.restarts += 1
            for sub_env in self.sub_envs:
                sub_env.reset_result = None
                sub_env.is_open = True
        self.sub_envs[index].is_open = True
        self.sub_envs[index].is_waiting = False
        return self.sub_envs[index]

    def close_unused(self) -> None:
        """Close the environment, if it is broken or all of its sub-environments are closed."""
        if self.error is not None or not any(sub_env.is_open for sub_env in self.sub_envs):
            self.close()

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            closing = self.env
            self.env = None
            self.error = None
            close_all([closing])


class JointSubEnvs(SubEnvs):
    """The sub-environments of a `JointEnv` as the environments of a group: each takes its part of the common step."""

    are_joint = True

    def __init__(self, joint: JointEnv, settings: GroupSettings) -> None:
        """Take over `joint`."""
        self._joint = joint
        if joint.shared:
            # all sub-environments share the episodes of the first
            seed_of = settings.episode_seed
            settings = replace(settings, episode_seed=lambda _, episode: seed_of(0, episode))
        self.settings = settings
        checks = SpaceChecks(
            joint.sub_envs, settings.spaces, settings.owner, limits=settings.limits
        )
        self.envs = [
            CheckedEnv(sub_env, sub_env.index, settings, checks, is_single=False)
            for sub_env in joint.sub_envs
        ]
        for checked in self.envs:
            checked.episode = -1  # the next one is the first
        joint.next_seed = lambda env: settings.episode_seed(env, self.envs[env].episode + 1)
        self.make = joint.remake
        self.inputs = self._inputs

    def reset(self, env: int, episode: int, options: ResetOptions) -> np.ndarray:
        """Start an episode, unless the sub-environment waits for it."""
        sub_env = self._joint.sub_envs[env]
        if sub_env.is_waiting and sub_env.reset_result is None:
            return self.envs[env].first_obs
        return self.envs[env].reset(episode, options)

    def _inputs(self, actions: np.ndarray) -> Sequence[Any]:
        """Return the actions of all sub-environments once for each: the first one steps all of them."""
        return self.step_arguments(self.settings.spaces.actions.each(actions))

    def step_arguments(self, actions: Sequence[Any]) -> Sequence[Any]:
        """Repeat the actions of all sub-environments for each sub-environment."""
        return [actions] * len(self.envs)

    def interruptions(self) -> Iterator[Interruption]:
        """Yield the sub-environments whose episodes ended because another one has failed, so that all were reset."""
        for sub_env, checked in zip(self._joint.sub_envs, self.envs, strict=True):
            if sub_env.restarts == self._joint.restarts:
                continue
            lost_steps = 0 if sub_env.is_waiting else checked.length
            sub_env.is_waiting = False
            episode = checked.episode + 1
            if self._joint.shared:
                episode = max(other.episode for other in self.envs)
            yield Interruption(sub_env.index, episode, lost_steps)

    def restore(
        self,
        group: RestoredGroup,
        carry: SamplerCarry,
        actions: tuple[np.ndarray, ...],
        log: EnvLog,
    ) -> list[str]:
        """Replay the open episodes side by side, so that they end at the same step."""
        for checked, episode in zip(self.envs, carry.episodes.tolist(), strict=True):
            checked.episode = episode
        if not actions:
            return [NO_REPLAY] * len(self.envs)
        for checked in self.envs:
            checked.episode -= 1  # the reset of the replay begins the next one
        self._replay(group, carry, actions, log)
        diverged = [
            (checked.episode, checked.length, checked.checksum())
            != (carry.episodes[env], carry.episode_lengths[env], carry.checksums[env])
            for env, checked in enumerate(self.envs)
        ]
        if self._joint.shared:
            diverged = [any(diverged)] * len(self.envs)
        for sub_env, has_diverged in zip(self._joint.sub_envs, diverged, strict=True):
            sub_env.is_waiting = sub_env.is_waiting and not has_diverged
        reason = "the replay ended in another state: its code has changed, or it is not deterministic given its seed"
        return [reason if has_diverged else "" for has_diverged in diverged]

    def _replay(
        self,
        group: RestoredGroup,
        carry: SamplerCarry,
        actions: tuple[np.ndarray, ...],
        log: EnvLog,
    ) -> None:
        num_envs = len(self.envs)
        # a step so late in the run that faults do not end the run
        replay_log = EnvLog(index=log.index, step=FIRST_STEPS)
        obs = np.empty(num_envs, self.settings.spaces.obs)
        flags = np.empty((3, num_envs), bool)
        results = (obs, np.empty(num_envs), *flags)
        lengths = np.array([len(env_actions) for env_actions in actions])
        longest = int(lengths.max())
        for sub_env in self._joint.sub_envs:
            sub_env.reset_result = None
            sub_env.is_waiting = False
        for step in range(longest + 1):
            beginning = (
                range(num_envs) if step == 0 else np.flatnonzero(longest - lengths == step).tolist()
            )
            for env in beginning:
                obs[env] = group.begin_episode(env, int(carry.episodes[env]), replay_log)
            if step == longest:
                break
            indices = step - longest + lengths
            any_action = actions[lengths.argmax()][0]
            step_actions = [
                env_actions[index] if index >= 0 else self._allowed(any_action, obs[env])
                for env, (env_actions, index) in enumerate(zip(actions, indices, strict=True))
            ]
            group.step((np.stack(step_actions), *results), replay_log)
            for _ in np.flatnonzero(indices >= 0):
                self.settings.progress.replay()
        log.incidents += replay_log.incidents

    def _allowed(self, action: np.ndarray, obs: np.ndarray) -> np.ndarray:
        """Return an action for a sub-environment before its episode begins: this one, unless its mask forbids it."""
        spaces = self.settings.spaces
        if spaces.mask is None:
            return action
        return with_allowed_choices(spaces.actions, action, masks_of(obs))

    def shown_obs(self, env: int) -> np.ndarray:
        """Return the latest observation of a sub-environment; if it waits, the first one of the ended episode."""
        checked = self.envs[env]
        if self._joint.sub_envs[env].is_waiting:
            return checked.first_obs
        return checked.last_obs

    def played_envs(self) -> list[CheckedEnv]:
        """Return all agents, or the first sub-environment of a vector: the others have episodes of their own."""
        self._joint.plays_once = True
        self._joint.next_seed = lambda _: 0
        return self.envs if self._joint.shared else self.envs[:1]

    def close(self) -> None:
        self._joint.close()
