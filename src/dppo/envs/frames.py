"""Prepare frames by settings: repeat actions, turn images gray, resize them, stack them; and games of Atari."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, GrayscaleObservation, ResizeObservation

from dppo.envs.make import EnvId, close_all, make_env
from dppo.errors import ConfigError
from dppo.user_code import in_a_line

Make = Callable[[EnvId, dict[str, Any]], gym.Env[Any, Any]]
SETTINGS = {"action_repeat": 1, "grayscale": False, "resize": (), "frame_stack": 1, "atari": "raw"}  # and their "off"


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Repeat each action, sum the rewards, and return the last observation; stop where an episode ends."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        """Take up to `times` steps."""
        total: Any = 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def make_prepared(
    env_id: EnvId, env_kwargs: dict[str, Any], settings: Mapping[str, Any], make: Make = make_env
) -> gym.Env[Any, Any]:
    """Return an environment created by `make`, with its frames prepared by those of `settings` that are in SETTINGS.

    Raise ConfigError if one of them does not fit its observations, or a package is missing.
    """
    of = {name: settings[name] for name, off in SETTINGS.items() if settings.get(name, off) not in (off, [])}
    env = make(env_id, {"frameskip": 1} | env_kwargs if "atari" in of and isinstance(env_id, str) else env_kwargs)
    try:
        for name, wrap in _wrappers(of):
            env = _wrapped(env, name, of[name], wrap)
    except ConfigError:
        close_all([env])
        raise
    return env


def _wrappers(of: Mapping[str, Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return the wrapper that each setting asks for, the innermost first."""
    stack, gray, size = of.get("frame_stack", 1), "grayscale" in of, tuple(of.get("resize", ()))
    alone = stack == 1  # without a stack, an image has an axis of channels
    if "atari" in of:
        screen = size[::-1] or (160, 210)  # OpenCV has the width first
        options: dict[str, Any] = {"frame_skip": of.get("action_repeat", 1), "grayscale_newaxis": alone}
        found = {"atari": lambda env: AtariPreprocessing(env, screen_size=screen, grayscale_obs=gray, **options)}
    else:
        found = {
            "action_repeat": lambda env: ActionRepeat(env, of["action_repeat"]),
            "grayscale": lambda env: GrayscaleObservation(env, keep_dim=alone),
            "resize": lambda env: ResizeObservation(_last_channels(env), size),
        }
    found["frame_stack"] = lambda env: FrameStackObservation(_array(env), stack)
    return [(name, wrap) for name, wrap in found.items() if name in of]


def _wrapped(env: Any, name: str, value: Any, wrap: Callable[[Any], Any]) -> gym.Env[Any, Any]:
    setting = f"{name}={' '.join(map(str, value)) if isinstance(value, tuple | list) else value}"
    try:
        if name in ("atari", "resize"):
            _one_thread()
        wrapped: gym.Env[Any, Any] = wrap(env)
    except ImportError:
        raise ConfigError(
            f"{setting}: needs OpenCV. Install it: {sys.executable} -m pip install opencv-python-headless"
        ) from None
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting}: does not fit the environment ({in_a_line(error)}). Leave `{name}` out, or convert its "
            f"observations in a wrapper of your own."
        ) from None
    return wrapped


def _one_thread() -> None:
    """Keep OpenCV from starting a thread for each CPU in each actor."""
    import cv2

    cv2.setNumThreads(1)


def _last_channels(env: Any) -> Any:
    shape = env.observation_space.shape or ()
    if len(shape) == 3 and shape[2] > 4:
        raise ValueError(f"its images {shape} do not have their channels last")
    return env


def _array(env: Any) -> Any:
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) > 3:
        raise TypeError(f"only a Box of at most three axes can be stacked, and this is {env.observation_space}")
    return env
