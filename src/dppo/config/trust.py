"""Find the code that settings name, and refuse to run it unless the user trusts its source."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dppo.config.field import FlatSettings
from dppo.errors import ConfigError, refuse
from dppo.invocation import command, typed_words

OURS = {f"dppo.envs.wrappers:{name}" for name in ("old_api", "no_limits", "SummedReward")}
"""Wrappers of this package, which messages name."""
NAMING = {
    "env_id": "environment",
    "model": "model",
    "wrappers": "wrappers",
    "baseline": "baseline",
    "prior": "controller",
}
"""Settings with import paths, and what these name."""


def code_named_by(settings: FlatSettings) -> dict[str, str]:
    """Describe the code that flat settings import and call; the keys are the settings that name it.

    A plain Gymnasium id, without `module:`, is not among them: an installed package has registered its environment.
    """
    code = {}
    for setting in NAMING:
        value = settings.get(setting, "")
        paths = value if isinstance(value, list | tuple) else [value]
        if setting == "wrappers":
            paths = [path for path in paths if path not in OURS]
        kwargs = settings.get(f"{setting.removesuffix('_id')}_kwargs")
        actions = [_describe_import(str(path), kwargs) for path in paths if ":" in str(path)]
        if actions:
            code[setting] = ", ".join(actions)
    return code


def _describe_import(path: str, kwargs: Any) -> str:
    module, _, name = path.partition(":")
    if re.search(r"-v\d+$", name):
        return f"imports {module} and makes {name}"
    arguments = ""
    if isinstance(kwargs, Mapping):
        arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
    return f"imports {module} and calls {name}({arguments})"


def require_trust(
    stored_settings: FlatSettings,
    user_settings: Collection[str],
    origin: object,
    *,
    trust: bool = False,
    nameable: Collection[str] = ("env_id", "model"),
) -> None:
    """Raise ConfigError, with a line for each, if settings would import code that is named only by a file.

    Args:
        stored_settings: flat settings from a file.
        user_settings: settings that the user gave, and so trusts.
        origin: the run that the file belongs to.
        trust: True to refuse only objects of a Python program, which no file can name.
        nameable: settings that the user can give instead.
    """
    refuse(_untrusted(stored_settings, user_settings, origin, trust, nameable))


def _untrusted(
    stored_settings: Mapping[str, Any],
    user_settings: Collection[str],
    origin: object,
    trust: bool,
    nameable: Collection[str],
) -> Iterator[ConfigError]:
    for name, action in code_named_by(stored_settings).items():
        if name in user_settings:
            continue
        if "<" in str(stored_settings[name]):  # <locals>, <lambda>
            argument = "model" if name == "model" else "env"
            yield ConfigError(
                f"{name}={stored_settings[name]}: is an object of a Python program, which {origin} cannot name. Pass "
                f"the object itself in Python: dppo.train(config, resume=...) or dppo.evaluate(run, {argument}=...)."
            )
        elif not trust:
            remedy = "Add `trust=True` if you trust that folder"
            if name in nameable:
                remedy += f", or name the {NAMING[name]} yourself"
            yield ConfigError(
                f"{name}={stored_settings[name]}: comes from the settings of {origin}, and {action}. {remedy}."
            )


def object_name(name: str) -> bool:
    """Return whether a name stands for an object of a Python program, which no command can import."""
    return "<" in name or name.startswith("__main__:")


def trust_flags(settings: FlatSettings) -> list[str]:
    """Return `--trust` in a list if a command needs it for a run with these settings, otherwise an empty list."""
    return ["--trust"] if code_named_by(settings) else []


def resume_command(run_dir: Path, settings: FlatSettings) -> str:
    """Return the command that resumes a run with these settings."""
    return command("train", "--resume", run_dir, *trust_flags(settings))


def resume_call(run_dir: Path, settings: FlatSettings) -> str:
    """Return what resumes a run with these settings: a command, or within a program a call of Python."""
    if typed_words() is None:
        return f"dppo.train(config, resume={str(run_dir)!r})"
    return resume_command(run_dir, settings)
