"""Records of the algorithm: arrays have the annotated shapes, and are read-only."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from shapes import checked

from dppo.ppo.exchange.records import PolicySnapshot, Rebuild, SamplerCarry, Segment
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.losses import policy_loss

T = 3
E = 2


def zeros() -> np.ndarray:
    return np.zeros((T, E))


def no_flags() -> np.ndarray:
    return np.zeros((T, E), bool)


def segment(**changes: Any) -> Segment:
    columns: dict[str, Any] = {
        "obs": np.zeros((T, E, 4)),
        "actions": np.zeros((T, E), np.int64),
        "logprobs": zeros(),
        "values": zeros(),
        "next_values": zeros(),
        "rewards": zeros(),
        "terminated": no_flags(),
        "truncated": no_flags(),
        "valid": no_flags(),
    }
    return Segment(**columns | changes)


def batch(**changes: Any) -> Batch:
    rows = torch.zeros(6)
    columns: dict[str, Any] = {
        "table": torch.zeros(9, 4),
        "index": torch.arange(6),
        "actions": torch.zeros(6, 2),
        "logprobs": rows,
        "values": rows,
        "advantages": rows,
        "returns": rows,
    }
    return Batch(**columns | changes)


def carry(**changes: Any) -> SamplerCarry:
    columns: dict[str, Any] = {
        "episodes": np.zeros(E, np.int64),
        "episode_lengths": np.zeros(E, np.int64),
        "episode_returns": np.zeros(E),
        "discounted_returns": np.zeros(E),
        "checksums": np.zeros(E, np.uint32),
    }
    return SamplerCarry(**columns | changes)


def scale() -> ObsScale:
    return ObsScale(np.zeros(4), np.ones(4))


TOO_WIDE = np.zeros((T, E + 1))
NO_BOOLEANS = np.ones((T, E))
WRONG: dict[str, Callable[[], object]] = {
    "a column of a segment": partial(segment, rewards=TOO_WIDE),
    "a column of a segment that has another dtype": partial(segment, valid=NO_BOOLEANS),
    "a column of a batch": partial(batch, actions=torch.zeros(5, 2)),
    "what a sampler carries": partial(carry, checksums=np.zeros(E + 1, np.uint32)),
    "a loss": partial(policy_loss, torch.ones(3), torch.ones(3, 1), 0.2),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_shape_fails_in_tests(wrong: str) -> None:
    segment()
    batch()
    carry()
    with pytest.raises(TypeCheckError):
        WRONG[wrong]()


@jaxtyped(typechecker=checked)
def returning_anything(column: Float[np.ndarray, "T E"]) -> Any:
    return column


def test_a_wrong_shape_fails_where_anything_may_be_returned() -> None:
    returning_anything(np.zeros((T, E)))
    with pytest.raises(TypeCheckError):
        returning_anything(np.zeros(T))


def made() -> list[Any]:
    return [
        segment(),
        carry(),
        scale(),
        Rebuild(carry(), (np.zeros((2, 3)),)),
        PolicySnapshot(0, np.zeros(5), scale()),
    ]


def arrays_of(record: Any) -> list[np.ndarray]:
    """Return the arrays in the fields, also those in a tuple."""
    arrays = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        elements = value if isinstance(value, tuple) else (value,)
        arrays += [element for element in elements if isinstance(element, np.ndarray)]
    return arrays


@pytest.mark.parametrize("pickled", [False, True])
def test_the_arrays_of_a_record_are_read_only(pickled: bool) -> None:
    records = made()
    if pickled:
        records = pickle.loads(pickle.dumps(records))
    for record in records:
        arrays = arrays_of(record)
        assert arrays
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
