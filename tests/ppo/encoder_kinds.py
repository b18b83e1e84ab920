"""Small networks for observations of all kinds."""

from __future__ import annotations

from typing import Any

from worlds.observed import TEXTS

from dppo.config import Config

EVERYTHING: dict[str, Any] = {"env_id": "worlds.observed:Everything", "drop_obs": TEXTS}
KINDS: dict[str, dict[str, Any]] = {
    "impala": {
        "env_id": "worlds.observed:Picture",
        "image_encoder": "impala",
        "image_features": 16,
    },
    "grid": {"env_id": "worlds.observed:Codes"},
    "grid alone": {"env_id": "worlds.observed:Picture", "trunk": "separate"},
    "nature": {
        "env_id": "worlds.observed:Picture",
        "env_kwargs": {"size": 36, "channels": 4},
        "image_features": 32,
    },
    "flatten": {
        "env_id": "worlds.observed:Picture",
        "image_encoder": "flatten",
        "layer_norm": True,
    },
    "film": {"env_id": "worlds.observed:Film", "trunk": "separate", "image_features": 8},
    "everything": EVERYTHING | {"image_features": 16},
    "numbers": {"env_id": "worlds.observed:Numbers"},
    "normalized numbers": {
        "env_id": "worlds.observed:Numbers",
        "norm_obs": True,
        "trunk": "shared",
    },
    "normalized everything": EVERYTHING | {"norm_obs": True, "image_features": 8},
    "a normalized part": EVERYTHING
    | {"drop_obs": (*TEXTS, "camera"), "norm_obs": True, "norm_obs_keys": ("robot.arm.1",)},
    "embedded": {"env_id": "worlds.observed:Plain", "env_kwargs": {"kind": "many"}},
    "one hot": {"env_id": "worlds.observed:Plain", "env_kwargs": {"kind": "multidiscrete"}},
    "one of": {"env_id": "worlds.observed:Plain", "env_kwargs": {"kind": "one of"}},
    "vector": {"env_id": "CartPole-v1", "trunk": "shared", "layer_norm": True},
    "own module": {"env_id": "CartPole-v1", "model": "worlds.models:Plain"},
}


def config_of(kind: str, **changes: Any) -> Config:
    """Return a run with a batch of 64 steps of two samplers, in one minibatch."""
    base = {
        "num_samplers": 2,
        "envs_per_sampler": 2,
        "num_steps": 16,
        "update_epochs": 1,
        "minibatch_size": 64,
    }
    return Config(**(base | KINDS[kind] | changes))
