"""Check annotated shapes whenever a test calls a function or creates a record of the algorithm."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

CHECKED = (
    "distributions",
    "distributions.base",
    "exchange.records",
    "exchange.scales",
    "exchange.stacks",
    "kernels.recurrence",
    "learning.advantages",
    "learning.batch",
    "learning.losses",
    "learning.stages",
    "networks.network",
)
MODULES = [f"dppo.ppo.{name}" for name in CHECKED]
F = TypeVar("F", bound=Callable[..., Any])


def check_shapes() -> None:
    """Import `MODULES` so that each call and each new record is checked against its annotations.

    These modules import jaxtyping only under TYPE_CHECKING, so that actors do not load it. TYPE_CHECKING is therefore
    set to true while they are imported here. Modules that would break then are imported before.
    """
    import torch  # noqa: F401

    import dppo.config
    import dppo.spaces.spaces  # noqa: F401

    with (
        mock.patch.object(typing, "TYPE_CHECKING", True),
        install_import_hook(MODULES, "shapes.checked"),
    ):
        for name in MODULES:
            _leave_alone(importlib.import_module(name))


def _leave_alone(module: ModuleType) -> None:
    """Do not check functions and records that name no shapes: binding their arguments takes most of the time."""
    members = [
        member
        for member in vars(module).values()
        if getattr(member, "__module__", "") == module.__name__
    ]
    for owner in (module, *filter(inspect.isclass, members)):
        for function in vars(owner).values():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                hints = typing.get_type_hints(function, vars(module))
                if not any(map(_names_shapes, hints.values())):
                    function.__no_type_check__ = True  # type: ignore[attr-defined]


def checked(function: F) -> F:
    """Check the annotations of `function` that name shapes; mypy checks the others.

    Sequences of any length are excluded: beartype checks one of their elements, chosen by Python's global generator,
    and tests must not disturb that generator.
    """
    shaped = {
        name: hint
        for name, hint in function.__annotations__.items()
        if _names_shapes(hint) and not _has_any_length(hint)
    }
    # jaxtyping checks the arguments before a call, and again after it with the result, which it passes as `ret...`.
    has_the_result = any(re.match(r"ret(?!urn$)", name) for name in function.__annotations__)
    if not has_the_result or not shaped:
        return function
    function.__annotations__ = shaped
    return beartype(function)


def _has_any_length(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    endless = (
        Ellipsis in inner
        if origin is tuple
        else isinstance(origin, type) and issubclass(origin, Sequence)
    )
    return bool(endless) or any(map(_has_any_length, inner))


def _names_shapes(hint: Any) -> bool:
    named = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return named or any(map(_names_shapes, typing.get_args(hint)))
