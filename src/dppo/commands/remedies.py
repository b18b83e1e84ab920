"""Write the settings of an error's remedies as flags, as they are typed on the command line."""

from __future__ import annotations

import re

from dppo.commands.settings_flags import EXTRA, flag
from dppo.config.parts import settings_by_name, types_by_name

CALL = r"\w\([^()]*\)"  # Python code: train(config, resume=...)
SUGGESTION = r"Did you mean [^?]*\?"  # a name in a file
ASSIGNED = r"\b([a-z_]+)=([\w.+/~:-]*\w)"
BARE = r"(?<![\w.=/-])([a-z]+(?:_[a-z]+)+)\b(?![=(/.]\w|=)"


def in_flags(text: str) -> str:
    """Return an error's text with the settings of its remedies written as flags: `norm_adv=False` as `--no-norm-adv`.

    The first sentence of each line, which names the setting and the fact, stays unchanged.
    """
    return "\n".join(_remedy_in_flags(line) for line in text.split("\n"))


def _remedy_in_flags(line: str) -> str:
    fact, end, remedy = line.partition(". ")
    return fact + end + re.sub(f"{CALL}|{SUGGESTION}|{ASSIGNED}|{BARE}", _as_flag, remedy)


def _as_flag(found: re.Match[str]) -> str:
    name, value, bare = found.groups()
    if bare in settings_by_name():
        return "ENV_ID" if bare == "env_id" else flag(bare)  # the environment has no flag
    if name == "branch":
        return "--branch NEW_DIR"
    if name in ("trust", "render") and value == "True":
        return flag(name)
    if name not in (*settings_by_name(), *EXTRA):
        return found[0]
    if types_by_name().get(name) is bool:
        return flag(name) if value == "True" else flag(f"no_{name}")
    return value if name == "env_id" else f"{flag(name)} {value}"
