"""Answers to unknown arguments of Python functions, such as arguments of other libraries."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dppo.config.aliases import answer_to, meant_by
from dppo.config.parts import settings_by_name
from dppo.errors import ConfigError, refuse

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def with_answers(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Return a function that raises ConfigError, with what to do, for a keyword that `function` does not have."""
    parameters = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        if not kwargs.keys() <= parameters:
            refuse(
                ConfigError(_answer(function.__qualname__, name, list(parameters)))
                for name in kwargs
                if name not in parameters
            )
        return function(*args, **kwargs)

    return call


def _answer(function: str, name: str, parameters: list[str]) -> str:
    fact = f"dppo.{function}() has no argument {name}."
    is_method = parameters[0] == "self"
    if is_method:
        parameters = parameters[1:]
    dashed = name.replace("_", "-").lower()
    ours = [flag[2:].replace("-", "_") for flag in meant_by(dashed)]
    alike = [argument for argument in ours if argument in parameters]
    alike += difflib.get_close_matches(name, parameters, n=1, cutoff=0.8)
    if alike:
        return f"{fact} Did you mean {alike[0]}?"
    answer = answer_to(dashed, parameters)
    if answer is not None:
        return f"{fact} {answer}"
    for setting in (name, *ours):
        if setting in settings_by_name() and not is_method:
            return f"{fact} It is a setting: dppo.Config({setting}=...)."
    return f"{fact} It has {', '.join(parameters)}."
