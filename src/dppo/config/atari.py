"""Settings that apply to games of the Arcade Learning Environment unless others are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo.config.parts import FlatSettings

DEFAULTS = {"atari": "v5", "action_repeat": 4, "grayscale": True, "resize": (84, 84), "frame_stack": 4}


def with_atari(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, of a game ALE/* or with `atari=v5` with the defaults of such games.

    A `frameskip` or an `obs_type` in `env_kwargs` is respected: the first repeats actions, the second asks for raw
    observations.
    """
    given = settings.get("env_kwargs")
    kwargs = given if isinstance(given, Mapping) else {}
    game = str(settings.get("env_id")).rpartition(":")[2].startswith("ALE/") and "obs_type" not in kwargs
    if settings.get("atari", "v5" if game else "raw") != "v5":
        return dict(settings)
    implied = DEFAULTS | {"sign_reward": settings.get("clip_reward") is None}
    return implied | ({"action_repeat": 1} if "frameskip" in kwargs else {}) | dict(settings)


def atari_in_words(config: FlatSettings) -> str | None:
    """Return how frames of a game are prepared, and how to get them raw, in two sentences; None without `atari`."""
    if config.atari == "raw":
        return None
    size = " x ".join(map(str, config.resize)) or "full size"
    color, signs = "gray" if config.grayscale else "color", ", signs of rewards to learn from" * config.sign_reward
    return (
        f"Frames: {config.env_name} is played as by Machado et al. (2018): at most 30 no-ops, each action for "
        f"{config.action_repeat} frames, {size} in {color}, stacks of {config.frame_stack}{signs}; episodes and their "
        f"returns are those of whole games. For the game's own frames, use atari=raw."
    )
