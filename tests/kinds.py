"""A small run of each kind of policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worlds.observed import TEXTS

if TYPE_CHECKING:
    import dppo

RunOf = Callable[[str], "dppo.Result"]  # the fixture `run_of`
Settings = dict[str, Any]

ITERATIONS = 3
SMALL: Settings = {
    "num_samplers": 2,
    "envs_per_sampler": 2,
    "num_steps": 20,
    "total_timesteps": 2 * 2 * 20 * ITERATIONS,
    "update_epochs": 2,
    "progress": "off",
}
EVERYTHING = {"env_id": "worlds.observed:Everything", "drop_obs": TEXTS, "norm_obs": True}
MASKED = {"env_id": "worlds.acting:Masked", "env_kwargs": {"source": "method", "several": True}}
OWN_MEMORY = {
    "env_id": "worlds.memory:Recalls",
    "model": "worlds.memory_models:Running",
    "sequence_length": 10,
}
LEARNT = {
    "memory": "gru",
    "memory_size": 8,
    "recompute_advantages": True,
    "overlap": True,
    "image_features": 32,
}
# It has no epochs. The oldest rows are dropped in the third iteration.
SAC: Settings = {
    **{"algo": "sac", "update_epochs": None, "replay_rows": 160, "learning_starts": 80},
    **{"gradient_steps": 0.1, "minibatch_size": 32, "hidden_sizes": (8,), "critic_sizes": (8, 8)},
    # the fourth one explores widely
    **{"num_samplers": 4, "envs_per_sampler": 1},
}
KINDS: dict[str, Settings] = {
    "image": {"env_id": "worlds.observed:Picture", "image_encoder": "impala", "image_features": 32},
    "dict observation": EVERYTHING
    | {"norm_obs_keys": ("robot.arm.0",), "obs_dtype": "float64", "image_features": 32},
    # with masks
    "dict action": {"env_id": "worlds.acting:Hybrid", "env_kwargs": {"form": "nested"}},
    "mask": MASKED,
    "mask and lstm": MASKED | {"memory": "lstm", "memory_size": 8, "recompute_advantages": True},
    "lstm": {
        "env_id": "worlds.memory:Recalls",
        "memory": "lstm",
        "memory_size": 8,
        "overlap": True,
    },
    "gru": {"env_id": "worlds.memory:Named", "memory": "gru", "memory_size": 8, "norm_value": True},
    "frames": LEARNT | {"env_id": "worlds.observed:Guarded", "grayscale": True, "frame_stack": 3},
    "reuse": MASKED
    | {
        "env_kwargs": {"source": "leaf"},
        "memory": "gru",
        "memory_size": 8,
        "reuse": 2,
        "norm_obs": True,
    },
    "own memory": OWN_MEMORY | {"norm_obs": True},
    "sac": SAC | {"env_id": "worlds.pushed:Pushed"},
}


def small(run_dir: Path, **changes: Any) -> dppo.Config:
    """Return a small run of 3 iterations of 80 steps, by two samplers of two environments."""
    from builders import make_config

    return make_config(SMALL | {"run_dir": run_dir} | changes)


def settings(kind: str, run_dir: Path, **changes: Any) -> dppo.Config:
    return small(run_dir, **KINDS[kind] | changes)
