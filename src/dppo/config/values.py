"""Check the values of settings with pydantic."""

import dataclasses
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from dppo.config.field import FlatSettings
from dppo.config.parts import about, default_of, settings_by_name, types_by_name
from dppo.config.refusals import description
from dppo.errors import ConfigError
from dppo.files import user_path


def validated(settings: FlatSettings) -> dict[str, Any]:
    """Return every setting, converted to its type; raise ConfigError with a line for each that is not valid."""
    try:
        model = _model()(**settings)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0])
            # a union gives several: the first is enough
            lines.setdefault(name, description(problem))
        raise ConfigError("\n".join(lines.values()), setting=next(iter(lines))) from None
    return {name: getattr(model, name) for name in settings_by_name()}


@cache
def _model() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in settings_by_name():
        kind = _checked_type(types_by_name()[name], about(name).limits)
        default = default_of(name)
        fields[name] = (kind, ... if default is dataclasses.MISSING else default)
    config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )
    return create_model("Settings", __config__=config, **fields)


def _checked_type(hint: Any, limits: dict[str, Any]) -> Any:
    """Return the type that pydantic checks: limits, integers in several notations, finite floats."""
    kinds = {hint, *get_args(hint)}
    if get_origin(hint) is tuple:
        item_hint = get_args(hint)[0]
        item = _checked_item(item_hint, limits)
        if item_hint is not int:
            return tuple.__class_getitem__((item, ...))
        integers = tuple.__class_getitem__((Annotated[item, BeforeValidator(_whole_number)], ...))
        return Annotated[integers, BeforeValidator(_split)]
    if int in kinds:
        return Annotated[hint, Field(**limits), BeforeValidator(_whole_number)]
    if float in kinds and get_origin(hint) is not dict:
        return Annotated[hint, Field(allow_inf_nan=False, **limits), BeforeValidator(_no_boolean)]
    return _checked_item(hint, limits)


def _checked_item(hint: Any, limits: dict[str, Any]) -> Any:
    """Return the type that pydantic checks where it is not a tuple, a number or a switch."""
    if Path in (hint, *get_args(hint)):
        return Annotated[hint, BeforeValidator(_user_path)]
    return Annotated[hint, Field(**limits)]


def _split(value: Any) -> Any:
    """Split `("64,64",)`, as a flag gives it; return other values unchanged."""
    match value:
        case [str(text)] if "," in text:
            return text.split(",")
    return value


def _user_path(value: Any) -> Any:
    """Replace `~` at the start of a path; return other values unchanged."""
    if isinstance(value, str | PathLike):
        return user_path(value)
    return value


def _whole_number(value: Any) -> Any:
    """Convert `1e6`, `1_000_000` and the like to an integer; return other values unchanged."""
    if isinstance(value, bool | np.bool_):
        raise PydanticCustomError("int_type", "a boolean")
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _no_boolean(value: Any) -> Any:
    """Refuse True and False, which pydantic reads as 1 and 0; return other values unchanged."""
    if isinstance(value, bool | np.bool_):
        raise PydanticCustomError("float_type", "a boolean")
    return value
