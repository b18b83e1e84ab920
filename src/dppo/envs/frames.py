"""Wrappers that prepare frames: repeat actions, watch the lives of games of Atari, stack images."""

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Repeat each action, sum the rewards, and return the last observation; stop where an episode ends."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        """Take up to `times` steps, each with a copy of the action, which an environment may change in place."""
        total: Any = 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(deepcopy(action))
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


FIRE = 1  # the number of the action in all games that have it


class Lives(gym.Wrapper[Any, Any, Any, Any]):
    """Press FIRE at the start of each life, where a game has that button, and note when a life is lost.

    The episode goes on, so that it can be replayed from its seed. Source: baselines' EpisodicLifeEnv, FireResetEnv.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._game: Any = env.unwrapped
        self._fires = self._game.get_action_meanings()[1:2] == ["FIRE"]
        self._lives = 0
        self.lost_life = False
        """The last step lost a life, and the game goes on."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start a game."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.lost_life = False
        self._lives = 0
        if self._fires:
            obs, *_, info = self.step(FIRE)
        else:
            self._lives = self._game.ale.lives()
        return obs, info

    def step(self, action: Any) -> Any:
        """Take a step, and another one to start the next life."""
        reward: Any
        obs, reward, terminated, truncated, info = self.env.step(action)
        goes_on = not (terminated or truncated)
        self.lost_life = goes_on and 0 < self._game.ale.lives() < self._lives
        if self.lost_life and self._fires:
            obs, reward_of_fire, terminated, truncated, info = self.env.step(FIRE)
            reward += reward_of_fire
            self.lost_life = not (terminated or truncated)
        self._lives = self._game.ale.lives()
        return obs, reward, terminated, truncated, info


class LifeStack(FrameStackObservation[Any, Any, Any]):
    """Stack frames; a new life starts with copies of its first frame, as an episode does."""

    @property
    def lost_life(self) -> bool:
        """The last step lost a life."""
        return isinstance(self.env, Lives) and self.env.lost_life

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode."""
        answer = super().reset(seed=seed, options=options)
        # the environment may reuse its own
        self.obs_queue.extend([np.array(self.obs_queue[-1])] * self.stack_size)
        return answer

    def step(self, action: Any) -> Any:
        """Take a step."""
        stacked, *outcome = super().step(action)
        self.obs_queue[-1] = np.array(self.obs_queue[-1])
        if self.lost_life:
            self.obs_queue.extend([self.obs_queue[-1]] * self.stack_size)
            stacked = np.stack(self.obs_queue)
        return stacked, *outcome
