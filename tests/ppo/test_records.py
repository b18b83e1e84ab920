"""Records of the algorithm: arrays have the annotated shapes, and are read-only."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, TypeCheckError, jaxtyped
from shapes import MODULES, checked, once_a_kind

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


@once_a_kind
def chosen(
    columns: dict[str, Float[np.ndarray, "T E"]],
    rows: Bool[np.ndarray, " T"],
    give: Callable[[], Any] = zeros,
    *,
    flags: Bool[np.ndarray, "T E"] | None = None,
) -> tuple[Float[np.ndarray, "T E"], int]:
    return give(), 0


def test_a_wrong_shape_fails_after_right_ones_have_passed() -> None:
    rows = np.ones(T, bool)
    right = {"x": zeros()}
    for _ in range(2):
        chosen(right, rows)
        chosen(right, rows, flags=no_flags())
    wrong: list[Callable[[], object]] = [
        lambda: chosen({"x": TOO_WIDE, "y": zeros()}, rows),
        lambda: chosen({"x": zeros().astype(int)}, rows),
        lambda: chosen({"x": torch.zeros(T, E)}, rows),  # type: ignore[dict-item]
        lambda: chosen(right, np.ones(T + 1, bool)),
        lambda: chosen(right, rows=np.ones(T + 1, bool)),
        lambda: chosen(right, rows, flags=NO_BOOLEANS),
        lambda: chosen(right, rows, lambda: TOO_WIDE),
        lambda: chosen(right, rows, lambda: None),
        lambda: chosen(right, rows, no_flags),
    ]
    for call in wrong * 2:
        with pytest.raises(TypeCheckError):
            call()


def functions_of(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a module and of its classes, those that it imports included."""
    for member in vars(module).values():
        for value in vars(member).values() if inspect.isclass(member) else (member,):
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield function


@pytest.mark.parametrize("name", MODULES)
def test_all_annotations_can_be_evaluated(name: str) -> None:
    """One that cannot, such as a shape without quotes, would not be checked."""
    package_modules = [
        module for module in sys.modules if module == name or module.startswith(f"{name}.")
    ]
    ours = [
        function
        for module in package_modules
        for function in functions_of(sys.modules[module])
        if function.__module__ == module
    ]
    assert ours
    for function in ours:
        inspect.signature(function, eval_str=True)


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
