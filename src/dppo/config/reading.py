"""Read settings from YAML and TOML files, which may be a stranger's."""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dppo.config.aliases import answer_to, meant_by
from dppo.config.groups import check_twice, flattened
from dppo.config.parts import PARTS, settings_by_name
from dppo.config.plain import OBJECT, refuse_objects
from dppo.config.refusals import unknown_setting
from dppo.errors import ConfigError, refuse
from dppo.files import MAX_SETTINGS_BYTES, read_file

OTHER_NAMES = {*PARTS, "versions", "on_bad_step"}
"""Names in files that are not settings."""
ABOUT = re.compile(r"(?m)^(?:[a-z]\w*\.)?([a-z]\w*)(?:\.\d+)*[=:]")
"""The beginning of a refusal's line, with the name of its setting or group."""


def read_settings(path: Path, *, trusted: bool = True) -> dict[str, Any]:
    """Return the flat, unchecked settings of a YAML or TOML file.

    Args:
        path: a file.
        trusted: False for a file that may be a stranger's: it must be small, a regular file, and without aliases.

    Raises:
        ConfigError: the file cannot be read as settings.
    """
    data = _read(path, trusted)
    check_twice(f"config={path}", data)
    with _with_lines(path):
        settings = flattened(
            {key.replace("-", "_"): value for key, value in data.items() if key != "versions"}
        )
    # a config.yaml of a run; dates of YAML are objects and no texts yet
    if trusted and repr(OBJECT) in repr(settings):
        refuse_objects(settings, f"the text of a Python object in {path}")
    return settings


def check_file(path: Path, *, trusted: bool = True, replaced: Collection[str] = ()) -> None:
    """Raise ConfigError, with file and line, for unknown names and for invalid values, except of `replaced` settings.

    `trusted`: as in `read_settings`.
    """
    from dppo.config.values import validated  # imports pydantic, which an actor must not load

    refuse(_unknown_names(path, trusted))
    settings = read_settings(path, trusted=trusted)
    used = {name: value for name, value in settings.items() if name not in replaced}
    with _with_lines(path):
        validated({"env_id": "-"} | used)


@contextmanager
def _with_lines(path: Path) -> Iterator[None]:
    """Add file and line to each line of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        text = ABOUT.sub(
            lambda about: f"{_place(about[1], path, about.string[about.end() :])}: {about[0]}",
            str(error),
        )
        raise ConfigError(text, setting=error.setting) from None


def _unknown_names(path: Path, trusted: bool) -> Iterator[ConfigError]:
    for name, value in _read(path, trusted).items():
        in_group = name in PARTS and isinstance(value, dict) and bool(value)
        for key in map(str, value if in_group else [name]):
            if key.replace("-", "_") not in settings_by_name().keys() | OTHER_NAMES:
                dashed = key.replace("_", "-").lower()
                is_known = bool(answer_to(dashed, ()) or meant_by(dashed))
                is_group = isinstance(value, dict) and bool(value) and not in_group and not is_known
                yield _unknown_name(key, path, is_group=is_group)


def _unknown_name(key: str, path: Path, *, is_group: bool) -> ConfigError:
    where = _place(key, path)
    if is_group:
        return ConfigError(
            f"{where}: {key} is not a setting, but contains settings, as in files of rl-baselines3-zoo. Move them to "
            f"the top of the file, without {key}, and name the environment as env_id or on the command line."
        )
    answer = re.sub(r"`([a-z_]+)(?:=([^`]*))?`", _as_key, unknown_setting(key))
    return ConfigError(f"{where}: {answer}")


def _as_key(setting: re.Match[str]) -> str:
    """Return a setting of an answer as it is written in the file, without the backticks that make it a flag."""
    name, value = setting.groups()
    if value is None:
        return name
    return f"{name}: {value.lower()}"


def _place(key: str, path: Path, refused: str = "") -> str:
    """Return the file, and the number of the line with a key; of several, the one that is indented the least.

    Those with a value with which the text `refused` begins come first.
    """
    name = re.escape(key).replace("_", "[-_]")
    text = path.read_text(encoding="utf8", errors="replace")
    keys = re.finditer(rf"(?m)^([^#\n]*?)(?<![\w-]){name}[\"']?\s*[:=] *([^\s,}}]*)", text)
    # others are in values, such as env_kwargs
    key_of_setting = min(
        keys, key=lambda match: (not refused.startswith(match[2]), len(match[1])), default=None
    )
    line = 1 + text.count("\n", 0, key_of_setting.start() if key_of_setting else 0)
    return f"config={path}, line {line}"


def versions_in(path: Path) -> dict[str, Any]:
    """Return the versions in the config.yaml of a run, perhaps a stranger's; raise as `read_settings`."""
    versions = _read(path, trusted=False).get("versions")
    return versions if isinstance(versions, dict) else {}


def _read(path: Path, trusted: bool) -> dict[str, Any]:
    import yaml

    from dppo.config.safe_yaml import load

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = path.read_bytes() if trusted else read_file(path, MAX_SETTINGS_BYTES)
        text = content.decode("utf8")
        data = tomllib.loads(text) if path.suffix == ".toml" else load(text, aliases=trusted)
    except (OSError, ArithmeticError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"config={path}: cannot be read as settings: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kind = "nothing" if data is None else type(data).__name__
        raise ConfigError(
            f"config={path}: contains {kind}, not settings. Write `name: value` lines."
        )
    return data
