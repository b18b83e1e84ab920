"""`dppo train`: train one policy with settings from the preset, then from --config, then from flags."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo.commands.flags import EXTRA, Flags, Parser, UsageError, add_settings, as_settings, flag, is_help, one_word
from dppo.config import Config, read_settings
from dppo.config.parts import help_by_name, settings_by_name
from dppo.config.presets import merge_preset, preset_named, preset_of
from dppo.config.reading import check_names
from dppo.config.trust import code_named_by, require_trust
from dppo.errors import ConfigError, DppoError, printable
from dppo.invocation import as_called, command
from dppo.log import logger
from dppo.plugins import plugin
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.observer import Observer, RunInfo


def main(argv: list[str]) -> int:
    """Train with the settings of the command line; return the exit code: 0, or 128 + n if signal n stopped the run."""
    several, given, env_id = COMMAND.split(argv)
    for name in ("seed", "resume", "branch") if several else ():
        if name in given:
            raise ConfigError(
                f"{flag(name)} has no effect with --seeds, which names, and continues, all. Leave it out."
            )
    wanted = arguments_of(given, env_id, COMMAND.prog)
    try:
        if several:
            code: int = plugin("seeds")(wanted.settings, wanted.notes, **several)
            return code
        config = Config(**wanted.settings)
    except ConfigError as error:
        if "is not a known setting" in str(error) or not any(setting in str(error) for setting in wanted.tuned):
            raise
        raise ConfigError(f"{error}\nThe preset {wanted.preset} applies; --preset none disables it.") from None
    if isinstance(wanted.resume, Path):
        for action in code_named_by(wanted.settings).values():
            print(printable(f"{wanted.resume} {action}."), flush=True)

    from dppo.run.runner import train

    result = train(config, resume=wanted.resume, branch=wanted.branch, observers=[_LogNotes(wanted.notes)])
    return 0 if result.stopped_by is None else 128 + signal.Signals[result.stopped_by]


@dataclass
class _LogNotes(Observer):
    """Report the preset of a run, once the run has begun."""

    notes: Sequence[str]

    def on_start(self, run: RunInfo) -> None:
        """Log the notes."""
        for note in self.notes:
            logger.info("%s", note)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The settings and options of one command line."""

    settings: dict[str, Any]
    """Settings for `Config`, not yet checked."""
    preset: str | None = None
    """The preset that some of them come from."""
    tuned: frozenset[str] = frozenset()
    """Names of the settings that come from the preset."""
    resume: Path | str | None = None
    """The run to continue, or "auto"."""
    branch: bool = False
    """True to start a new run from `resume` instead."""
    notes: tuple[str, ...] = ()
    """The preset, or that there is one on request; changes to its values that do not fit the other settings."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with a flag for each setting, and flags of its own."""

    prog: str
    usage: str
    description: str
    title: str
    """Of the group of its own flags."""
    own: Flags
    refused: Mapping[str, str] = field(default_factory=dict)
    """Flags of a single run that have no effect here, which its help does not show, and why."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of settings, where they differ from those of `dppo train`."""

    def split(self, argv: list[str], word: str = "ENV_ID") -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Return its own flags, those of settings, and the word beside them.

        If help is asked for, print it with the defaults that apply to the other words, and exit. Raises a UsageError if
        a flag is unknown or there is a stray word, a ConfigError if one is refused.
        """
        parsed = Arguments({})
        with suppress(DppoError):
            if is_help(argv):
                _, given, env_id = self.split([one for one in argv if not is_help([one])])
                parsed = arguments_of(given, env_id, self.prog)
        given, words = self._parser(parsed).split(argv)
        own = {name: given.pop(name) for name in given.keys() - {*settings_by_name(), *EXTRA}}
        for name in (name for name in self.refused if name in given):
            raise ConfigError(f"{flag(name)} has no effect here: {self.refused[name]}. Leave it out.")
        return own, given, one_word(words, word, self.prog)

    def _parser(self, parsed: Arguments) -> Parser:
        source = ""
        if isinstance(parsed.resume, Path):
            source = f" Defaults are the settings of {parsed.resume}."
        elif parsed.preset is not None:
            source = f" Defaults are those tuned for {parsed.preset}; --preset none disables them."
        parser = Parser(self.prog, self.usage, f"{self.description}{source}")
        parser.add_argument_group("ENV_ID", help_by_name()["env_id"])
        parser.add_flags(self.title, self.own)
        add_settings(parser, {**self.defaults, **parsed.settings}, leave_out=self.refused)
        return parser


COMMAND = Command(
    prog="dppo train",
    usage="ENV_ID [--flag value ...]\n--resume RUN [--flag value ...]",
    description="Train a policy with PPO, and write checkpoints, metrics and a learning curve to the folder of the "
    "run.",
    title="several seeds",
    own={
        "--seeds A..B|A,B,...": "Train a run for each of these seeds, in processes of their own and in folders below "
        "--run-dir, and report the mean with an interval. The same command continues those that have not finished.",
        "--seeds-at-once N": "Runs at the same time. (default: one with actors, else as many as there are cores and "
        "memory)",
    },
)


def arguments_of(given: dict[str, Any], env_id: str | None, prog: str) -> Arguments:
    """Return the settings and options that flags ask for, given as the parser returned them.

    Raises a ConfigError if a file or a preset contains no settings, and a UsageError if the environment is missing.
    """
    config, preset_name, resume, branch, trust = (given.get(name) for name in EXTRA)
    flags = as_settings({name: text for name, text in given.items() if name not in EXTRA})
    if env_id is not None:
        flags["env_id"] = env_id
    if resume == "auto" and "run_dir" not in flags:
        raise ConfigError("resume=auto: needs a folder that is the same each time. Add --run-dir.")
    if branch is not None and resume in (None, "auto"):
        raise ConfigError(f"branch={branch}: needs a run to branch from. Name it with --resume RUN.")
    if resume not in (None, "auto"):
        return _of_resumed(given, flags)
    if trust:
        raise ConfigError("--trust has no effect: it applies to the code of a run to resume. Leave it out.")
    if config:
        check_names(Path(config))
    settings = read_settings(Path(config)) if config else {}
    env_id = flags.get("env_id", settings.get("env_id"))
    if env_id is None:
        raise UsageError(f"the environment is missing. For example: {as_called(prog)} CartPole-v1")
    wanted = preset_name or "auto"
    found = None if wanted == "none" else preset_of(str(env_id)) if wanted == "auto" else preset_named(wanted)
    used = found if found and (wanted != "auto" or found.about.get("applies") == "by itself") else None
    said = [f"using the preset {used.name}; --preset none disables it"] if used else []
    if found and not used and found.about.get("applies") == "on request":
        said = [f"`{command('presets', found.name)}` shows settings and scores for this environment"]
    tuned, own = used.settings if used else {}, settings | flags
    fitted, notes = merge_preset(own, tuned)
    return Arguments(fitted, used.name if used else None, frozenset(tuned) - own.keys(), resume, notes=(*said, *notes))


def _of_resumed(given: dict[str, Any], flags: dict[str, Any]) -> Arguments:
    """Return the settings of the run of --resume, with those of `flags`."""
    run, branch = Path(given["resume"]), given.get("branch")
    fact = "continues a run in its own folder" if branch is None else "starts a run in the folder of --branch"
    for name in ("config", "preset", "run_dir", "init_from"):
        if (value := (given | flags).get(name)) is not None:
            raise ConfigError(
                f"{flag(name)} {value} has no effect with --resume, which {fact}, with its own settings. Leave it out."
            )
    settings = settings_to_resume(run, flags if branch is None else flags | {"run_dir": branch})
    if "trust" not in given:
        require_trust(settings, flags, given["resume"])
    return Arguments(settings, resume=run, branch=branch is not None)
