"""Defaults of shared settings that depend on the algorithm."""

from collections.abc import Mapping
from typing import Any

SAC_DEFAULTS = {
    "learning_rate": 5e-4,
    "minibatch_size": 128,
    # the entropy of actions within bounds has a meaning, and a deviation that is the same everywhere limits it
    "action_bounds": "squash",
    "state_dependent_std": True,
    "noise": "pink",
    "name": "sac",
}


def with_algorithm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, with the defaults of soft actor-critic where `algo` is sac."""
    if settings.get("algo") != "sac":
        return dict(settings)
    user_settings = {name: value for name, value in settings.items() if value is not None}
    return dict(settings) | SAC_DEFAULTS | user_settings
