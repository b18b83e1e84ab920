"""Make an environment that shows itself in a window."""

from __future__ import annotations

import os
import sys
from typing import Any

from dppo.envs.make import EnvId, close_all, make_env
from dppo.errors import ConfigError
from dppo.user_code import in_a_line


def check_display() -> None:
    """Refuse to open a window where there is no display: some libraries abort the process instead of raising.

    Raises:
        ConfigError: there is no display.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise ConfigError(
            "render=True: this machine has no display (neither DISPLAY nor WAYLAND_DISPLAY is set). Run it on a "
            "desktop, through `ssh -X`, or under `xvfb-run`. To record a video instead, make the environment with "
            "render_mode='rgb_array', wrap it in gymnasium.wrappers.RecordVideo, and pass it to dppo.evaluate."
        )


def make_in_window(env_id: EnvId, env_name: str, env_kwargs: dict[str, Any]) -> Any:
    """Make one environment with render_mode="human"; a render_mode in `env_kwargs` wins. Its own errors pass through.

    Raises:
        ConfigError: it is not one environment, or does not take a render_mode.
    """
    asked = "render_mode" not in env_kwargs
    try:
        env = make_env(env_id, {"render_mode": "human"} | env_kwargs)
    except Exception as error:
        if asked and "render_mode" in str(error):
            raise _no_window(env_name, f"does not take it ({in_a_line(error)})") from None
        raise
    if asked and getattr(env, "render_mode", None) is None:
        close_all([env])
        raise _no_window(env_name, "returned an environment without it")
    return env


def _no_window(env_name: str, fact: str) -> ConfigError:
    return ConfigError(
        f"render=True: passes render_mode='human', but {env_name} {fact}. Accept render_mode as an argument and pass "
        f"it on to the environment, or open the window in another way, through env_kwargs."
    )
