"""Every setting of `Config` as a flag: in a parser, back to settings, and in the remedies of errors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from dppo.commands.parser import Parser
from dppo.config.parts import PARTS, about, default_of, names_of, settings_by_name, types_by_name
from dppo.errors import ConfigError

FIRST = (  # the settings that people use first
    "total_timesteps", "num_actors", "num_samplers", "envs_per_sampler", "num_steps",
    "learning_rate", "gamma", "seed", "env_kwargs", "run_dir",
)  # fmt: skip
EXTRA = {  # flags that name a source of settings
    "config": ("FILE", "YAML or TOML file of settings. Flags take precedence over it."),
    "preset": (
        "NAME",
        "Tuned settings of an environment, by its id; none; or auto, those of ENV_ID if there are any. --config and "
        "flags take precedence over them. (default: auto)",
    ),
    "resume": (
        "RUN",
        "Continue the run in this folder (or from one of its checkpoints) exactly. auto: continue the run in --run-dir "
        "if there is one, else start it.",
    ),
    "branch": (
        "NEW_DIR",
        "Instead of continuing the RUN of --resume, start a new run in NEW_DIR from its weights, optimizer and "
        "normalizers. Counters begin at zero, and other settings are allowed.",
    ),
}
TRUST = (
    "Import and call the code that the settings of RUN name, such as an environment module:factory. Not needed for a "
    "plain Gymnasium id, nor for what you name yourself."
)


def flag(name: str) -> str:
    """Return the flag of a setting: `--num-actors`."""
    return f"--{name.replace('_', '-')}"


def add_settings(parser: Parser, defaults: Mapping[str, Any], *, leave_out: Collection[str] = ()) -> None:
    """Add a flag for each setting, in groups: the most used ones, sources of settings, then the parts of `Config`.

    For --help, `defaults` apply in place of the settings' own, and the flags named in `leave_out` are not listed.
    """
    first = parser.add_argument_group("most used")
    for name in FIRST:
        _add(first, name, defaults, name in leave_out)
    sources = parser.add_argument_group("files, presets and earlier runs")
    for name, (metavar, text) in EXTRA.items():
        sources.add_argument(flag(name), metavar=metavar, help=argparse.SUPPRESS if name in leave_out else text)
    sources.add_argument("--trust", action="store_true", help=argparse.SUPPRESS if "trust" in leave_out else TRUST)
    for part, record in PARTS.items():
        group = parser.add_argument_group(f"{part}: {(record.__doc__ or '').rstrip('.')}")
        for name in names_of(part):
            if name not in (*FIRST, "env_id"):
                _add(group, name, defaults, name in leave_out)


def _add(group: Any, name: str, defaults: Mapping[str, Any], hidden: bool) -> None:
    hint, text = types_by_name()[name], about(name).help
    default = defaults.get(name, default_of(name))
    if default is not None or "Default: " not in text:
        text = f"{text} (default: {_shown(default)})"
    text = argparse.SUPPRESS if hidden else text.replace("%", "%%")
    if hint is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
    else:
        several: dict[str, Any] = {"nargs": "*"} if get_origin(hint) is tuple else {}
        group.add_argument(flag(name), metavar=_metavar(hint), help=text, **several)


def _shown(value: Any) -> str:
    """Return a default as a user would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    kinds = {hint, get_origin(hint), *get_args(hint)}
    for kind, word in ((dict, "JSON"), (Path, "PATH"), (int, "INT"), (float, "NUMBER")):
        if kind in kinds:
            return word
    return "TEXT"


def in_flags(text: str) -> str:
    """Return an error's text with the settings between backticks as flags: `norm_adv=False` becomes --no-norm-adv."""
    return re.sub("`([a-z_]+)(?:=([^`]*))?`", _as_flag, text)


def _as_flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    if name not in (*settings_by_name(), *EXTRA, "trust", "render"):
        return found[0]
    if name == "branch":
        return "--branch NEW_DIR"
    if name == "env_id":  # the environment has no flag
        return value or "ENV_ID"
    if value in ("True", "False") and types_by_name().get(name, bool) is bool:
        return flag(name) if value == "True" else flag(f"no_{name}")
    return f"{flag(name)} {value}" if value else flag(name)


def as_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given as settings, not yet checked; raise as `parsed_json`."""
    settings: dict[str, Any] = {}
    for name, text in given.items():
        hint = types_by_name()[name]
        missing = text == "none" and NoneType in get_args(hint)
        settings[name] = None if missing else parsed_json(name, text) if get_origin(hint) is dict else text
    return settings


def parsed_json(name: str, text: str) -> Any:
    """Return the value of a flag that is written as JSON; raise a ConfigError if it is not."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: is not JSON ({error}). Write it like '{{\"licence\": 1}}'.") from None
