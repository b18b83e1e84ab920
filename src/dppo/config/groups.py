"""Settings as mappings: flat, `{"num_steps": 64}`, or in groups, `{"sampling": {"num_steps": 64}}`."""

from collections.abc import Iterator, Mapping
from typing import Any

from dppo.config.field import FlatSettings
from dppo.config.parts import PARTS, names_of, settings_by_name
from dppo.config.spelling import with_our_spelling
from dppo.errors import ConfigError, refuse


def flattened(settings: FlatSettings) -> dict[str, Any]:
    """Flatten grouped settings: `{"sampling": {"num_steps": 64}}` becomes `{"num_steps": 64}`.

    A group that is the record of a part has all of its settings; settings beside it replace some of them. Values have
    our spelling.

    Raises:
        ConfigError: with a line for each group that is not a mapping, and each setting in the wrong group or given
            twice.
    """
    from_records: dict[str, Any] = {}
    flat: dict[str, Any] = {}
    problems: list[ConfigError] = []
    for name, value in settings.items():
        if name in PARTS and isinstance(value, PARTS[name]):
            from_records |= vars(value)
            continue
        inner = {name: value}
        if name in PARTS:
            inner = _group(name, value, problems)
        problems += [
            ConfigError(
                f"{key}={flat[key]!r}: is given twice, alone and in its group. Leave one out."
            )
            for key in inner
            if key in flat
        ]
        flat |= inner
    refuse(problems)
    return with_our_spelling(_translated(from_records | flat))


def _group(name: str, value: Any, problems: list[ConfigError]) -> dict[str, Any]:
    """Return the settings of a group, and add what is wrong with it to `problems`."""
    names = names_of(name)
    if not isinstance(value, Mapping):
        use = f"env_id={value!r}" if name == "env" else f"one of {', '.join(sorted(names))}"
        problems.append(ConfigError(f"{name}={value!r}: {name} is a group of settings. Use {use}."))
        return {}
    problems += _twice(name, value)
    inner = {str(key).replace("-", "_"): item for key, item in value.items()}
    for key, item in inner.items():
        if key in names or key not in settings_by_name():
            continue
        home = next(part for part in PARTS if key in names_of(part))
        problems.append(
            ConfigError(f"{name}.{key}={item!r}: {key} belongs to {home}. Move it there.")
        )
    return inner


def _translated(flat: dict[str, Any]) -> dict[str, Any]:
    """Translate the setting `on_bad_step` of a run from before there was `on_env_fault`."""
    if "on_bad_step" not in flat:
        return flat
    if flat.pop("on_bad_step") == "drop":
        return {"on_env_fault": "rebuild", "env_faults": "unlimited"} | flat
    return {"on_env_fault": "raise"} | flat


def check_twice(owner: str, settings: FlatSettings) -> None:
    """Raise ConfigError, with a line for each, if settings of `owner` are there twice, with - and with _."""
    refuse(_twice(owner, settings))


def _twice(owner: str, settings: FlatSettings) -> Iterator[ConfigError]:
    for key in map(str, settings):
        name = key.replace("-", "_")
        if key != name and name in settings:
            yield ConfigError(f"{owner}: has {key} and {name}, the same setting. Leave one out.")


def grouped(settings: FlatSettings) -> dict[str, dict[str, Any]]:
    return {
        part: {name: settings[name] for name in names_of(part) if name in settings}
        for part in PARTS
    }
