"""JointGroup: the environments of a sampler are rows of one environment, which steps all of them at once."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from dppo.envs.group import EnvGroup
from dppo.envs.make import close_all
from dppo.envs.repairs import FIRST_STEPS
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MASK, Spaces


class Row:
    """One row of a `JointEnv`, in the place of an environment of a group."""

    def __init__(self, joint: "JointEnv", index: int) -> None:
        self.index, self.joint = index, joint
        self.answer: Any = None  # of its next `step`: what it returns, or an exception
        self.first: Any = None  # of its next `reset`, if that has been made
        self.present = True  # False: its last step was none, but a mere reset, or its agent is not there
        self.waiting = False  # its episode has ended, and the next one begins in a later step
        self.restarts, self.is_open = -1, True
        self.kept: Any = None  # observation of its last reset, and an info with the mask

    def __getattr__(self, name: str) -> Any:
        if name in ("observation_space", "action_space", "spec", "unread_masks"):
            return getattr(self.joint, name)
        raise AttributeError(name)

    def step(self, _: Any) -> Any:
        """Return what the joint step has given for this row."""
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; raise ValueError for options, which cannot be given to one row."""
        if options is not None:
            raise ValueError(f"options={options} of a reset are not for environments of several rows")
        if self.first is None:
            try:
                self.joint.begin(self, seed)
            except BaseException as error:
                self.joint.error = error
                raise
        (seen, info), self.first, self.waiting = self.first, None, False
        masked = isinstance(info, dict) and MASK in info  # it may be None, and hold what cannot be copied
        self.kept = deepcopy((seen, {MASK: info[MASK]} if masked else {}))
        self.restarts = self.joint.restarts
        return self.kept

    def stand_still(self, *, ended: bool = False) -> None:
        """Take a step that is none, with the observation of the last reset."""
        self.answer, self.present = (self.kept[0], 0.0, ended, False, self.kept[1]), False

    def close(self) -> None:
        """Close the environment, if it is broken or this is its last row."""
        self.is_open = False
        self.joint.close()


class JointEnv(ABC):
    """An environment that steps E rows at once."""

    observation_space: Any
    action_space: Any
    spec: Any = None
    shared = False
    """True if the rows have their episodes in common."""
    unread_masks = False  # the environments in it have a method for masks, which nobody calls
    once = False  # no episode follows when all rows have ended theirs
    next_seed: Callable[[int], int]
    """The seed of the next episode of a row."""

    def __init__(self, made: Any, make: Callable[[], "JointEnv"], num_rows: int) -> None:
        self.env, self._make = made, make
        self.rows = [Row(self, index) for index in range(num_rows)]
        self.restarts = 0  # of all rows at once, which end their episodes
        self.error: BaseException | None = None  # that broke it
        self.last: Any = None  # observations of all rows; None before the first reset

    @abstractmethod
    def step(self, actions: Sequence[Any]) -> None:
        """Step each row with its action; fill in their answers, and the resets that follow."""

    @abstractmethod
    def begin(self, row: Row, seed: int) -> None:
        """Reset a row, and others if they cannot be left alone."""

    def again(self, index: int) -> Row:
        """Return a row that failed; if that has broken the environment, of another one."""
        if self.env is None:
            fresh = self._make()
            self.env, self.last, self.restarts = fresh.env, None, self.restarts + 1
            self.observation_space, self.action_space = fresh.observation_space, fresh.action_space
            for row in self.rows:
                row.first, row.is_open = None, True
        self.rows[index].is_open = True
        return self.rows[index]

    def close(self) -> None:
        """Close the environment, if it is broken or all of its rows are closed."""
        if self.env is not None and (self.error is not None or not any(row.is_open for row in self.rows)):
            closing, self.env, self.error = self.env, None, None
            close_all([closing])


class JointGroup(EnvGroup):
    """Step all rows at once, then let `EnvGroup` take the step of each."""

    def __init__(self, joint: JointEnv, envs: list[Any], spaces: Spaces, **settings: Any) -> None:
        """Take over `joint`, whose rows are `envs`; `settings` are those of an `EnvGroup`."""
        seed = settings["episode_seed"]
        settings["episode_seed"] = (lambda _, episode: seed(0, episode)) if joint.shared else seed
        super().__init__(envs, spaces, **settings)
        self._joint, self._reset = joint, self._begun
        self._firsts = np.empty(self.num_envs, self.obs)  # the first observation of the latest episode of each
        joint.next_seed = lambda env: settings["episode_seed"](env, self._envs[env].episode + 1)
        for one in self._envs:
            one.episode = -1
            one.alone = False

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log: EnvLog,
    ) -> dict[int, np.ndarray]:
        """Step all rows. Those that stood still are dropped; those that are interrupted by a restart are cut off."""
        began, joint, known, one = time.perf_counter(), self._joint, len(log.episodes), self._envs[0]
        self._progress.enter(self._stepping, one.episode, one.length)
        try:
            one.guard.call(partial(joint.step, self._spaces.actions.each(actions)))
        except INTERRUPTIONS:
            raise
        except BaseException as error:  # it becomes the answer of the first row, and the others stand still
            for row in joint.rows:
                row.stand_still()
            joint.error = joint.rows[0].answer = error
            joint.rows[0].present = True
        log.seconds += time.perf_counter() - began
        final_obs = super().step(actions, obs, rewards, terminated, truncated, log)
        log.episodes[known:] = [one for one in log.episodes[known:] if joint.rows[one.env].present]
        for env, row in enumerate(joint.rows):
            goes_on = not (terminated[env] or truncated[env])
            if not row.present:
                rewards[env], terminated[env], truncated[env], goes_on = 0.0, False, True, not row.waiting
                final_obs.pop(env, None)
                log.dropped.append(env)
            if row.restarts != joint.restarts:
                if row.present and goes_on:
                    truncated[env], final_obs[env] = True, obs[env].copy()
                obs[env] = self._restarted(row, log, lost=goes_on)
        return final_obs

    def _restarted(self, row: Row, log: EnvLog, *, lost: bool) -> np.ndarray:
        """Begin the next episode of a row after another one has failed, so that all begin anew."""
        env, one, row.waiting = row.index, self._envs[row.index], False
        if lost:
            what = f"{self._owner}, env {env}: abandoned episode {one.episode} after {one.length} steps"
            what += ": all rows of its environment were restarted"
            log.incidents.append(Incident(IncidentKind.EPISODE_ABANDONED, what, env=env, lost_steps=one.length))
        episode = max(each.episode for each in self._envs) if self._joint.shared else one.episode + 1
        return self._begin_episode(env, episode, log)

    def _begin_episode(self, env: int, episode: int, log: EnvLog) -> np.ndarray:
        row = self._joint.rows[env]
        waits = row.waiting and row.first is None
        return np.asarray(self._firsts[env]) if waits else super()._begin_episode(env, episode, log)

    def _begun(self, env: int, episode: int, options: dict[str, Any] | None) -> np.ndarray:
        self._firsts[env] = seen = self._envs[env].reset(episode, options)
        return seen

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes, all of them side by side, so that they end at the same step."""
        began = time.perf_counter()
        for one, episode in zip(self._envs, carry.episodes.tolist(), strict=True):
            one.episode = episode - bool(actions)
        if actions:
            self._replay_all(carry, actions, log)
        log.seconds += time.perf_counter() - began
        self._progress.replay_s += time.perf_counter() - began
        incidents = super().restore(carry, actions, obs, log)
        waiting = [row.index for row in self._joint.rows if row.waiting]
        obs[waiting] = self._firsts[waiting]
        return incidents

    def _replay_all(self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], log: EnvLog) -> None:
        lengths, replay = np.array([len(own) for own in actions]), EnvLog(index=log.index, step=FIRST_STEPS)
        longest, number = int(lengths.max()), self.num_envs
        arrays = np.empty(number, self.obs), np.empty(number), np.empty(number, bool), np.empty(number, bool)
        for row in self._joint.rows:
            row.first, row.waiting = None, False
        for at in range(longest + 1):
            for env in range(number) if at == 0 else np.flatnonzero(longest - lengths == at).tolist():
                self._begin_episode(env, int(carry.episodes[env]), replay)
            if at < longest:
                numbers = at - longest + lengths  # before 0, the actions are any: the episode begins later
                own = [
                    actions[env][max(0, n)] if lengths[env] else actions[lengths.argmax()][0]
                    for env, n in enumerate(numbers)
                ]
                self.step(np.stack(own), *arrays, replay)
                for _ in np.flatnonzero(numbers >= 0):
                    self._progress.replay()
        log.incidents += replay.incidents

    def _replay(self, env: int, carry: SamplerCarry, actions: np.ndarray, options: Any, log: EnvLog) -> str:
        """Return how the replay of all rows differs in this one, or in any where they share their episodes."""
        for each in range(self.num_envs) if self._joint.shared else (env,):
            one = self._envs[each]
            before = carry.episodes[each], carry.episode_lengths[each], carry.checksums[each]
            if (one.episode, one.length, one.checksum()) != before:
                self._joint.rows[env].waiting = False
                return "the replay ended in another state: the environment is not deterministic given its seed"
        return ""
