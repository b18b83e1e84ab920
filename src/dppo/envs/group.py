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

from dppo.errors import EnvironmentFault
from dppo.ppo.segment import Episode, Incident, SamplerCarry
from dppo.spaces import BoxActions, DiscreteActions, Spaces

PACKAGE = str(Path(__file__).parents[1])
LARGEST = np.finfo(np.float32).max  # what an observation may be, for it travels as float32


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
    ) -> None:
        """
        Args:
            episode_seed: the seed of an episode, from the environment's index in the group and the episode's.
            owner: who these environments belong to, for error messages: "sampler 3 (CartPole-v1)".
        """
        self.num_envs = len(envs)
        self.obs_shape = spaces.obs_shape
        # Floats travel as float32: half the bytes, and what the model computes with.
        self.obs_dtype = np.dtype("float32" if spaces.obs_dtype == "float64" else spaces.obs_dtype)
        self._envs = envs
        self._spaces = spaces
        self._episode_seed = episode_seed
        self._owner = owner
        self._episodes = np.zeros(self.num_envs, np.int64)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._last_obs: list[np.ndarray] = [np.empty(0)] * self.num_envs
        self._finished: list[Episode] = []
        self._seconds = 0.0

    # ------------------------------------------------------------------ stepping

    def start(self, obs: np.ndarray) -> None:
        """Begin the first episode of each environment; write the observations into `obs` [E, *O]."""
        began = time.perf_counter()
        for env in range(self.num_envs):
            obs[env] = self._reset(env, 0)
        self._seconds += time.perf_counter() - began

    def step(
        self, actions: np.ndarray, obs: np.ndarray, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Step each environment; reset those that are done.

        Args:
            actions: [E, *A] as drawn by the policy.
            obs, rewards, terminated, truncated: rows [E, ...] to write; `obs` gets what the next action follows from.
        Returns: the final observation of each environment that was truncated and not terminated, by its index.
        Raises:
            EnvironmentFault: an environment raised, or returned something that is no observation or reward.
        """
        began = time.perf_counter()
        final_obs: dict[int, np.ndarray] = {}
        for env, action in enumerate(self._for_envs(actions)):
            seen, reward, terminated[env], truncated[env], info = self._step(env, action)
            rewards[env] = reward
            if terminated[env] or truncated[env]:
                if not terminated[env]:
                    final_obs[env] = seen.astype(self.obs_dtype)
                self._finish(env, info)
                seen = self._reset(env, int(self._episodes[env]) + 1)
            obs[env] = seen
        self._seconds += time.perf_counter() - began
        return final_obs

    def _for_envs(self, actions: np.ndarray) -> Any:
        """Actions as the environments want them: numbered from `start`, or clipped into the box (detail 27)."""
        space = self._spaces.actions
        if isinstance(space, DiscreteActions):
            return (actions + space.start).tolist() if space.start else actions.tolist()
        return _into_box(actions, space)

    def _step(self, env: int, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        try:
            raw, reward, terminated, truncated, info = self._envs[env].step(action)
            terminated, truncated = bool(terminated), bool(truncated)
        except (Exception, SystemExit) as error:
            raise self._fault(env, "step", error) from None
        seen = self._checked(env, raw, "step")
        reward = self._checked_reward(env, reward)
        self._returns[env] += reward
        self._lengths[env] += 1
        self._last_obs[env] = seen
        return seen, reward, terminated, truncated, info

    def _reset(self, env: int, episode: int) -> np.ndarray:
        """Begin an episode; the returned observation is the environment's own array."""
        self._episodes[env] = episode
        self._returns[env] = 0.0
        self._lengths[env] = 0
        try:
            raw, _ = self._envs[env].reset(seed=self._episode_seed(env, episode))
        except (Exception, SystemExit) as error:
            raise self._fault(env, "reset", error) from None
        self._last_obs[env] = seen = self._checked(env, raw, "reset")
        return seen

    def _finish(self, env: int, info: dict[str, Any]) -> None:
        success = info.get("is_success") if isinstance(info, dict) else None
        self._finished.append(
            Episode(
                env=env,
                index=int(self._episodes[env]),
                episode_return=float(self._returns[env]),
                length=int(self._lengths[env]),
                success=None if success is None else bool(np.all(success)),
            )
        )

    # ------------------------------------------------------------------ bringing episodes back

    def restore(self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray) -> list[Incident]:
        """Bring back the open episodes that `carry` describes, by playing `actions` again.

        An episode that does not end up in the same observation and return is given up for a fresh one.

        Args:
            actions: for each environment [n, *A], the actions since its reset; empty: give all episodes up.
            obs: [E, *O] to write.
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
                        kind="replay_mismatch" if actions else "episode_abandoned",
                        env=env,
                        lost_steps=int(carry.episode_lengths[env]),
                        message=f"{self._owner}, env {env}: gave up episode {episode} after "
                        f"{int(carry.episode_lengths[env])} steps and began a fresh one: {reason}",
                    )
                )
                self._reset(env, episode + 1)
            obs[env] = self._last_obs[env]
        self._finished.clear()
        self._seconds += time.perf_counter() - began
        return incidents

    def _replay(self, env: int, carry: SamplerCarry, actions: np.ndarray) -> str | None:
        """Play an episode again; returns what went differently, None if nothing did."""
        self._reset(env, int(carry.episodes[env]))
        for number, action in enumerate(self._for_envs(actions)):
            _, _, terminated, truncated, _ = self._step(env, action)
            if terminated or truncated:
                return f"its replay ended after {number + 1} of {len(actions)} steps"
        if self._checksum(env) != int(carry.checksums[env]):
            return "its replay came to another observation or return; the environment does not follow from its seed"
        return None

    def open_episodes(self) -> dict[str, np.ndarray]:
        """Index, return, length and checksum of the open episodes [E], by their names in `SamplerCarry`."""
        return {
            "episodes": self._episodes.copy(),
            "episode_returns": self._returns.copy(),
            "episode_lengths": self._lengths.copy(),
            "checksums": np.array([self._checksum(env) for env in range(self.num_envs)], np.uint32),
        }

    def _checksum(self, env: int) -> int:
        """Of the newest observation, as the environment gave it, and of the return so far."""
        return zlib.crc32(self._returns[env].tobytes(), zlib.crc32(np.ascontiguousarray(self._last_obs[env]).tobytes()))

    # ------------------------------------------------------------------ figures

    def take_episodes(self) -> tuple[Episode, ...]:
        """Episodes that ended since the last call, in the order of their ends."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def take_time(self) -> float:
        """Seconds spent in the environments since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Close every environment; one that fails to close does not keep the others open."""
        for env in self._envs:
            try:
                env.close()
            except Exception:
                traceback.print_exc()

    # ------------------------------------------------------------------ faults

    def _checked(self, env: int, raw: Any, phase: str) -> np.ndarray:
        """`raw` as an observation.

        Raises:
            EnvironmentFault: another shape or kind of number than the space's, or not finite.
        """
        try:
            obs = np.asarray(raw)
        except ValueError as error:  # ragged
            raise self._bad(env, phase, f"an observation that is no array ({error})") from None
        if obs.shape != self.obs_shape:
            raise self._bad(env, phase, f"an observation of shape {obs.shape}, its space says {self.obs_shape}")
        if obs.dtype != self.obs_dtype and not np.can_cast(obs.dtype, self.obs_dtype, "same_kind"):
            raise self._bad(env, phase, f"an observation of {obs.dtype}, its space says {self._spaces.obs_dtype}")
        if obs.dtype.kind == "f":
            flat = obs.ravel()
            # A tenth of the time of isfinite on so few numbers; what looks large is looked at again.
            if not flat.dot(flat) <= LARGEST:
                wrong = np.flatnonzero(~(np.abs(flat) <= LARGEST))
                if len(wrong):
                    raise self._bad(env, phase, f"an observation that is {flat[wrong[0]]} at index {int(wrong[0])}")
        return obs

    def _checked_reward(self, env: int, raw: Any) -> float:
        try:
            reward = float(raw)
        except (TypeError, ValueError):
            raise self._bad(env, "step", f"{raw!r} as the reward, which is no number") from None
        if reward - reward != 0:  # nan or infinite
            raise self._bad(env, "step", f"{reward} as the reward")
        return reward

    def _bad(self, env: int, phase: str, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._where(env, phase)} returned {what}.")

    def _fault(self, env: int, phase: str, error: BaseException) -> EnvironmentFault:
        summary = "".join(traceback.format_exception_only(error)).strip()
        return EnvironmentFault(f"{self._where(env, phase)} raised {summary}", user_traceback(error))

    def _where(self, env: int, phase: str) -> str:
        episode = int(self._episodes[env])
        step = int(self._lengths[env]) + (phase == "step")
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
    """The traceback of `error` from the first frame outside this package on: the user's own."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
