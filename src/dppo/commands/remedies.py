"""Write the settings of an error's remedies as flags, as they are typed on the command line."""

from __future__ import annotations

import re

from dppo.commands.settings_flags import EXTRA, flag
from dppo.config.parts import settings_by_name, types_by_name


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
