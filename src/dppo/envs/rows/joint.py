"""JointRows: the environments of a sampler are rows of one environment, which steps all of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.closing import close_all
from dppo.envs.episode import CheckedEnv, GroupSettings, SkippedStep
from dppo.envs.repairs import FIRST_STEPS
from dppo.envs.restoring import NO_REPLAY
from dppo.envs.rows.port import EnvState, Interruption, RestoredGroup
from dppo.ppo.exchange.records import EnvLog, FatalStep, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MASK

if TYPE_CHECKING:
    from dppo.envs.state_files import StatePlace


class Row:
    """One row of a `JointEnv` with the interface of an environment; it returns its part of a step of all rows."""

    def __init__(self, joint: JointEnv, index: int) -> None:
        self.index = index
        self.joint = joint
        self.answer: Any = None
        """Result of the next `step`, or a `SkippedStep`."""
        self.first: Any = None
        """Result of the next `reset`, if that reset has been made."""
        self.waiting = False
        """The episode has ended, and the next one begins in a later step."""
        self.restarts = -1
        """`JointEnv.restarts` at the last reset of this row."""
        self.is_open = True
        self.last_reset: Any = None
        """Observation of the last reset, and an info with its mask."""

    def __getattr__(self, name: str) -> Any:
        if name in ("observation_space", "action_space", "spec", "unread_masks"):
            return getattr(self.joint, name)
        raise AttributeError(name)

    def step(self, actions: Sequence[Any]) -> Any:
        """Return the result of this row in a step of all rows; raise SkippedStep if the row took no step.

        `actions` are those of all rows. Rows are stepped in order, and the first one steps all of them.
        """
        if self.index == 0:
            self.joint.step_rows(actions)
        if isinstance(self.answer, SkippedStep):
            raise self.answer
        return self.answer

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; raise ValueError for options, which cannot be given to one row."""
        if options is not None:
            raise ValueError(
                f"options={options} of a reset are not for environments of several rows"
            )
        if self.first is None or (self.joint.once and self.index == 0):
            try:
                self.joint.begin(self, seed)
            except BaseException as error:
                self.joint.error = error
                raise
        obs, info = self.first
        self.first = None
        self.waiting = False
        mask = {}
        # Only the mask is copied: an info may be None, or hold objects that cannot be copied.
        if isinstance(info, dict) and MASK in info:
            mask[MASK] = info[MASK]
        self.last_reset = deepcopy((obs, mask))
        self.restarts = self.joint.restarts
        return self.last_reset

    def close(self) -> None:
        """Close the environment, if it is broken or this is its last row."""
        self.is_open = False
        self.joint.close_unused()


class JointEnv(ABC):
    """An environment that steps E rows at once."""

    observation_space: Any
    action_space: Any
    spec: Any = None
    shared = False
    """True if the rows have their episodes in common."""
    unread_masks = False
    """The environments have a method for action masks that is never called."""
    once = False
    """No episode follows when all rows have ended theirs, and the first reset of an episode resets all rows."""
    next_seed: Callable[[int], int]
    """Returns the seed of the next episode of a row."""

    def __init__(self, made: Any, make: Callable[[], JointEnv], num_rows: int) -> None:
        self.env = made
        self._make = make
        self.rows = [Row(self, index) for index in range(num_rows)]
        self.restarts = 0
        """Times that all rows were reset at once, which ended their episodes."""
        self.error: BaseException | None = None
        """The error that broke the environment."""
        self.last: Any = None
        """Observations of all rows; None before the first reset."""

    @abstractmethod
    def step(self, actions: Sequence[Any]) -> None:
        """Step each row with its action; set `answer` of all rows, and `first` of the rows that were reset."""

    @abstractmethod
    def begin(self, row: Row, seed: int) -> None:
        """Reset a row, or all rows if the environment cannot reset one alone."""

    def step_rows(self, actions: Sequence[Any]) -> None:
        """Step all rows. If that raises, it is the error of the first row, and the others take no step."""
        try:
            self.step(actions)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            self.error = error
            for row in self.rows:
                row.answer = SkippedStep(over=False)
            raise

    def again(self, index: int) -> Row:
        """Open a failed row again and return it; make a new environment first if the failure closed the old one."""
        if self.env is None:
            fresh = self._make()
            self.env = fresh.env
            self.observation_space = fresh.observation_space
            self.action_space = fresh.action_space
            self.last = None
            self.restarts += 1
            for row in self.rows:
                row.first = None
                row.is_open = True
        self.rows[index].is_open = True
        self.rows[index].waiting = False
        return self.rows[index]

    def close_unused(self) -> None:
        """Close the environment, if it is broken or all of its rows are closed."""
        if self.error is not None or not any(row.is_open for row in self.rows):
            self.close()

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            closing = self.env
            self.env = None
            self.error = None
            close_all([closing])


class JointRows:
    """The rows of a `JointEnv` as the environments of a group: each takes its part of the common step."""

    def __init__(self, joint: JointEnv, settings: GroupSettings) -> None:
        """Take over `joint`."""
        self._joint = joint
        if joint.shared:
            # all rows share the episodes of the first
            seed_of = settings.episode_seed
            settings = replace(settings, episode_seed=lambda _, episode: seed_of(0, episode))
        self.settings = settings
        checks = SpaceChecks(joint.rows, settings.spaces, settings.owner, limits=settings.limits)
        self.are_joint = True
        self.envs = [
            CheckedEnv(row, row.index, settings, checks, alone=False) for row in joint.rows
        ]
        for checked in self.envs:
            checked.episode = -1  # the next one is the first
        joint.next_seed = lambda env: settings.episode_seed(env, self.envs[env].episode + 1)
        self.make = joint.again

    def reset(self, env: int, episode: int, options: dict[str, Any] | None) -> np.ndarray:
        """Start an episode, unless the row waits for it: see `Rows`."""
        row = self._joint.rows[env]
        if row.waiting and row.first is None:
            return self.envs[env].first_obs
        return self.envs[env].reset(episode, options)

    def inputs(self, actions: np.ndarray) -> Sequence[Any]:
        """Return the actions of all rows once for each row: the first row steps all of them."""
        return self.step_arguments(self.settings.spaces.actions.each(actions))

    def step_arguments(self, actions: Sequence[Any]) -> Sequence[Any]:
        """Repeat the actions of all rows for each row: see `inputs`."""
        return [actions] * len(self.envs)

    def interrupted(self) -> Iterator[Interruption]:
        """Yield the rows whose episodes ended because another one has failed, so that all were reset."""
        for row, checked in zip(self._joint.rows, self.envs, strict=True):
            if row.restarts == self._joint.restarts:
                continue
            lost_steps = 0 if row.waiting else checked.length
            row.waiting = False
            episode = checked.episode + 1
            if self._joint.shared:
                episode = max(other.episode for other in self.envs)
            yield Interruption(row.index, episode, lost_steps)

    def keep_states(self, env_state: EnvState, place: StatePlace | None) -> None:
        """Do nothing: rows have no states of their own."""

    def begin_segment(self, log: EnvLog) -> None:
        """Do nothing: rows have no states of their own."""

    def states(self, log: EnvLog) -> dict[str, np.ndarray]:
        return {}

    def restore(
        self,
        group: RestoredGroup,
        carry: SamplerCarry,
        actions: tuple[np.ndarray, ...],
        log: EnvLog,
    ) -> list[str]:
        """Replay the open episodes side by side, so that they end at the same step: see `Rows`."""
        for checked, episode in zip(self.envs, carry.episodes.tolist(), strict=True):
            checked.episode = episode
        if not actions:
            return [NO_REPLAY] * len(self.envs)
        for checked in self.envs:
            checked.episode -= 1  # the reset of the replay begins the next one
        self._replay(group, carry, actions, log)
        differ = [
            (checked.episode, checked.length, checked.checksum())
            != (carry.episodes[env], carry.episode_lengths[env], carry.checksums[env])
            for env, checked in enumerate(self.envs)
        ]
        if self._joint.shared:
            differ = [any(differ)] * len(self.envs)
        for row, differs in zip(self._joint.rows, differ, strict=True):
            row.waiting = row.waiting and not differs
        reason = (
            "the replay ended in another state: the environment is not deterministic given its seed"
        )
        return [reason if differs else "" for differs in differ]

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
        lengths = np.array([len(row_actions) for row_actions in actions])
        longest = int(lengths.max())
        for row in self._joint.rows:
            row.first = None
            row.waiting = False
        for step in range(longest + 1):
            beginning = (
                range(num_envs) if step == 0 else np.flatnonzero(longest - lengths == step).tolist()
            )
            for env in beginning:
                group.begin_episode(env, int(carry.episodes[env]), replay_log)
            if step == longest:
                break
            # An index is negative before the episode of its row begins; any action will do there.
            indices = step - longest + lengths
            any_action = actions[lengths.argmax()][0]
            step_actions = [
                row_actions[max(0, index)] if len(row_actions) else any_action
                for row_actions, index in zip(actions, indices, strict=True)
            ]
            group.step((np.stack(step_actions), *results), replay_log)
            for _ in np.flatnonzero(indices >= 0):
                self.settings.progress.replay()
        log.incidents += replay_log.incidents

    def shown(self, env: int) -> np.ndarray:
        """Return the latest observation of a row; if the row waits, the first one of the episode that has ended."""
        checked = self.envs[env]
        return checked.first_obs if self._joint.rows[env].waiting else checked.last_obs

    def avoid(self, fatal: Sequence[FatalStep]) -> None:
        """Take all steps: a step of one row is a step of all."""

    def played_alone(self) -> list[CheckedEnv]:
        """Return all agents, or the first row of a vector, whose other rows have episodes of their own."""
        self._joint.once = True
        self._joint.next_seed = lambda _: 0
        return self.envs if self._joint.shared else self.envs[:1]

    def close(self) -> None:
        """Close the environment."""
        self._joint.close()
