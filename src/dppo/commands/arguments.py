"""The settings that a command line asks for: defaults, then the preset, then --config, then flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dppo.commands.parser import Parser, UsageError, asks_for_help, one_word
from dppo.commands.settings_flags import EXTRA, add_settings, as_settings
from dppo.config import presets, read_settings
from dppo.config.files import preset
from dppo.config.parts import about
from dppo.config.trust import require_trust
from dppo.errors import ConfigError, DppoError
from dppo.records.run_folder import config_of, settings_to_resume


@dataclass(frozen=True, slots=True)
class Arguments:
    """The settings and options of one command line."""

    settings: dict[str, Any]
    """For `Config`; not yet checked."""
    preset: str | None = None
    """The preset whose settings are among them."""
    tuned: frozenset[str] = frozenset()
    """The settings that come from it."""
    resume: Path | str | None = None
    """A run to continue, or "auto"."""
    branch: bool = False
    """True to start a new run from `resume` instead."""


def parse(argv: list[str], prog: str) -> Arguments:
    """Return the settings that `ENV_ID --flag value ...` asks for.

    Raises:
        ConfigError: a file that holds no settings, a preset that does not exist.
        UsageError: an unknown flag, a word too many.
        SystemExit: help was asked for, and printed.
    """
    if asks_for_help(argv):
        _print_help(argv, prog)
    given, words = _parser(prog, {}).split(argv)
    return arguments_of(given, one_word(words, "ENV_ID", prog), prog)


def _parser(prog: str, defaults: dict[str, Any], of: str = "") -> Parser:
    parser = Parser(prog, "ENV_ID [--flag value ...]", f"Train one policy.{of}")
    parser.add_argument_group("ENV_ID", about("env_id").help)
    add_settings(parser, defaults)
    return parser


def _print_help(argv: list[str], prog: str) -> NoReturn:
    """Print the help with the defaults that would be in force for the words beside --help, and end."""
    try:
        parsed = parse([word for word in argv if not asks_for_help([word])], prog)
    except DppoError:
        parsed = Arguments({})
    of = f" Defaults are those tuned for {parsed.preset}; --preset none leaves them out." if parsed.preset else ""
    _parser(prog, parsed.settings, of).print_help()
    raise SystemExit(0)


def arguments_of(given: dict[str, Any], env_id: str | None, prog: str) -> Arguments:
    """Return what the flags `given` ask for.

    Raises:
        ConfigError: a file that holds no settings, a preset that does not exist.
        UsageError: there is no environment.
    """
    config, preset_name, resume, branch = (given.get(name) for name in EXTRA)
    flags = as_settings({name: text for name, text in given.items() if name not in (*EXTRA, "trust")})
    if env_id is not None:
        flags["env_id"] = env_id
    if resume == "auto" and "run_dir" not in flags:
        raise ConfigError("resume=auto: needs the same folder each time. Add --run-dir.")
    if branch is not None and resume in (None, "auto"):
        raise ConfigError(f"branch={branch}: needs a run to begin with. Name it with --resume RUN.")
    if resume not in (None, "auto"):
        _check_resumed(flags, config, preset_name, branch)
        if "trust" not in given:
            require_trust(config_of(Path(resume)), flags, resume)
        if branch is not None:
            flags["run_dir"] = branch
        return Arguments(settings_to_resume(Path(resume), flags), resume=Path(resume), branch=branch is not None)
    if "trust" in given:
        raise ConfigError("trust=True has no effect: only a run to resume needs it, not what you name. Leave it out.")
    settings = read_settings(Path(config)) if config else {}
    env_id = flags.get("env_id", settings.get("env_id"))
    if env_id is None:
        raise UsageError(f"which environment? For example: {prog} CartPole-v1")
    name = _preset_name(preset_name or "auto", str(env_id))
    tuned = preset(name) if name else {}
    return Arguments(tuned | settings | flags, name, frozenset(tuned) - {*settings, *flags}, resume)


def _preset_name(wanted: str, env_id: str) -> str | None:
    if wanted == "auto":
        return env_id if env_id in presets() else None
    return None if wanted == "none" else wanted


def _check_resumed(flags: dict[str, Any], config: str | None, preset_name: str | None, branch: str | None) -> None:
    """Refuse what has no effect beside --resume."""
    own = "continues in the run's own folder" if branch is None else "is given its folder by --branch"
    for name, value in (("config", config), ("preset", preset_name), ("run_dir", flags.get("run_dir"))):
        if value is not None:
            raise ConfigError(
                f"{name}={value} has no effect with --resume, which {own} with the run's settings. Leave it out."
            )
