"""Settings as JSON values, for the files of a run; Python objects become their text."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dppo.config.algorithms import own_defaults
from dppo.config.atari import atari_defaults
from dppo.config.field import FlatSettings
from dppo.config.parts import default_of, settings_by_name
from dppo.config.settings import Settings
from dppo.errors import ConfigError, refuse

OBJECT = "!python"  # key of the text that stands in for a Python object in a file


def plain_settings(config: Settings) -> dict[str, Any]:
    """Return all settings as flat JSON values, with derived values in place of None where a value is derived."""
    settings = {
        name: plain(getattr(config, name)) for name in settings_by_name() if name != "run_dir"
    }
    return settings | {
        "env_id": config.env_name,
        "wrappers": list(config.wrapper_names),
        "model": config.model_name,
        "baseline": config.baseline_name,
        "prior": config.prior_name,
        "minibatch_size": config.minibatch_size or config.sizes.minibatch_rows,
    }


def plain_defaults(settings: FlatSettings) -> dict[str, Any]:
    """Return the default of each setting as a JSON value, for the algorithm and the environment of flat settings."""
    defaults = {name: default_of(name) for name in settings_by_name()}
    defaults |= atari_defaults(settings) | own_defaults(settings)
    return {name: plain(value) for name, value in defaults.items()}


def plain(value: Any, *, outermost: bool = True) -> Any:
    """Return `value` as JSON data; objects that JSON cannot represent become their repr, under the key OBJECT."""
    try:
        text = json.dumps(value, default=_plain_object)
        if _has_other_keys(value):
            raise TypeError("keys that JSON would turn into text")
        return json.loads(text)
    except (TypeError, ValueError) as error:
        # keys that are not strings, or a list that contains itself
        only_inside = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if only_inside and (outermost or isinstance(error, TypeError)):
            return {
                key: plain(item, outermost=isinstance(error, TypeError))
                for key, item in value.items()
            }
        return _plain_object(value)


def as_typed(value: Any) -> str:
    """Return the value of a setting as flags and documents write it: none, true, [64, 64], or text as it is."""
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(plain(value))


def _has_other_keys(value: Any) -> bool:
    """Return whether a dict in `value` has keys such as 1, None or True, which JSON turns into other keys."""
    if isinstance(value, dict):
        return not all(isinstance(key, str) for key in value) or any(
            map(_has_other_keys, value.values())
        )
    return isinstance(value, list | tuple) and any(map(_has_other_keys, value))


def _plain_object(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's scalars
        return value.item()
    return {OBJECT: re.sub(r" at 0x[0-9a-f]+", "", repr(value))}


def objects_in(settings: FlatSettings) -> Iterator[tuple[str, str, str]]:
    """Yield setting, name and text of each argument of environments that is a Python object, or the text of one."""
    for setting in ("env_kwargs", "eval_env_kwargs"):  # model_kwargs are always JSON
        kwargs = settings.get(setting)
        if not isinstance(kwargs, Mapping):
            continue
        for name, value in kwargs.items():
            text = json.dumps(plain(value))
            if OBJECT in text:
                yield setting, name, text


def refuse_objects(settings: FlatSettings, why: str) -> None:
    """Raise ConfigError if an argument of environments is a Python object, or the text of one."""
    refuse(
        ConfigError(
            f"{setting}: {name} is {text}, {why}. Use text, numbers, lists, dicts with text as keys."
        )
        for setting, name, text in objects_in(settings)
    )
