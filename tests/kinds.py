"""A small run of each kind of policy, and the proofs of the promise that the fast tests include for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from builders import make_config
from worlds.observed import TEXTS

import dppo

ITERATIONS = 3
SMALL: dict[str, Any] = {
    "num_samplers": 2,
    "envs_per_sampler": 2,
    "num_steps": 20,
    "update_epochs": 2,
    "total_timesteps": 2 * 2 * 20 * ITERATIONS,
    "progress": "off",
}
RunOf = Callable[[str], dppo.Result]  # the fixture `run_of`


class Kind(NamedTuple):
    """Settings of a kind, and which of its proofs on Ray ("actors", "killed") are fast tests; the others are slow."""

    settings: dict[str, Any]
    fast: tuple[str, ...] = ()


MASKED = {"env_id": "worlds.acting:Masked", "env_kwargs": {"source": "method", "several": True}}
KINDS: dict[str, Kind] = {
    "image": Kind({"env_id": "worlds.observed:Picture", "image_encoder": "impala", "image_features": 32}),
    "dict observation": Kind(
        {"env_id": "worlds.observed:Everything", "drop_obs": TEXTS, "image_features": 32}
        | {"norm_obs": True, "norm_obs_keys": ("robot.arm.0",)}
    ),
    "dict action": Kind({"env_id": "worlds.acting:Actuated", "env_kwargs": {"kind": "dict"}}, fast=("actors",)),
    "mask": Kind(MASKED),
    "mask and lstm": Kind(
        MASKED | {"memory": "lstm", "memory_size": 8, "recompute_advantages": True}, fast=("actors",)
    ),
    "lstm": Kind({"env_id": "worlds.memory:Recalls", "memory": "lstm", "memory_size": 8, "overlap": True}),
    "gru": Kind({"env_id": "worlds.memory:Named", "memory": "gru", "memory_size": 8, "norm_value": True}),
    "own memory": Kind(
        {"env_id": "worlds.memory:Recalls", "model": "worlds.memory_models:Running"}
        | {"sequence_length": 10, "norm_obs": True},
        fast=("killed",),
    ),
}


def small(run_dir: Path, **changes: Any) -> dppo.Config:
    """Return a small run of 3 iterations of 80 steps, by two samplers of two environments."""
    return make_config(SMALL | {"run_dir": run_dir} | changes)


def settings(kind: str, run_dir: Path, **changes: Any) -> dppo.Config:
    return small(run_dir, **KINDS[kind].settings | changes)
