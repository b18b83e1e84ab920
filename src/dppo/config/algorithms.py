"""Defaults of shared settings that depend on the algorithm."""

from collections.abc import Mapping
from typing import Any

SAC_DEFAULTS = {
    "learning_rate": 5e-4,
    "minibatch_size": 128,
    # the entropy of actions within bounds has a meaning, and a deviation that is the same everywhere limits it
    "action_bounds": "squash",
    "state_dependent_std": True,
    "hidden_sizes": (128, 128),
    "activation": "relu",
    # a policy of this algorithm learns from actions that are not its own
    "noise": "wide",
    "name": "sac",
}

OF_DEFAULT_NETWORK = {"state_dependent_std", "hidden_sizes", "activation"}
"""Settings that a network of the user's does not read."""


def with_algorithm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, with the defaults of soft actor-critic where `algo` is sac."""
    if settings.get("algo") != "sac":
        return dict(settings)
    user_settings = {name: value for name, value in settings.items() if value is not None}
    defaults = SAC_DEFAULTS
    if "model" in user_settings:
        defaults = {
            name: value for name, value in defaults.items() if name not in OF_DEFAULT_NETWORK
        }
    return dict(settings) | defaults | user_settings
