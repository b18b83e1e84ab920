"""The code that settings name: what is imported and called for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError

NAMING = {"env_id": "environment", "model": "model"}  # settings whose value may be an import path, and of what


def code_named_by(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what is imported and called for flat settings, in words, by the setting that names it.

    A plain Gymnasium id, without `module:`, names an environment that an installed package registered.
    """
    return {
        name: _in_words(str(settings[name]), settings.get(f"{name.removesuffix('_id')}_kwargs"))
        for name in NAMING
        if ":" in str(settings.get(name, ""))
    }


def _in_words(path: str, kwargs: Any) -> str:
    module, _, name = path.partition(":")
    if re.search(r"-v\d+$", name):
        return f"imports {module} and makes {name}"
    arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) if isinstance(kwargs, Mapping) else ""
    return f"imports {module} and calls {name}({arguments})"


def require_trust(stored: Mapping[str, Any], named: Collection[str], origin: object) -> None:
    """Refuse to run code that only a file names.

    Args:
        stored: flat settings from a file.
        named: settings that the user gave, and so trusts.
        origin: the run that the file belongs to.

    Raises:
        ConfigError: a stored setting would import code, with what it would do; or names none that can be imported.
    """
    for name, action in code_named_by(stored).items():
        if name in named:
            continue
        if "<" in str(stored[name]):  # <locals>, <lambda>
            raise ConfigError(
                f"{name}={stored[name]}: is an object that only a Python program has, so {origin} cannot name it. "
                f"Continue it in Python, with dppo.train(config, resume=...)."
            )
        raise ConfigError(
            f"{name}={stored[name]}: taken from the settings of {origin}, it {action}. Add --trust if you trust that "
            f"folder, or name the {NAMING[name]} yourself."
        )


def resume_command(env_name: str, run_dir: Path, model_name: str | None = None) -> str:
    """Return the command that continues a run."""
    trust = " --trust" if code_named_by({"env_id": env_name, "model": model_name}) else ""
    return f"dppo train --resume {run_dir}{trust}"
