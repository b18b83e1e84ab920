"""Records of the algorithm: arrays have the annotated shapes, and are read-only."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
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


def segment(**changes: Any) -> Segment:
    rows = np.zeros((T, E))
    flags = np.zeros((T, E), bool)
    columns: dict[str, Any] = {"obs": np.zeros((T, E, 4)), "actions": np.zeros((T, E), np.int64)}
    columns |= {name: rows.copy() for name in ("logprobs", "values", "next_values", "rewards")}
    columns |= {name: flags.copy() for name in ("terminated", "truncated", "valid")}
    return Segment(**columns | changes)


def batch(**changes: Any) -> Batch:
    columns: dict[str, Any] = {
        name: torch.zeros(6) for name in ("logprobs", "values", "advantages", "returns")
    }
    return Batch(**{"obs": torch.zeros(6, 4), "actions": torch.zeros(6, 2)} | columns | changes)


def carry(**changes: Any) -> SamplerCarry:
    columns: dict[str, Any] = {
        name: np.zeros(E, np.int64) for name in ("episodes", "episode_lengths")
    }
    columns |= {name: np.zeros(E) for name in ("episode_returns", "discounted_returns")}
    return SamplerCarry(**columns | {"checksums": np.zeros(E, np.uint32)} | changes)


def scale() -> ObsScale:
    return ObsScale(np.zeros(4), np.ones(4))


WRONG: dict[str, Callable[[], object]] = {
    "a column of a segment": lambda: segment(rewards=np.zeros((T, E + 1))),
    "a column of a segment that has another dtype": lambda: segment(valid=np.ones((T, E))),
    "a leaf of a batch": lambda: batch(obs={"arm": torch.zeros(5, 4)}),
    "what a sampler carries": lambda: carry(checksums=np.zeros(E + 1, np.uint32)),
    "a loss": lambda: policy_loss(torch.ones(3), torch.ones(3, 1), 0.2),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_shape_fails_in_tests(wrong: str) -> None:
    segment(), batch(), carry()
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
    rebuild = Rebuild(carry(), (np.zeros((2, 3)),))
    return [segment(), carry(), scale(), rebuild, PolicySnapshot(0, np.zeros(5), scale())]


@pytest.mark.parametrize("pickled", [False, True])
def test_the_arrays_of_a_record_are_read_only(pickled: bool) -> None:
    for record in pickle.loads(pickle.dumps(made())) if pickled else made():
        values = [getattr(record, field.name) for field in dataclasses.fields(record)]
        arrays = [
            array for value in values for array in (value if isinstance(value, tuple) else (value,))
        ]
        arrays = [array for array in arrays if isinstance(array, np.ndarray)]
        assert arrays
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
