"""EnvGroup: the E environments of a sampler, stepped in turn; each has its own episodes, and errors name it."""

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
from dppo.envs.packing import packer
from dppo.envs.results import OLD_API, BadResult, describe_bad_reset, describe_bad_step, reward_of
from dppo.errors import EnvironmentFault
from dppo.ppo.progress import Phase, ProgressRecord, place_of
from dppo.ppo.segment import EnvLog, Episode, Incident, IncidentKind, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.spaces import BoxActions, DiscreteActions, Spaces

PACKAGE = str(Path(__file__).parents[1])


class EnvGroup:
    """Step E environments in turn, and reset each in the same step in which its episode ends.

    Every episode starts with `reset(seed=episode_seed(env, episode))`, so that any process can replay it.
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
        """Take over `envs`.

        Args:
            episode_seed: returns the seed of an episode, given the index of the environment and of the episode.
            owner: prefix of error messages: "sampler 3 (CartPole-v1)".
            progress: record of each step, reset and replay, under `sampler_id`.
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
        # Lists, because reading or writing one element of an array takes three times as long.
        self._episodes = [0] * self.num_envs
        self._returns = [0.0] * self.num_envs
        self._lengths = [0] * self.num_envs
        self._last_obs: list[np.ndarray] = [np.empty(0)] * self.num_envs

    # ------------------------------------------------------------------ stepping

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Start the first episode of each environment; write the observations to `obs` [E, *O]."""
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
        """Step each environment; reset those whose episode ends.

        Args:
            actions: [E, *A] as sampled from the policy.
            obs, rewards, terminated, truncated: rows [E, ...] to write; `obs` receives the observations for the next
                action.
            log: receives the episodes that end, and the time.

        Returns:
            The final observation of each environment that was truncated and not terminated, by its index.

        Raises:
            EnvironmentFault: an environment raised, or returned an invalid observation or reward.
        """
        began = time.perf_counter()
        self._progress.enter(self._stepping)
        final_obs: dict[int, np.ndarray] = {}
        for env, action in enumerate(self._for_envs(actions)):
            seen, rewards[env], ended, cut, info = self._step(env, action)
            self._progress.stepped()
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
        """Convert actions to the action space: add `start`, or clip to the box (detail 27)."""
        space = self._actions
        if isinstance(space, DiscreteActions):
            return (actions + space.start).tolist() if space.start else actions.tolist()
        return _into_box(actions, space)

    def _step(self, env: int, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        try:
            answer = self._envs[env].step(action)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            raise self._fault(env, "step", error) from None
        try:
            raw, reward, terminated, truncated, info = answer
            terminated, truncated = bool(terminated), bool(truncated)
        except Exception:
            raise self._bad(env, "step", describe_bad_step(answer)) from None
        try:
            seen, reward = self._pack(raw), reward_of(reward)
        except BadResult as error:
            raise self._bad(env, "step", str(error)) from None
        self._returns[env] += reward
        self._lengths[env] += 1
        self._last_obs[env] = seen
        return seen, reward, terminated, truncated, info

    def _reset(self, env: int, episode: int) -> np.ndarray:
        """Start an episode. Nothing writes to the returned array again."""
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
        problem = describe_bad_reset(answer)
        if problem:
            raise self._bad(env, "reset", problem)
        try:
            self._last_obs[env] = seen = self._pack(answer[0])
        except BadResult as error:
            raise self._bad(env, "reset", f"{error}{'' if isinstance(answer[1], dict) else OLD_API}") from None
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

    # ------------------------------------------------------------------ replay

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes by replaying `actions`.

        An episode whose replay ends with another observation or return is abandoned, and a new one starts.

        Args:
            actions: for each environment [n, *A], the actions since its reset; empty to abandon all episodes.
            obs: [E, *O] to write.
            log: receives the time, but no episodes.

        Returns:
            One incident for each abandoned episode.
        """
        began = time.perf_counter()
        incidents = []
        for env in range(self.num_envs):
            episode = int(carry.episodes[env])
            reason = (
                "replay is off, or the environment is nondeterministic"
                if not actions
                else self._replay(env, carry, actions[env])
            )
            if reason:
                incidents.append(
                    Incident(
                        kind=IncidentKind.REPLAY_MISMATCH if actions else IncidentKind.EPISODE_ABANDONED,
                        env=env,
                        lost_steps=int(carry.episode_lengths[env]),
                        message=f"{self._owner}, env {env}: abandoned episode {episode} after "
                        f"{int(carry.episode_lengths[env])} steps and started a new one: {reason}",
                    )
                )
                self._reset(env, episode + 1)
            obs[env] = self._last_obs[env]
        seconds = time.perf_counter() - began
        log.seconds += seconds
        self._progress.replay_s += seconds
        return incidents

    def _replay(self, env: int, carry: SamplerCarry, actions: np.ndarray) -> str | None:
        """Replay an episode; return how it differs from the first time, None if it does not."""
        self._reset(env, int(carry.episodes[env]))
        self._progress.enter(place_of(Phase.REPLAY, self._sampler_id, env))
        for number, action in enumerate(self._for_envs(actions)):
            _, _, terminated, truncated, _ = self._step(env, action)
            self._progress.replay()
            if terminated or truncated:
                return f"the replay ended after {number + 1} of {len(actions)} steps"
        if self._checksum(env) != int(carry.checksums[env]):
            return (
                "the replay produced another observation or return: the environment is not deterministic given its seed"
            )
        return None

    def open_episodes(self) -> dict[str, np.ndarray]:
        """Return index, return, length and checksum of the open episodes [E], under their names in `SamplerCarry`."""
        return {
            "episodes": np.array(self._episodes, np.int64),
            "episode_returns": np.array(self._returns, np.float64),
            "episode_lengths": np.array(self._lengths, np.int64),
            "checksums": np.array([self._checksum(env) for env in range(self.num_envs)], np.uint32),
        }

    def _checksum(self, env: int) -> int:
        """Return a checksum of the latest observation, as the environment returned it, and of the return so far."""
        return zlib.crc32(np.float64(self._returns[env]).tobytes(), zlib.crc32(self._last_obs[env].tobytes()))

    def close(self) -> None:
        """Close every environment, also if some fail to close."""
        close_all(self._envs)

    # ------------------------------------------------------------------ faults

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
    """Reshape and clip actions [n, size] to the box [n, *A]; a new array, which the environment may keep."""
    shaped = actions.reshape(len(actions), *space.shape)
    clipped: np.ndarray = np.clip(shaped, space.low, space.high).astype(space.low.dtype)
    return clipped


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, starting at the first frame outside this package."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
