"""Check annotated shapes whenever a test calls a function or creates a record of the algorithm."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar
from unittest import mock

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook, jaxtyped

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
T = TypeVar("T")
PLAIN = frozenset({type(None), bool, int, float, str, type})
"""Types without a dtype. Noticing that by an exception would take ten times as long."""
WITHOUT_SHAPES: set[CodeType] = set()
"""Functions that need no checks. Those within functions are made, and decorated, again and again."""


def check_shapes() -> None:
    """Import `MODULES` so that calls and new records are checked against their annotations.

    These modules import jaxtyping only under TYPE_CHECKING, so that actors do not load it. TYPE_CHECKING is therefore
    set to true while they are imported here. Modules that would break then are imported before.
    """
    import torch  # noqa: F401

    import dppo.config
    import dppo.spaces.spaces  # noqa: F401

    # The hook decorates by this name; functions within functions are decorated later, whenever they are made.
    jaxtyping.jaxtyped = _decorator  # type: ignore[assignment]
    with (
        mock.patch.object(typing, "TYPE_CHECKING", True),
        install_import_hook(MODULES, "shapes.checked"),
    ):
        for name in MODULES:
            importlib.import_module(name)


def _decorator(*, typechecker: Callable[[F], F]) -> Callable[[T], T]:
    """Return a decorator like jaxtyping's, whose checks of plain functions and of dataclasses are made once a kind."""

    def decorate(target: Any) -> Any:
        if inspect.isfunction(target):
            return target if target.__code__ in WITHOUT_SHAPES else once_a_kind(target)
        if not inspect.isclass(target):
            return jaxtyped(target, typechecker=typechecker)
        if "__dataclass_fields__" in vars(target):
            target.__init__ = once_a_kind(target.__init__)  # type: ignore[method-assign]
        return target

    return decorate


def once_a_kind(function: F) -> F:
    """Check the arguments and the result of each call, unless the same kinds of arguments and result have passed.

    jaxtyping takes as long for each of a million calls as some of these functions take. Whether it accepts a call
    depends only on `_kind` of the arguments and of the result, so it need not decide the same twice.
    """
    prepared: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # annotations may name what the module defines after the function
        if not prepared:
            prepared.append(_checking(function))
        return prepared[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `once_a_kind` calls: `function` itself if it names no shapes, or JAXTYPING_DISABLE is set."""
    signature = inspect.signature(function, eval_str=True)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    is_checked = any(map(_is_checked, (*hints.values(), signature.return_annotation)))
    if not is_checked or jaxtyping.config.jaxtyping_disable:
        WITHOUT_SHAPES.add(function.__code__)
        return function
    thread_state = threading.local()

    @functools.wraps(function)
    def relay(*args: Any, **kwargs: Any) -> Any:
        if "result" in vars(thread_state):
            return vars(thread_state).pop("result")
        return function(*args, **kwargs)

    relay.__signature__ = signature  # type: ignore[attr-defined]
    checking: Callable[..., Any] = jaxtyped(relay, typechecker=checked)
    # an axis `{steps}` is as long as the value of an argument
    is_variable = "{" in str((*hints.values(), signature.return_annotation))
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if is_variable or kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return checking
    shaped = [(i, name) for i, name in enumerate(hints) if _is_checked(hints[name])]
    accepted: dict[tuple[Any, ...], set[Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        kinds = tuple(
            [
                _kind(args[i] if i < len(args) else kwargs.get(name, inspect.Parameter))
                for i, name in shaped
            ]
        )
        try:
            is_new = kinds not in accepted
        except TypeError:  # torch exports a network: its sizes are symbols, which have no hash
            return function(*args, **kwargs)
        if is_new:
            result = checking(*args, **kwargs)
            accepted.setdefault(kinds, set()).add(_kind(result))
            return result
        result = function(*args, **kwargs)
        kind = _kind(result)
        if kind not in accepted[kinds]:
            thread_state.result = result
            checking(*args, **kwargs)
            accepted[kinds].add(kind)
        return result

    return call


def _kind(value: Any) -> Any:
    """Return all that a check looks at: type, dtype and shape of arrays, also in tuples and mappings."""
    kind = type(value)
    if kind in PLAIN:
        return kind
    try:
        return kind, value.dtype, value.shape
    except AttributeError:
        pass
    if isinstance(value, tuple):
        return kind, *map(_kind, value)
    if isinstance(value, Mapping):
        return kind, *((name, _kind(element)) for name, element in value.items())
    return kind


def checked(function: F) -> F:
    """Check the annotations of `function` that name shapes; mypy checks the others.

    Sequences of any length are excluded: beartype checks one of their elements, chosen by Python's global generator,
    and tests must not disturb that generator.
    """
    shaped = {name: hint for name, hint in function.__annotations__.items() if _is_checked(hint)}
    # jaxtyping checks the arguments before a call, and again after it with the result, which it passes as `ret...`.
    has_the_result = any(re.match(r"ret(?!urn$)", name) for name in function.__annotations__)
    if not has_the_result or not shaped:
        return function
    function.__annotations__ = shaped
    return beartype(function)


def _is_checked(hint: Any) -> bool:
    return _names_shapes(hint) and not _has_any_length(hint)


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
