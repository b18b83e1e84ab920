"""Settings that apply to games of the Arcade Learning Environment unless others are given."""

from collections.abc import Mapping
from typing import Any

from dppo.config.parts import FlatSettings

DEFAULTS = {"atari": "life", "action_repeat": 4, "grayscale": True, "resize": (84, 84), "frame_stack": 4}
# CleanRL's cleanrl/ppo_atari.py: frames cost little, and an update of a CNN takes as long as collecting.
DEFAULTS |= {"num_steps": 128, "update_epochs": 4, "learning_rate": 2.5e-4, "anneal_lr": True, "clip_coef": 0.1}
DEFAULTS |= {"ent_coef": 0.01, "norm_reward": False}


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
    """Return how a game is prepared, and how to play it raw, in words; None without `atari`."""
    if config.atari == "raw":
        return None
    size = " x ".join(map(str, config.resize or ("full size",)))
    life = ", and the loss of a life ends an episode for learning only" * (config.atari == "life")
    frames = f"{config.action_repeat} frames an action, {size}, stacks of {config.frame_stack}{life}"
    rest = "Returns are those of whole games. PPO's defaults are CleanRL's for Atari. atari=raw turns all this off."
    return f"Frames: {config.env_name} starts with 1 to 30 no-ops; {frames}. {rest}"
