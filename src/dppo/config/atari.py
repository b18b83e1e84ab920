"""Defaults for games of the Arcade Learning Environment."""

from collections.abc import Mapping
from typing import Any

from dppo.config.field import FlatSettings
from dppo.config.parts import Env

ATARI = {
    "atari": "life",
    "action_repeat": 4,
    "grayscale": True,
    "resize": (84, 84),
    "frame_stack": 4,
    # CleanRL's cleanrl/ppo_atari.py: frames cost little, and an update of a CNN takes as long as collecting.
    "num_steps": 128,
    "update_epochs": 4,
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "clip_coef": 0.1,
    "ent_coef": 0.01,
    "norm_reward": False,
}


def with_atari(settings: FlatSettings) -> dict[str, Any]:
    """Return flat settings; for a game, add its defaults for settings that are not among them."""
    return atari_defaults(settings) | dict(settings)


def atari_defaults(settings: FlatSettings) -> dict[str, Any]:
    """Return the defaults that games (ALE/*, or `atari` is set) have in place of the shared defaults.

    In `env_kwargs`, `frameskip` repeats actions instead of us, and `obs_type` asks for raw observations.
    """
    kwargs = settings.get("env_kwargs")
    if not isinstance(kwargs, Mapping):
        kwargs = {}
    _, _, env_name = str(settings.get("env_id")).rpartition(":")
    is_game = env_name.startswith("ALE/") and "obs_type" not in kwargs
    protocol = settings.get("atari", "life" if is_game else "raw")
    if protocol == "raw":
        return {}
    defaults = ATARI | {"sign_reward": settings.get("clip_reward") is None}
    if "frameskip" in kwargs:
        defaults["action_repeat"] = 1
    return defaults


def describe_atari(env: Env) -> str | None:
    """Return how a game is prepared, and how to play it raw, in words; None without `atari`."""
    if env.atari == "raw":
        return None
    size = " x ".join(map(str, env.resize or ("full size",)))
    frames = f"{env.action_repeat} frames an action, {size}, stacks of {env.frame_stack}"
    if env.atari == "life":
        frames += ", and the loss of a life ends an episode for learning only"
    return (
        f"Frames: {env.env_name} starts with 1 to 30 no-ops; {frames}. Returns are those of whole games. PPO's "
        f"defaults are CleanRL's for Atari. atari=raw turns all this off."
    )
