"""Check the values of settings with pydantic, and rewrite its errors for users."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from dppo.config.aliases import answer_to, meant_by
from dppo.config.parts import about, default_of, settings_by_name, types_by_name
from dppo.errors import ConfigError, unknown_name
from dppo.files import user_path


def validated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting, converted to its type; raise ConfigError with a line for each that is not valid."""
    try:
        model = _model()(**settings)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0])
            lines.setdefault(name, _describe(problem))  # a union gives several: the first is enough
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
    if "off" in kinds:
        # YAML's own word
        return Annotated[hint, BeforeValidator(lambda value: "off" if value is False else value)]
    if int in kinds:
        return Annotated[hint, Field(**limits), BeforeValidator(_whole_number)]
    if float in kinds and get_origin(hint) is not dict:
        return Annotated[hint, Field(allow_inf_nan=False, **limits)]
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
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


SCHEDULED = {  # settings that other libraries take as functions of the progress
    "learning_rate": "Use a number, with `anneal_lr=True` for a linear decay to 0, or `desired_kl` to adapt it.",
    "clip_coef": "Use a number.",
    "ent_coef": "Use a number.",
}
REMEDIES = {  # first letters of pydantic's error type -> remedy
    "greater_than": "Use a larger value.",
    "less_than": "Use a smaller value.",
    "finite_number": "Use a number such as 0.001 or 1e-3.",
    "int_": "Use one such as 1000 or 1e3.",
    "float_": "Use one such as 0.001 or 1e-3.",
    "bool_": "Use true or false.",
    "literal_error": "Use one of these.",
    "dict_": "Use `name: value` pairs.",
    "tuple_": "Use a list.",
}


def unknown_setting(name: str) -> str:
    """Say that a setting is not known, and what to use instead, if anything is known about its name."""
    dashed = name.replace("_", "-").lower()
    answer = answer_to(dashed, ())
    if answer is not None:
        return f"{name} is not a known setting. {answer}"
    meant = (flag[2:].replace("-", "_") for flag in meant_by(dashed))
    return unknown_name("setting", name, settings_by_name(), meant)


def _describe(error: Any) -> str:
    """Return one of pydantic's errors in the form `setting=value: fact. Remedy`."""
    name, *inner = error["loc"]
    path = ".".join([str(name), *(str(index) for index in inner if isinstance(index, int))])
    if error["type"] == "extra_forbidden":
        return unknown_setting(path)
    if path == "env_id" and hasattr(error["input"], "step"):
        return (
            f"env_id={error['input']}: is an environment. Pass its id, or a function that makes one for each "
            f"sampler."
        )
    if callable(error["input"]) and path in SCHEDULED:
        return f"{path}={error['input']!r}: a function of time is not supported. {SCHEDULED[path]}"
    if error["type"] == "value_error":  # raised by a validator of dppo
        return f"{path}={error['ctx']['error']}"
    if error["type"] == "missing":
        return f"{path} is missing. Pass {path}=..."
    remedy = next((text for start, text in REMEDIES.items() if error["type"].startswith(start)), "")
    fact = error["msg"].removeprefix("Input ").replace("should be", "must be", 1)
    fact = fact.partition(", unable to ")[0]
    return f"{path}={error['input']!r}: {fact[:1].lower()}{fact[1:]}. {remedy}".rstrip()
