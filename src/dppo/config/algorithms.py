"""Defaults of shared settings that depend on the algorithm."""

from typing import Any

from dppo.config.field import FlatSettings

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


def own_defaults(settings: FlatSettings) -> dict[str, Any]:
    """Return the defaults that the algorithm of flat settings has instead of the shared ones."""
    if settings.get("algo") != "sac":
        return {}
    if settings.get("model") is None:
        return dict(SAC_DEFAULTS)
    return {name: value for name, value in SAC_DEFAULTS.items() if name not in OF_DEFAULT_NETWORK}


def with_algorithm(settings: FlatSettings) -> dict[str, Any]:
    """Return flat settings, with the defaults of soft actor-critic where `algo` is sac."""
    user_settings = {name: value for name, value in settings.items() if value is not None}
    return dict(settings) | own_defaults(settings) | user_settings
