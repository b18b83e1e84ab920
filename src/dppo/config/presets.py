"""Presets: tuned settings by environment, or for a purpose."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dppo.config.checks import check
from dppo.config.field import FlatSettings
from dppo.config.parts import default_of, names_of
from dppo.config.settings import Settings
from dppo.errors import ConfigError, unknown_name
from dppo.invocation import command

PRESETS = Path(__file__).parent.parent / "presets"


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for an environment id, for ids that fit a pattern such as MiniGrid-*, or for a purpose, as fast."""

    name: str
    family: str
    about: dict[str, str]
    settings: dict[str, Any]


def described_presets() -> Iterator[Preset]:
    """Yield all presets, in the order of their files; `about["applies"]` is when a preset is used."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(PRESETS.glob("*.yaml")):
        presets_of_file: dict[str, dict[str, Any]] = yaml.load(path.read_bytes(), loader) or {}
        for name, settings in presets_of_file.items():
            about = settings.pop("about", {"applies": "by itself"})
            yield Preset(name, path.stem, about, settings)


def presets() -> dict[str, dict[str, Any]]:
    """Return tuned settings by the name of their preset; none where the defaults do as well."""
    return {preset.name: preset.settings for preset in described_presets()}


def preset_of(env_id: str) -> Preset | None:
    """Return the first preset whose name or pattern fits an id, which may name a module: `module:Name-v0`."""
    name = env_id.rpartition(":")[2]
    return next((preset for preset in described_presets() if fnmatchcase(name, preset.name)), None)


def preset_named(name: str) -> Preset:
    """Return the preset of this name, or for this environment; raise ConfigError if there is none."""
    preset = preset_of(name)
    if preset is None:
        raise ConfigError(
            f"preset={unknown_name('preset', name, presets())} `{command('presets')}` lists them."
        )
    return preset


# ------------------------------------------------------------------ beside the user's settings


def merge_preset(
    user_settings: FlatSettings, tuned: FlatSettings
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Merge the user's flat settings into the tuned ones of a preset.

    A tuned value that conflicts with a setting of the user's is replaced by its default; a minibatch larger than the
    batch becomes the batch. Return the settings and a note on each replacement. Errors that the user's settings cause
    alone are left for `check`.
    """
    algo = user_settings.get("algo", "ppo")
    notes: tuple[str, ...] = ()
    if algo != tuned.get("algo", "ppo"):
        env_settings = {name: tuned[name] for name in tuned if name in names_of("env")}
        dropped = tuned.keys() - env_settings.keys() - user_settings.keys()
        if dropped:
            names = ", ".join(name for name in tuned if name in dropped)
            tuned_for = tuned.get("algo", "ppo")
            note = f"the preset is for algo={tuned_for}; not taken over for algo={algo}: {names}"
            notes = (note,)
        tuned = env_settings
    merged, replaced = _merged(user_settings, tuned)
    return merged, (*notes, *replaced)


def _merged(
    user_settings: FlatSettings, tuned: FlatSettings
) -> tuple[dict[str, Any], tuple[str, ...]]:
    kwargs = user_settings.get("env_kwargs")
    if isinstance(kwargs, Mapping):
        user_settings = {**user_settings, "env_kwargs": {**tuned.get("env_kwargs", {}), **kwargs}}
    preset_settings = {name: value for name, value in tuned.items() if name not in user_settings}
    notes = []
    while preset_settings:
        error = _refusal({**preset_settings, **user_settings})
        if error is None:
            break
        name = _conflicting(error, preset_settings, user_settings)
        if name is None:
            break
        value = preset_settings.pop(name)
        if name == "minibatch_size":
            preset_settings |= _limited_to_batch(value, {**preset_settings, **user_settings})
        fact = str(error).partition(". ")[0]
        notes.append(f"preset: {fact}; using {name}={preset_settings.get(name, default_of(name))}")
    return {**preset_settings, **user_settings}, tuple(notes)


def _refusal(settings: FlatSettings) -> ConfigError | None:
    """Check settings as `Config` does; return its error, or None if they are accepted."""
    try:
        check(Settings(**settings))
    except ConfigError as error:
        return error
    return None


def _conflicting(
    error: ConfigError, preset_settings: FlatSettings, user_settings: FlatSettings
) -> str | None:
    """Return the tuned setting to replace: as the error names it, or the first without which there is no error."""
    if error.setting in preset_settings:
        return error.setting
    for name in preset_settings:
        remaining = {
            setting: value for setting, value in preset_settings.items() if setting != name
        }
        if _refusal({**remaining, **user_settings}) is None:
            return name
    return None


def _limited_to_batch(minibatch_size: int, settings: FlatSettings) -> dict[str, int]:
    """Return the batch as minibatch size if that is smaller; nothing if another setting is invalid."""
    try:
        batch_size = Settings(**settings).batch_size
    except ConfigError:
        return {}
    if minibatch_size > batch_size:
        return {"minibatch_size": batch_size}
    return {}
