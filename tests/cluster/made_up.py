"""Random segments and matching settings, for learners without actors."""

from __future__ import annotations

from typing import Any

import numpy as np
from builders import make_config

import dppo
from dppo.ppo.exchange.records import PolicySnapshot, Segment
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces

SAMPLERS = 4
STEPS = 64
OBS = 6
SPACES = Spaces(np.dtype(("float32", (OBS,))), DiscreteActions(3))
POLICY = PolicySnapshot(0, np.zeros(0, np.float32))  # learners use only its obs_scale


def settings(**changes: Any) -> dppo.Config:
    base = {
        "env_id": "CartPole-v1",
        "num_actors": 1,
        "num_samplers": SAMPLERS,
        "num_steps": STEPS,
        "num_learners": 2,
    }
    return make_config(base | {"update_epochs": 2, "progress": "off"} | changes)


def some_segments(dtype: str = "float32") -> list[Segment]:
    return [_segment(np.random.default_rng(sampler), dtype) for sampler in range(SAMPLERS)]


def _segment(rng: np.random.Generator, dtype: str) -> Segment:
    shape = (STEPS, 1)
    logprobs, values, next_values = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    return Segment(
        obs=rng.normal(size=(*shape, OBS)).astype(np.float32),
        actions=rng.integers(0, 3, shape),
        logprobs=-np.abs(logprobs),
        values=values,
        next_values=next_values,
        rewards=rng.normal(size=shape),
        terminated=rng.random(shape) < 0.05,
        truncated=np.zeros(shape, bool),
        valid=np.ones(shape, bool),
    )
