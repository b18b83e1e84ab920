"""Settings that apply to games of the Arcade Learning Environment unless others are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo.config.parts import FlatSettings

DEFAULTS = {"atari": "life", "action_repeat": 4, "grayscale": True, "resize": (84, 84), "frame_stack": 4}


def with_atari(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, of games (ALE/*, or `atari` is set) with their defaults.

    In `env_kwargs`, `frameskip` repeats actions instead of us, and `obs_type` asks for raw observations.
    """
    given = settings.get("env_kwargs")
    kwargs = given if isinstance(given, Mapping) else {}
    game = str(settings.get("env_id")).rpartition(":")[2].startswith("ALE/") and "obs_type" not in kwargs
    if settings.get("atari", "life" if game else "raw") == "raw":
        return dict(settings)
    implied = DEFAULTS | {"sign_reward": settings.get("clip_reward") is None}
    return implied | ({"action_repeat": 1} if "frameskip" in kwargs else {}) | dict(settings)


def atari_in_words(config: FlatSettings) -> str | None:
    """Return how a game is prepared, and how to play it raw, in two sentences; None without `atari`."""
    if config.atari == "raw":
        return None
    details = [
        "1 to 30 no-ops at the start",
        f"each action for {config.action_repeat} frames",
        " x ".join(map(str, config.resize or ("full size",))) + " in gray" * config.grayscale,
        f"stacks of {config.frame_stack}",
        *["rewards by their sign"] * config.sign_reward,
        *["a lost life ends an episode for learning only"] * (config.atari == "life"),
    ]
    return f"Frames of {config.env_name}: {', '.join(details)}. Returns are those of games. atari=raw: none of this."
