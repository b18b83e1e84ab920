"""EnvGroup: E single environments stepped as one, in which each keeps its own episodes and its own faults."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.make import close_all
from dppo.envs.packing import BadObservation, packer
from dppo.errors import EnvironmentFault
from dppo.ppo.progress import Phase, ProgressRecord, place_of
from dppo.ppo.segment import EnvLog, Episode, Incident, IncidentKind, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.spaces import BoxActions, DiscreteActions, Spaces

PACKAGE = str(Path(__file__).parents[1])
OLD_API = (
    ": an environment for Gym before 0.26. Let reset take a seed and return (observation, info), or wrap it with "
    "shimmy.GymV21CompatibilityV0"
)


class EnvGroup:
    """Steps E environments in turn and resets each in the same step in which it is done.

    Every episode begins with `reset(seed=episode_seed(env, episode))`, so that it can be played again anywhere.
    """

    def __init__(
        self,
        envs: list[gym.Env[Any, Any]],
        spaces: Spaces,
        *,
        episode_seed: Callable[[int, int], int],
        owner: str,
        sampler_id: int = 0,
        progress: ProgressRecord | None = None,
    ) -> None:
        """Args:
        episode_seed: the seed of an episode, from the environment's index in the group and the episode's.
        owner: who these environments belong to, for error messages: "sampler 3 (CartPole-v1)".
        sampler_id, progress: where to record each step, reset and replay, and for which sampler.
        """
        self.num_envs = len(envs)
        self.obs = spaces.obs
        self._envs = envs
        self._actions = spaces.actions
        self._pack = packer(spaces.obs, one_of=spaces.one_of, dropped=spaces.dropped)
        self._episode_seed = episode_seed
        self._owner = owner
        self._sampler_id = sampler_id
        self._progress = progress or ProgressRecord()
        self._stepping = place_of(Phase.STEP, sampler_id)
        # Lists: an array takes three times as long to read or write one number of.
        self._episodes = [0] * self.num_envs
        self._returns = [0.0] * self.num_envs
        self._lengths = [0] * self.num_envs
        self._last_obs: list[np.ndarray] = [np.empty(0)] * self.num_envs

    # ------------------------------------------------------------------ stepping

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Begin the first episode of each environment; write the observations into `obs` [E, *O]."""
        began = time.perf_counter()
        for env in range(self.num_envs):
            obs[env] = self._reset(env, 0)
        log.seconds += time.perf_counter() - began

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log: EnvLog,
    ) -> dict[int, np.ndarray]:
        """Step each environment; reset those that are done.

        Args:
            actions: [E, *A] as drawn by the policy.
            obs, rewards, terminated, truncated: rows [E, ...] to write; `obs` gets what the next action follows from.
            log: gets the episodes that end, and the time.
        Returns: the final observation of each environment that was truncated and not terminated, by its index.

        Raises:
            EnvironmentFault: an environment raised, or returned an invalid observation or reward.
        """
        began = time.perf_counter()
        self._progress.enter(self._stepping)
        final_obs: dict[int, np.ndarray] = {}
        for env, action in enumerate(self._for_envs(actions)):
            seen, rewards[env], ended, cut, info = self._step(env, action)
            terminated[env], truncated[env] = ended, cut
            if ended or cut:
                if not ended:
                    final_obs[env] = np.empty((), self.obs)
                    final_obs[env][...] = seen
                log.episodes.append(self._finished(env, info))
                seen = self._reset(env, self._episodes[env] + 1)
            obs[env] = seen
        log.seconds += time.perf_counter() - began
        return final_obs

    def _for_envs(self, actions: np.ndarray) -> Any:
        """Return actions of the action space: numbered from `start`, or clipped into the box (detail 27)."""
        space = self._actions
        if isinstance(space, DiscreteActions):
            return (actions + space.start).tolist() if space.start else actions.tolist()
        return _into_box(actions, space)

    def _step(self, env: int, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        try:
            raw, reward, terminated, truncated, info = self._envs[env].step(action)
            terminated, truncated = bool(terminated), bool(truncated)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            raise self._fault(env, "step", error) from None
        try:
            seen = self._pack(raw)
        except BadObservation as error:
            raise self._bad(env, "step", str(error)) from None
        reward = self._checked_reward(env, reward)
        self._returns[env] += reward
        self._lengths[env] += 1
        self._last_obs[env] = seen
        return seen, reward, terminated, truncated, info

    def _reset(self, env: int, episode: int) -> np.ndarray:
        """Begin an episode; the returned array is never written again."""
        self._progress.enter(place_of(Phase.RESET, self._sampler_id, env))
        self._episodes[env] = episode
        self._returns[env] = 0.0
        self._lengths[env] = 0
        try:
            answer = self._envs[env].reset(seed=self._episode_seed(env, episode))
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            raise self._fault(env, "reset", error) from None
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self._bad(env, "reset", f"{type(answer).__name__} instead of (observation, info){OLD_API}")
        try:
            self._last_obs[env] = seen = self._pack(answer[0])
        except BadObservation as error:
            raise self._bad(env, "reset", str(error)) from None
        return seen

    def _finished(self, env: int, info: dict[str, Any]) -> Episode:
        success = info.get("is_success") if isinstance(info, dict) else None
        return Episode(
            env=env,
            index=self._episodes[env],
            episode_return=self._returns[env],
            length=self._lengths[env],
            success=None if success is None else bool(np.all(success)),
        )

    # ------------------------------------------------------------------ bringing episodes back

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Bring back the open episodes that `carry` describes, by playing `actions` again.

        An episode that does not end up in the same observation and return is given up for a fresh one.

        Args:
            actions: for each environment [n, *A], the actions since its reset; empty: give all episodes up.
            obs: [E, *O] to write.
            log: gets the time; episodes are not added to it again.
        Returns: one incident for each episode given up.
        """
        began = time.perf_counter()
        incidents = []
        for env in range(self.num_envs):
            episode = int(carry.episodes[env])
            reason = (
                "replay is off, or cannot be trusted here" if not actions else self._replay(env, carry, actions[env])
            )
            if reason:
                incidents.append(
                    Incident(
                        kind=IncidentKind.REPLAY_MISMATCH if actions else IncidentKind.EPISODE_ABANDONED,
                        env=env,
                        lost_steps=int(carry.episode_lengths[env]),
                        message=f"{self._owner}, env {env}: gave up episode {episode} after "
                        f"{int(carry.episode_lengths[env])} steps and began a fresh one: {reason}",
                    )
                )
                self._reset(env, episode + 1)
            obs[env] = self._last_obs[env]
        seconds = time.perf_counter() - began
        log.seconds += seconds
        self._progress.replay_s += seconds
        return incidents

    def _replay(self, env: int, carry: SamplerCarry, actions: np.ndarray) -> str | None:
        """Play an episode again; return the difference to the first time, None if there is none."""
        self._reset(env, int(carry.episodes[env]))
        self._progress.enter(place_of(Phase.REPLAY, self._sampler_id, env))
        for number, action in enumerate(self._for_envs(actions)):
            _, _, terminated, truncated, _ = self._step(env, action)
            self._progress.replay()
            if terminated or truncated:
                return f"its replay ended after {number + 1} of {len(actions)} steps"
        if self._checksum(env) != int(carry.checksums[env]):
            return "its replay came to another observation or return; the environment does not follow from its seed"
        return None

    def open_episodes(self) -> dict[str, np.ndarray]:
        """Return index, return, length and checksum of the open episodes [E], by their names in `SamplerCarry`."""
        return {
            "episodes": np.array(self._episodes, np.int64),
            "episode_returns": np.array(self._returns, np.float64),
            "episode_lengths": np.array(self._lengths, np.int64),
            "checksums": np.array([self._checksum(env) for env in range(self.num_envs)], np.uint32),
        }

    def _checksum(self, env: int) -> int:
        """Return the checksum of the newest observation, as the environment gave it, and of the return so far."""
        return zlib.crc32(np.float64(self._returns[env]).tobytes(), zlib.crc32(self._last_obs[env].tobytes()))

    def close(self) -> None:
        """Close every environment; one that fails to close does not keep the others open."""
        close_all(self._envs)

    # ------------------------------------------------------------------ faults

    def _checked_reward(self, env: int, raw: Any) -> float:
        try:
            reward = float(raw)
        except (TypeError, ValueError):
            raise self._bad(env, "step", f"{raw!r} as the reward, which is not a number") from None
        except OverflowError:
            raise self._bad(env, "step", "a reward that is too large for a float") from None
        if reward - reward != 0:  # nan or infinite
            raise self._bad(env, "step", f"{reward} as the reward")
        return reward

    def _bad(self, env: int, phase: str, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._where(env, phase)} returned {what}.")

    def _fault(self, env: int, phase: str, error: BaseException) -> EnvironmentFault:
        summary = "".join(traceback.format_exception_only(error)).strip()
        if phase == "reset" and isinstance(error, TypeError) and "'seed'" in str(error):
            summary += OLD_API
        return EnvironmentFault(f"{self._where(env, phase)} raised {summary}", user_traceback(error))

    def _where(self, env: int, phase: str) -> str:
        episode = self._episodes[env]
        step = self._lengths[env] + (phase == "step")
        return (
            f"{self._owner}, env {env}: {phase} of episode {episode} (seed {self._episode_seed(env, episode)}, "
            f"step {step})"
        )


def _into_box(actions: np.ndarray, space: BoxActions) -> np.ndarray:
    """[n, size] as drawn -> [n, *A] inside the box, in its dtype; a fresh array that the environment may keep."""
    shaped = actions.reshape(len(actions), *space.shape)
    clipped: np.ndarray = np.clip(shaped, space.low, space.high).astype(space.low.dtype)
    return clipped


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error` from the first frame outside this package on: the user's own."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
