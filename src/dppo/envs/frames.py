"""Prepare frames by settings: repeat actions, turn images gray, resize and stack them; games of Atari; windows."""

import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, GrayscaleObservation, ResizeObservation

from dppo.envs.make import EnvId, close_all, in_wrappers, joint_kind, make_env, takes
from dppo.errors import ConfigError
from dppo.user_code import import_path, in_a_line

SETTINGS = {"wrappers": (), "atari": "raw", "action_repeat": 1, "grayscale": False, "resize": (), "frame_stack": 1}


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Repeat each action, sum the rewards, and return the last observation; stop where an episode ends."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        """Take up to `times` steps, each with an action of its own: an environment may change it in place."""
        total: Any = 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(deepcopy(action))
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class Lives(gym.Wrapper[Any, Any, Any, Any]):
    """Press FIRE at the start of each life, where a game has that button, and note when a life is lost.

    The episode goes on, so that it can be replayed from its seed. Source: baselines' EpisodicLifeEnv, FireResetEnv.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._game: Any = env.unwrapped
        self._fires = self._game.get_action_meanings()[1:2] == ["FIRE"]
        self._left, self.lost = 0, False
        """`lost`: the last step lost a life, and the game goes on."""

    def reset(self, **kwargs: Any) -> Any:
        """Start a game."""
        answer = self.env.reset(**kwargs)
        self._left, self.lost = 0 if self._fires else self._game.ale.lives(), False
        return self.step(1)[:5:4] if self._fires else answer

    def step(self, action: Any) -> Any:
        """Take a step, and another one to start the next life."""
        take: Any = self.env.step
        obs, reward, *ends, info = take(action)
        self.lost = 0 < self._game.ale.lives() < self._left and not any(ends)
        if self.lost and self._fires:
            obs, more, *ends, info = take(1)
            reward, self.lost = reward + more, not any(ends)
        self._left = self._game.ale.lives()
        return obs, reward, *ends, info


class LifeStack(FrameStackObservation[Any, Any, Any]):
    """Stack frames; a new life starts with copies of its first frame, as an episode does."""

    @property
    def lost(self) -> bool:
        """Return whether the last step lost a life."""
        return isinstance(self.env, Lives) and self.env.lost

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode."""
        answer = super().reset(**kwargs)
        self.obs_queue.extend([np.array(self.obs_queue[-1])] * self.stack_size)  # the environment may reuse its own
        return answer

    def step(self, action: Any) -> Any:
        """Take a step."""
        stacked, *others = super().step(action)
        self.obs_queue[-1] = np.array(self.obs_queue[-1])
        if self.lost:
            self.obs_queue.extend([self.obs_queue[-1]] * self.stack_size)
            stacked = np.stack(self.obs_queue)
        return stacked, *others


def make_prepared(
    env_id: EnvId, env_kwargs: dict[str, Any], settings: Mapping[str, Any], mode: str | None = None, **how: Any
) -> Any:
    """Return an environment, wrapped and with its frames prepared by those of `settings` in SETTINGS.

    It is made by `make_env`, which `how` is for; to be shown, in this render_mode. Raise ConfigError if a setting does
    not fit its observations, or OpenCV is missing.
    """
    make = partial(_made_rendered, mode=mode) if mode else make_env
    of = {name: settings[name] for name, off in SETTINGS.items() if settings.get(name, off) not in (off, [])}
    skips = "atari" in of and isinstance(env_id, str) and takes(env_id, "frameskip")
    more = {"frameskip": 1} if skips else {}
    env = make(env_id, more | env_kwargs, **how)
    if of and joint_kind(env):
        close_all([env])
        raise ConfigError(
            f"{next(iter(of))}: prepares single environments, and this one has several rows. Leave it out, and use "
            f"wrappers of gymnasium.wrappers.vector or supersuit where the environment is made."
        )
    env = in_wrappers(env, of.pop("wrappers", ()))
    for name, value in of.items():
        try:
            env = _wrapped(env, name, of)
        except (AssertionError, AttributeError, ImportError, TypeError, ValueError) as error:
            close_all([env])
            text = f"does not fit the environment ({in_a_line(error)}). Leave `{name}` out"
            if isinstance(error, ImportError):
                text = f"needs OpenCV. Install it: {sys.executable} -m pip install opencv-python-headless"
            shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
            raise ConfigError(f"{name}={shown}: {text}.") from None
    return env


def _made_rendered(env_id: EnvId, env_kwargs: dict[str, Any], mode: str, **how: Any) -> Any:
    """Make one environment as `make_env` does, in this render_mode, whatever `env_kwargs` say. Its own errors pass.

    Raise ConfigError if it is not one environment, or does not take a render_mode.
    """
    try:
        env = make_env(env_id, env_kwargs | {"render_mode": mode}, **how)
    except Exception as error:
        if "render_mode" not in str(error):
            raise
        fact = f"does not take it ({in_a_line(error)})"
    else:
        if getattr(env, "render_mode", None) is not None:
            return env
        close_all([env])
        fact = "returned an environment without it"
    setting = "video"
    otherwise = ""
    if mode == "human":
        setting = "render=True"
        otherwise = ", or leave `render` out, and let `env_kwargs` open the window"
    raise ConfigError(
        f"{setting}: passes render_mode={mode!r}, but {import_path(env_id)} {fact}. Accept render_mode as an argument "
        f"and pass it on to the environment{otherwise}."
    )


def _wrapped(env: Any, name: str, of: Mapping[str, Any]) -> Any:
    """Return `env` in the wrapper that the setting `name` asks for; the settings are applied in their order."""
    space, stack, size = env.observation_space, of.get("frame_stack", 1), tuple(of.get("resize", ()))
    axes = space.shape if isinstance(space, gym.spaces.Box) else None
    if name in ("atari", "resize"):
        import cv2

        cv2.setNumThreads(1)  # else it starts a thread for each CPU in each actor
    if name == "atari":
        options = {"frame_skip": of.get("action_repeat", 1), "grayscale_obs": "grayscale" in of}
        env = AtariPreprocessing(env, screen_size=size[::-1] or (160, 210), grayscale_newaxis=stack == 1, **options)
        return Lives(env) if of[name] == "life" else env
    if name == "frame_stack":
        if axes is None or len(axes) > 3:
            raise TypeError(f"only a Box of at most three axes is stacked, and this is {space}")
        return LifeStack(env, stack)
    if "atari" in of:  # which has done it
        return env
    if name == "action_repeat":
        return ActionRepeat(env, of[name])
    if name == "grayscale":
        return GrayscaleObservation(env, keep_dim=stack == 1)  # an image has an axis of channels
    if axes is not None and len(axes) == 3 and axes[2] > 4:
        raise ValueError(f"its images {axes} do not have their channels last")
    return ResizeObservation(env, size)
