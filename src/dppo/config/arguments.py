"""Answers to arguments of Python functions that do not exist, such as those of other libraries."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dppo.config.aliases import answer_to, meant_by
from dppo.config.parts import settings_by_name
from dppo.errors import ConfigError

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def with_answers(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Return a function that raises ConfigError, with what to do, for a keyword that `function` does not have."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        for name in kwargs.keys() - known:
            raise ConfigError(_answer(function.__name__, name, list(known)))
        return function(*args, **kwargs)

    return call


def _answer(function: str, name: str, known: list[str]) -> str:
    fact = f"dppo.{function}() has no argument {name}."
    dashed = name.replace("_", "-").lower()
    ours = [flag[2:].replace("-", "_") for flag in meant_by(dashed)]
    here = [one for one in ours if one in known] or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if here:
        return f"{fact} Did you mean {here[0]}?"
    if (answer := answer_to(dashed, known)) is not None:
        return f"{fact} {answer}"
    setting = next((one for one in (name, *ours) if one in settings_by_name()), None)
    if setting is not None:
        return f"{fact} It is a setting: dppo.Config({setting}=...)."
    return f"{fact} It has {', '.join(known)}."
