"""Settings as mappings: flat, `{"num_steps": 64}`, or in groups, `{"sampling": {"num_steps": 64}}`."""

from collections.abc import Mapping
from typing import Any

from dppo.config.parts import PARTS, names_of, settings_by_name
from dppo.config.spelling import with_our_spelling
from dppo.errors import ConfigError


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten grouped settings: `{"sampling": {"num_steps": 64}}` becomes `{"num_steps": 64}`.

    A group that is the record of a part has all of its settings; settings beside it replace some of them. Values have
    our spelling.

    Raises:
        ConfigError: a group is not a mapping, or a setting is in the wrong group or given twice.
    """
    from_records: dict[str, Any] = {}
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in PARTS and isinstance(value, PARTS[name]):
            from_records |= vars(value)
            continue
        inner = _group(name, value) if name in PARTS else {name: value}
        for key in inner.keys() & flat.keys():
            raise ConfigError(
                f"{key}={inner[key]!r}: is given twice, alone and in its group. Leave one out."
            )
        flat |= inner
    return with_our_spelling(_translated(from_records | flat))


def _group(name: str, value: Any) -> dict[str, Any]:
    names = names_of(name)
    if not isinstance(value, Mapping):
        use = f"env_id={value!r}" if name == "env" else f"one of {', '.join(sorted(names))}"
        raise ConfigError(f"{name}={value!r}: {name} is a group of settings. Use {use}.")
    check_twice(name, value)
    inner = {str(key).replace("-", "_"): item for key, item in value.items()}
    for key in inner.keys() & settings_by_name().keys() - set(names):
        home = next(part for part in PARTS if key in names_of(part))
        raise ConfigError(f"{name}.{key}={inner[key]!r}: {key} belongs to {home}. Move it there.")
    return inner


def _translated(flat: dict[str, Any]) -> dict[str, Any]:
    """Translate the setting `on_bad_step` of a run from before there was `on_env_fault`."""
    if "on_bad_step" not in flat:
        return flat
    if flat.pop("on_bad_step") == "drop":
        return {"on_env_fault": "rebuild", "env_faults": "unlimited"} | flat
    return {"on_env_fault": "raise"} | flat


def check_twice(owner: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a setting is in the mapping of `owner` twice, with - and with _."""
    for key in map(str, settings):
        name = key.replace("-", "_")
        if key != name and name in settings:
            raise ConfigError(f"{owner}: has {key} and {name}, the same setting. Leave one out.")


def grouped(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        part: {name: settings[name] for name in names_of(part) if name in settings}
        for part in PARTS
    }
