"""Settings as plain data, flat or in groups: from files, presets and defaults of games, and for the files of a run."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dppo.config.parts import PARTS, FlatSettings, may_be_none, names_of, settings_by_name
from dppo.errors import ConfigError, unknown_name
from dppo.files import DEEPEST, MOST_SETTINGS, read_file
from dppo.invocation import command

NUMBER = re.compile("[-+0-9:._]{1000,}")
PRESETS = Path(__file__).parent.parent / "presets"
OBJECT = "!python"  # key of the text that stands in for a Python object in a file


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without groups: those of `{"sampling": {"num_steps": 64}}` are `{"num_steps": 64}`.

    Raise ConfigError if a group is not a mapping, or a setting is in the wrong group or given twice.
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _group(name, value) if name in PARTS else {name: value}
        for key in inner.keys() & flat.keys():
            raise ConfigError(f"{key}={inner[key]!r}: is given twice, alone and in its group. Leave one out.")
        flat |= inner
    if "on_bad_step" in flat:  # of a run from before there was on_env_fault
        dropped = {"on_env_fault": "rebuild", "env_faults": "unlimited"}
        flat = (dropped if flat.pop("on_bad_step") == "drop" else {"on_env_fault": "raise"}) | flat
    return flat


def _group(name: str, value: Any) -> dict[str, Any]:
    """Return the settings of one group, given as its record or as a mapping."""
    own = names_of(name)
    if isinstance(value, PARTS[name]):
        return {key: getattr(value, key) for key in own}
    if not isinstance(value, Mapping):
        one = f"env_id={value!r}" if name == "env" else f"one of {', '.join(sorted(own))}"
        raise ConfigError(f"{name}={value!r}: {name} is a group of settings. Use {one}.")
    check_twice(name, value)
    inner = {str(key).replace("-", "_"): one for key, one in value.items()}
    for key in inner.keys() & settings_by_name().keys() - set(own):
        home = next(part for part in PARTS if key in names_of(part))
        raise ConfigError(f"{name}.{key}={inner[key]!r}: {key} belongs to {home}. Move it there.")
    return inner


def check_twice(what: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a setting is in a mapping twice, with - and with _."""
    for key in (str(key) for key in settings):
        if "-" in key and key.replace("-", "_") in settings:
            raise ConfigError(f"{what}: has {key} and {key.replace('-', '_')}, the same setting. Leave one out.")


def grouped(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return flat settings by group."""
    return {part: {name: settings[name] for name in names_of(part) if name in settings} for part in PARTS}


def plain(value: Any, *, outermost: bool = True) -> Any:
    """Return `value` as JSON data; objects that JSON cannot represent become their repr, under the key OBJECT."""
    try:
        text = json.dumps(value, default=_plain)
        if _keys_change(value):
            raise TypeError("keys that JSON would turn into text")
        return json.loads(text)
    except (TypeError, ValueError) as error:  # keys that are not strings, or a list that contains itself
        inside = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if inside and (outermost or isinstance(error, TypeError)):  # only values inside are at fault
            return {key: plain(one, outermost=isinstance(error, TypeError)) for key, one in value.items()}
        return _plain(value)


def _keys_change(value: Any) -> bool:
    """Return whether a dict in `value` has keys such as 1, None or True, which JSON turns into other keys."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    other = isinstance(value, dict) and not all(isinstance(key, str) for key in value)
    return other or any(map(_keys_change, inner))


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's scalars
        return value.item()
    return {OBJECT: re.sub(r" at 0x[0-9a-f]+", "", repr(value))}


def objects_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield setting, name and text of each argument of environments that is a Python object, or the text of one."""
    for of in ("env_kwargs", "eval_env_kwargs"):  # model_kwargs are always JSON
        kwargs = settings.get(of)
        for name, value in kwargs.items() if isinstance(kwargs, Mapping) else ():
            if OBJECT in (text := json.dumps(plain(value))):
                yield of, name, text


def refuse_objects(settings: Mapping[str, Any], why: str) -> None:
    """Raise ConfigError if an argument of environments is a Python object, or the text of one."""
    for of, name, text in objects_in(settings):
        raise ConfigError(f"{of}: {name} is {text}, {why}. Use text, numbers, lists, dicts with text as keys.")


def resolved(config: FlatSettings) -> dict[str, Any]:
    """Return all settings as flat JSON values, with derived values in place of None where there is one."""
    settings = {name: plain(getattr(config, name)) for name in settings_by_name() if name != "run_dir"}
    return settings | {
        "env_id": config.env_name,
        "wrappers": list(config.wrapper_names),
        "model": config.model_name,
        "minibatch_size": config.minibatch_size or config.sizes.minibatch_rows,
    }


def read_settings(path: Path, *, own: bool = True) -> dict[str, Any]:
    """Return the flat, unchecked settings of a YAML or TOML file; raise ConfigError if it cannot be read as such.

    One that may not be the user's `own`, of a run folder, must be small, a regular file, and without aliases.
    """
    data = _read(path, own)
    check_twice(f"config={path}", data)
    settings = flattened({key.replace("-", "_"): value for key, value in data.items() if key != "versions"})
    for name in [name for name, value in settings.items() if value == "none" and may_be_none(name)]:
        settings[name] = None  # as in flags
    if own and repr(OBJECT) in repr(settings):  # a config.yaml of a run; dates of YAML are objects and no texts yet
        refuse_objects(settings, f"the text of a Python object in {path}")
    return settings


def check_names(path: Path) -> None:
    """Raise ConfigError, with file and line, if a user's YAML or TOML file has a name that is no setting."""
    from dppo.config.values import unknown_setting  # imports pydantic, which an actor must not load

    data = _read(path, own=True)
    for name, value in data.items():
        inner = value if name in PARTS and isinstance(value, dict) else {}
        for key in (str(key) for key in (inner or [name])):
            if key.replace("-", "_") in (*settings_by_name(), *PARTS, "versions", "on_bad_step"):
                continue
            where = f"config={path}, line {_line_of(key, path)}"
            if not inner and isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {key} is not a setting, but has some, as in files of rl-baselines3-zoo. Move these "
                    f"to the top of the file, without {key}, and name the environment as env_id or on the command line."
                )
            raise ConfigError(f"{where}: {unknown_setting(key)}")


def _line_of(key: str, path: Path) -> int:
    """Return the number of the first line that begins with a key, also behind a quote or a brace."""
    lines = path.read_text(encoding="utf8", errors="replace").splitlines()
    starts = re.compile(rf"[\s{{\"'-]*{re.escape(key)}\b")
    return next((number for number, line in enumerate(lines, 1) if starts.match(line)), 1)


def versions_in(path: Path) -> dict[str, Any]:
    """Return the versions in the config.yaml of a run, perhaps a stranger's; raise as `read_settings`."""
    found = _read(path, own=False).get("versions")
    return found if isinstance(found, dict) else {}


def _read(path: Path, own: bool) -> dict[str, Any]:
    import yaml

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = (path.read_bytes() if own else read_file(path, MOST_SETTINGS)).decode("utf8")
        if path.suffix == ".toml":
            data = tomllib.loads(text)
        else:
            _check_events(yaml.parse(text, loader), aliases=own)
            data = yaml.load(text, loader)
    except (OSError, ArithmeticError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config={path}: cannot be read as settings: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"config={path}: contains {type(data).__name__}, not settings. Write `name: value` lines.")
    return data


def _check_events(events: Iterable[Any], *, aliases: bool) -> None:
    """Raise ValueError if a YAML file would take much longer to load than to read, or has a key of a mapping twice."""
    import yaml

    # Of each collection that has not ended: its keys, and whether a key is next; of a sequence, no key ever is.
    opened = list[tuple[set[str], list[bool]]]()
    for event in events:
        what, value = "", getattr(event, "value", "")
        if isinstance(event, yaml.NodeEvent) and opened and opened[-1][1]:
            keys, is_key = opened[-1]
            what = f"{value} for the second time" if is_key[0] and value in keys - {"", "<<"} else ""
            keys |= {value} if is_key[0] else set()
            is_key[0] = not is_key[0]
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((set(), [True] if isinstance(event, yaml.MappingStartEvent) else []))
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent) and not aliases:
            what = f"an alias, *{event.anchor}"
        text = bool(getattr(event, "style", "")) and getattr(event, "tag", None) is None  # in quotes, or a block
        if len(opened) > DEEPEST or (not text and NUMBER.fullmatch(value)):
            what = f"more than {DEEPEST} levels, or a very long number"
        if what:
            raise ValueError(f"line {event.start_mark.line + 1} has {what}")


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for an environment id, for ids that fit a pattern such as MiniGrid-*, or for a purpose, as fast."""

    name: str
    family: str
    about: dict[str, str]
    settings: dict[str, Any]


def described_presets() -> Iterator[Preset]:
    """Yield all presets, in the order of their files, which say of each when it `applies`."""
    import yaml

    for path in sorted(PRESETS.glob("*.yaml")):
        for name, own in (yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}).items():
            yield Preset(name, path.stem, own.pop("about", {"applies": "by itself"}), own)


def presets() -> dict[str, dict[str, Any]]:
    """Return tuned settings by the name of their preset; none where the defaults do as well."""
    return {one.name: one.settings for one in described_presets()}


def preset_of(env_id: str) -> Preset | None:
    """Return the first preset whose name or pattern fits an id, which may be that of a module: `module:Name-v0`."""
    return next((one for one in described_presets() if fnmatchcase(env_id.rpartition(":")[2], one.name)), None)


def preset(name: str) -> Preset:
    """Return the preset of this name, or for this environment; raise ConfigError if there is none."""
    if found := preset_of(name):
        return found
    raise ConfigError(f"preset={unknown_name('preset', name, presets())} `{command('presets')}` lists them.")


# ------------------------------------------------------------------ games of the Arcade Learning Environment

ATARI = {"atari": "life", "action_repeat": 4, "grayscale": True, "resize": (84, 84), "frame_stack": 4}
# CleanRL's cleanrl/ppo_atari.py: frames cost little, and an update of a CNN takes as long as collecting.
ATARI |= {"num_steps": 128, "update_epochs": 4, "learning_rate": 2.5e-4, "anneal_lr": True, "clip_coef": 0.1}
ATARI |= {"ent_coef": 0.01, "norm_reward": False}


def with_atari(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat settings, of games (ALE/*, or `atari` is set) with their defaults.

    In `env_kwargs`, `frameskip` repeats actions instead of us, and `obs_type` asks for raw observations.
    """
    given = settings.get("env_kwargs")
    kwargs = given if isinstance(given, Mapping) else {}
    game = str(settings.get("env_id")).rpartition(":")[2].startswith("ALE/") and "obs_type" not in kwargs
    if settings.get("atari", "life" if game else "raw") == "raw":
        return dict(settings)
    implied = ATARI | {"sign_reward": settings.get("clip_reward") is None}
    return implied | ({"action_repeat": 1} if "frameskip" in kwargs else {}) | dict(settings)


def atari_in_words(config: FlatSettings) -> str | None:
    """Return how a game is prepared, and how to play it raw, in words; None without `atari`."""
    if config.atari == "raw":
        return None
    size = " x ".join(map(str, config.resize or ("full size",)))
    life = ", and the loss of a life ends an episode for learning only" * (config.atari == "life")
    frames = f"{config.action_repeat} frames an action, {size}, stacks of {config.frame_stack}{life}"
    rest = "Returns are those of whole games. PPO's defaults are CleanRL's for Atari. atari=raw turns all this off."
    return f"Frames: {config.env_name} starts with 1 to 30 no-ops; {frames}. {rest}"
