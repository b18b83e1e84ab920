"""CheckedEnv: one environment with its open episode; every result is checked, and errors name the place."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.faults import BadStep, user_traceback
from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.checks.results import (
    LARGEST_REWARD,
    LOWEST_REWARD,
    OLD_API,
    BadResult,
    describe_bad_reset,
    describe_bad_step,
    flag_of,
    reward_of,
)
from dppo.envs.masks import MaskReader
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import Episode
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MASK
from dppo.user_code import in_a_line


class CheckedEnv:
    """Step and reset one environment of a group, check what it returns, and keep count of its open episode."""

    __slots__ = (
        "_checks",
        "_each_step",
        "_env",
        "_episode_seed",
        "_index",
        "_masks",
        "_owner",
        "episode",
        "episode_return",
        "last_obs",
        "length",
        "offers_mask",
        "pack",
    )

    def __init__(
        self,
        env: gym.Env[Any, Any],
        index: int,
        owner: str,
        checks: SpaceChecks,
        *,
        pack: Callable[[Any], np.ndarray],
        masks: MaskReader | None,
        each_step: bool,
        episode_seed: Callable[[int, int], int],
    ) -> None:
        """Take over `env`, which has no episode yet.

        Args:
            index: of the environment in its group.
            owner: prefix of error messages.
            checks: of the spaces of the group.
            pack: converts an observation to the form in which it is stored; the caller may replace it later.
            masks: reads action masks, which are stored with observations; None if there are none.
            each_step: check the limits of the space at each step and reset.
            episode_seed: returns the seed of an episode, given the index of the environment and of the episode.
        """
        self._env, self._index = env, index
        self._checks, self._each_step = checks, each_step
        self._episode_seed, self._owner, self._masks = episode_seed, owner, masks
        self.pack = pack
        self.episode, self.episode_return, self.length = 0, 0.0, 0
        self.offers_mask = False  # the info of a reset held an action mask
        self.last_obs = np.empty(0)  # as the environment returned it; nothing writes to it again

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step the environment, and return the observation, reward, terminated, truncated and info.

        Raises:
            EnvironmentFault: it raised.
            BadStep: it returned an invalid result.
        """
        try:
            answer: Any = self._env.step(action)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            raise self._fault("step", error) from None
        try:
            raw, reward, terminated, truncated, info = answer
            # The first line answers for almost every step, in the shortest time.
            if (terminated is not False or truncated is not False) and not (
                type(terminated) is bool and type(truncated) is bool
            ):
                terminated, truncated = flag_of(terminated), flag_of(truncated)
        except Exception:
            raise self._bad("step", describe_bad_step(answer)) from None
        try:
            seen = self.pack(raw)
            if type(reward) is not float or not LOWEST_REWARD <= reward <= LARGEST_REWARD:
                reward = reward_of(reward)
            if self._each_step:
                self._checks.check_limits(seen)
        except BadResult as error:
            raise self._bad("step", str(error)) from None
        if self._masks is not None:
            seen = self._masked(self._masks, "step", seen, info, ended=terminated or truncated)
        self.episode_return += reward
        self.length += 1
        self.last_obs = seen
        return seen, reward, terminated, truncated, info

    def reset(self, episode: int) -> np.ndarray:
        """Start the episode with this index, and return its first observation.

        Raises:
            EnvironmentFault: the environment raised, or its spaces have changed.
            BadStep: it returned an invalid observation.
        """
        self.episode, self.episode_return, self.length = episode, 0.0, 0
        try:
            answer = self._env.reset(seed=self._episode_seed(self._index, episode))
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            raise self._fault("reset", error) from None
        problem = describe_bad_reset(answer)
        if problem:
            raise EnvironmentFault(f"{self._here('reset')} returned {problem}.")
        problem = self._checks.change(self._index, self._env)
        if problem:
            raise EnvironmentFault(f"{self._here('reset')} {problem}")
        try:
            seen = self.pack(answer[0])
            if self._each_step:
                self._checks.check_limits(seen)
        except BadResult as error:
            raise self._bad("reset", f"{error}{'' if isinstance(answer[1], dict) else OLD_API}") from None
        if self._masks is not None:
            seen = self._masked(self._masks, "reset", seen, answer[1], ended=False)
        self.offers_mask = isinstance(answer[1], dict) and MASK in answer[1]
        self.last_obs = seen
        return seen

    def _masked(self, masks: MaskReader, phase: str, seen: np.ndarray, info: Any, *, ended: bool) -> np.ndarray:
        """Return an observation with the mask of its state, as both are stored."""
        try:
            return masks.beside(seen, info, ended=ended)
        except INTERRUPTIONS:
            raise
        except BadResult as error:
            raise self._bad(phase, str(error)) from None
        except BaseException as error:
            raise self._fault(phase, error) from None

    def checked_final(self, seen: np.ndarray) -> np.ndarray:
        """Return the last observation of an episode as it is stored.

        It is not part of the segment, and so checked alone.

        Raises:
            BadStep: nothing can be learnt from it.
        """
        returned = seen if self._masks is None else self._masks.as_returned(seen)
        stored = self._checks.stored(returned)
        outside = self._checks.outside(stored[None])
        if outside is not None and outside.fatal:
            raise BadStep(f"{self.place(self.episode, self.length)} returned {outside.what}.")
        return stored if returned is seen else seen

    def finished(self, info: Any) -> Episode:
        """Describe the open episode, which has ended with `info`."""
        success = info.get("is_success") if isinstance(info, dict) else None
        return Episode(
            env=self._index,
            index=self.episode,
            episode_return=self.episode_return,
            length=self.length,
            success=None if success is None else bool(np.all(success)),
        )

    def checksum(self) -> int:
        """Return a checksum of the latest observation, as the environment returned it, and of the return so far."""
        return zlib.crc32(np.float64(self.episode_return).tobytes(), zlib.crc32(self.last_obs.tobytes()))

    def place(self, episode: int, step: int) -> str:
        """Name a step of an episode of this environment in a message; step 0 is the reset."""
        seed = self._episode_seed(self._index, episode)
        phase = "step" if step else "reset"
        return f"{self._owner}, env {self._index}: {phase} of episode {episode} (seed {seed}, step {step})"

    def _here(self, phase: str) -> str:
        return self.place(self.episode, self.length + (phase == "step"))

    def _bad(self, phase: str, what: str) -> BadStep:
        return BadStep(f"{self._here(phase)} returned {what}.")

    def _fault(self, phase: str, error: BaseException) -> EnvironmentFault:
        summary = in_a_line(error)
        if phase == "reset" and isinstance(error, TypeError) and "'seed'" in str(error):
            summary += OLD_API
        if phase == "step":
            try:
                last = self.last_obs
                self._checks.check_limits(last if self._masks is None else self._masks.as_returned(last))
            except BadResult as before:
                summary += f" (the environment had returned {before})"
        return EnvironmentFault(f"{self._here(phase)} raised {summary}", user_traceback(error))
