"""Prepare an environment by settings: wrappers, repeated actions, gray, resized and stacked images, games of Atari."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, GrayscaleObservation, ResizeObservation

from dppo.config.parts import Env, default_of
from dppo.envs.closing import close_all
from dppo.envs.frames import ActionRepeat, LifeStack, Lives
from dppo.envs.instance import ANY_INSTANCE, Instance
from dppo.envs.kinds import refuse_sub_envs
from dppo.envs.make import in_wrappers, make_env
from dppo.envs.names import EnvId, takes
from dppo.envs.sharing import begin_use
from dppo.errors import ConfigError
from dppo.user_code import import_path, in_a_line, pip_install

PREPARING = ("wrappers", "atari", "action_repeat", "grayscale", "resize", "frame_stack")
"""The settings that change an environment, in the order in which they are applied. Their defaults change nothing."""


def make_prepared(settings: Env, instance: Instance = ANY_INSTANCE) -> Any:
    """Return an environment of `make_env`, prepared; with a render_mode of `instance`, it is to be shown.

    Raise ConfigError if a setting does not fit its observations, OpenCV is missing, or it cannot be shown.
    """
    changes = {
        name: getattr(settings, name)
        for name in PREPARING
        if getattr(settings, name) != default_of(name)
    }
    env_id = settings.env_id
    env_kwargs = settings.env_kwargs
    if "atari" in changes and isinstance(env_id, str) and takes(env_id, "frameskip"):
        env_kwargs = {"frameskip": 1} | env_kwargs
    if instance.render_mode is None:
        env = make_env(env_id, env_kwargs, instance)
    else:
        env = _make_rendered(env_id, env_kwargs, instance, instance.render_mode)
    begin_use(env, f"env_id={import_path(env_id)}: returned")
    if changes:
        refuse_sub_envs(
            env,
            next(iter(changes)),
            "prepares single environments, and this one has sub-environments. Leave it out, and use wrappers of "
            "gymnasium.wrappers.vector or supersuit where the environment is made.",
        )
    env = in_wrappers(env, changes.pop("wrappers", ()))
    for name, value in changes.items():
        try:
            env = _apply(env, name, settings)
        except (AssertionError, AttributeError, ImportError, TypeError, ValueError) as error:
            close_all([env])
            problem = f"does not fit the environment ({in_a_line(error)}). Leave `{name}` out"
            if isinstance(error, ImportError):
                remedy = pip_install("opencv-python-headless")
                problem = f"needs OpenCV. Install it: {remedy}"
            text = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
            raise ConfigError(f"{name}={text}: {problem}.") from None
    return env


def _make_rendered(
    env_id: EnvId, env_kwargs: dict[str, Any], instance: Instance, render_mode: str
) -> Any:
    """Make one environment with this render_mode, also if `env_kwargs` has another. Errors of its constructor pass.

    Raise ConfigError if it does not take a render_mode.
    """
    try:
        env = make_env(
            env_id, env_kwargs | {"render_mode": render_mode}, replace(instance, render_mode=None)
        )
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
    alternative = ""
    if render_mode == "human":
        setting = "render=True"
        alternative = ", or leave `render` out, and let `env_kwargs` open the window"
    raise ConfigError(
        f"{setting}: passes render_mode={render_mode!r}, but {import_path(env_id)} {fact}. Accept render_mode as an "
        f"argument and pass it on to the environment{alternative}."
    )


def _apply(env: Any, name: str, settings: Env) -> Any:
    if name in ("atari", "resize"):
        import cv2

        cv2.setNumThreads(1)  # it would start a thread for each CPU in each actor
    if name == "atari":
        return _game(env, settings)
    if name == "frame_stack":
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) > 3:
            raise TypeError(f"only a Box of at most three axes is stacked, and this is {space}")
        return LifeStack(env, settings.frame_stack)
    if settings.atari != "raw":  # which has prepared the images
        return env
    if name == "action_repeat":
        return ActionRepeat(env, settings.action_repeat)
    if name == "grayscale":
        # an image has an axis of channels
        return GrayscaleObservation(env, keep_dim=settings.frame_stack == 1)
    return _resized(env, settings.resize)


def _game(env: Any, settings: Env) -> Any:
    screen: Any = settings.resize[::-1] or (160, 210)
    game = AtariPreprocessing(
        env,
        screen_size=screen,
        grayscale_newaxis=settings.frame_stack == 1,
        frame_skip=settings.action_repeat,
        grayscale_obs=settings.grayscale,
    )
    if settings.atari == "life":
        return Lives(game)
    return game


def _resized(env: Any, size: tuple[int, ...]) -> Any:
    axes = None
    if isinstance(env.observation_space, gym.spaces.Box):
        axes = env.observation_space.shape
    if axes is not None and len(axes) == 3 and axes[2] > 4:
        raise ValueError(f"its images {axes} do not have their channels last")
    return ResizeObservation(env, size)  # type: ignore[arg-type]
