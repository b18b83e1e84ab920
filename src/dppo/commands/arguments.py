"""From command-line flags to settings: every setting of `Config` is a flag of the same name."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
import yaml

from dppo.config import Config, read_settings
from dppo.errors import ConfigError, DppoError, unknown_name
from dppo.run_folder import settings_to_resume

PRESETS = Path(__file__).parent.parent / "presets"
EXTRA = {  # flags that say where settings come from
    "config": "YAML or TOML file of settings; flags win over it.",
    "preset": "Tuned settings: the name of an environment that has some, `none`, or `auto` for this environment's own.",
    "resume": "Folder of a run (or one of its checkpoints) to go on with, exactly.",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a command line asks for."""

    settings: dict[str, Any]
    """For `make_config`; not yet checked."""
    preset: str | None = None
    """The preset whose settings are among them."""
    tuned: frozenset[str] = frozenset()
    """The settings that come from it."""
    resume: Path | None = None


def parse(argv: list[str], prog: str) -> Arguments:
    """Settings from `ENV_ID --flag value ...`: defaults, then the preset, then --config, then flags.

    Raises:
        ConfigError: an unknown flag, a file that holds no settings, a preset that does not exist.
    """
    env_id = argv[0] if argv and not argv[0].startswith("-") else None
    given = _flags_given(argv[1:] if env_id else argv, prog)
    config, preset, resume = (given.pop(name, None) for name in EXTRA)
    if env_id is not None:
        given["env_id"] = env_id
    if resume is not None:
        return _resumed(given, Path(resume), config, preset)
    settings = read_settings(Path(config)) if config else {}
    env_id = given.get("env_id", settings.get("env_id"))
    if env_id is None:
        raise ConfigError(f"which environment? For example: {prog} CartPole-v1")
    preset, tuned = _preset(preset or "auto", str(env_id))
    return Arguments(tuned | settings | given, preset, frozenset(tuned) - {*settings, *given})


def _resumed(given: dict[str, Any], resume: Path, config: str | None, preset: str | None) -> Arguments:
    for name, value in (("config", config), ("preset", preset), ("run_dir", given.get("run_dir"))):
        if value is not None:
            raise ConfigError(
                f"{name}={value} has no effect with --resume, which goes on in the run's own folder with its settings. "
                f"Leave it out."
            )
    return Arguments(settings_to_resume(resume, given), resume=resume)


# ------------------------------------------------------------------ presets


def presets() -> dict[str, dict[str, Any]]:
    """Tuned settings by environment id."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        found |= yaml.safe_load(path.read_text(encoding="utf8")) or {}
    return found


def _preset(name: str, env_id: str) -> tuple[str | None, dict[str, Any]]:
    if name == "none":
        return None, {}
    known = presets()
    if name == "auto":
        return (env_id, known[env_id]) if env_id in known else (None, {})
    if name not in known:
        raise ConfigError(f"preset={unknown_name('preset', name, known)} There are: {', '.join(sorted(known))}.")
    return name, known[name]


# ------------------------------------------------------------------ flags


def _flags_given(argv: list[str], prog: str) -> dict[str, Any]:
    """The flags that were given, by the names of their settings."""
    flags = _flags_class()
    parsed = parse_quietly(flags, argv, f"{prog} ENV_ID")
    words = [
        re.sub("^--(no-)?", "", word.partition("=")[0]).replace("-", "_") for word in argv if word.startswith("--")
    ]
    known = set(flags.__dataclass_fields__)
    named = [name for word in words for name in (word, f"no_{word}") if name in known]
    return {name: _as_setting(name, getattr(parsed, name)) for name in named}


def _as_setting(name: str, value: Any) -> Any:
    if name in EXTRA:
        return value
    annotation = Config.model_fields[name].annotation
    if value == "none" and NoneType in get_args(annotation):
        return None
    if get_origin(annotation) is dict:
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value}: is not JSON ({error}). Write it like '{{\"licence\": 1}}'.") from None
    return value


def _flags_class() -> Any:
    """A dataclass with a field for each setting, for tyro: words in, words out; `Config` does the checking."""
    fields: list[Any] = []
    for name, info in Config.model_fields.items():
        if name == "env_id":
            continue
        annotation, default = info.annotation, info.default
        if annotation is bool:
            kind: Any = bool
        elif get_origin(annotation) is Literal:
            kind = annotation
        elif get_origin(annotation) is tuple:
            kind, default = tuple[str, ...], tuple(map(str, default))
        else:
            kind = str
            default = json.dumps(default) if isinstance(default, dict) else "none" if default is None else str(default)
        metavar = None if kind is bool or kind is annotation else _metavar(annotation)
        fields.append(
            (name, Annotated[kind, tyro.conf.arg(help=info.description, metavar=metavar)], field(default=default))
        )
    for name, text in EXTRA.items():
        default = "auto" if name == "preset" else ""
        fields.append((name, Annotated[str, tyro.conf.arg(help=text, metavar="WORD" if default else "PATH")], default))
    return make_dataclass("Flags", fields)


def _metavar(annotation: Any) -> str:
    kinds = {annotation, *get_args(annotation)}
    kinds |= {inner for kind in kinds for inner in get_args(kind)}
    for kind, word in ((dict, "JSON"), (Path, "PATH"), (int, "INT"), (float, "NUMBER")):
        if kind in kinds or any(get_origin(one) is kind for one in kinds):
            return word if get_origin(annotation) is not tuple else "INT ..."
    return "WORD"


def parse_quietly(flags: Any, argv: list[str], prog: str) -> Any:
    """tyro's result; its boxed errors as a line or two.

    Raises:
        ConfigError: what tyro says, in its words.
        SystemExit: help was asked for, and shown.
    """
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(flags, prog=prog, args=argv, description=None)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UsageError(_in_words(told.getvalue(), flags, prog))


def _in_words(box: str, flags: Any, prog: str) -> str:
    """The message in tyro's box of an error, as one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│|╭╮╰╯─-+ \t") for line in plain.splitlines()]
    said = " ".join(line for line in lines if line)
    unknown = re.search(r"Unrecognized options: (\S+?)(,|\s|$)", said)
    if unknown is None:
        said = re.split(r" (?:For full helptext|Argument helptext)", said)[0]
        return re.sub(r"^(Value error|Required options|Missing arguments?|Parsing error|Invalid choice)\s+", "", said)
    word = unknown[1].partition("=")[0].replace("_", "-")
    if not word.startswith("-"):
        return (
            f"{unknown[1]}: is one word too many. ENV_ID or RUN comes first; switches like --anneal-lr take no value."
        )
    known = [f"--{name.replace('_', '-')}" for name in flags.__dataclass_fields__]
    return f"{unknown_name('flag', word, known)} `{prog} --help` lists them."


class UsageError(DppoError):
    """Words on the command line that cannot be understood."""

    exit_code = 2
