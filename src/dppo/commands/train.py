"""`dppo train`: train one policy with settings from the preset, then from --config, then from flags."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo.commands.flags import (
    EXTRA,
    Flags,
    Parser,
    UsageError,
    add_settings,
    as_settings,
    is_help,
    only_word,
    print_lines,
)
from dppo.config import Config, read_settings
from dppo.config.field import FlatSettings
from dppo.config.parts import help_by_name, settings_by_name
from dppo.config.presets import Preset, merge_preset, preset_named, preset_of
from dppo.config.programs import definitions_of_program, refusal
from dppo.config.reading import check_file
from dppo.config.trust import NAMING, code_named_by, require_trust
from dppo.errors import ConfigError, DppoError, refuse
from dppo.invocation import as_called, command, flag
from dppo.log import logger
from dppo.plugins import plugin
from dppo.records.closing_lines import nothing_to_do
from dppo.records.files.checkpoint import find
from dppo.records.files.run_folder import check_stored_names, is_over, settings_to_resume
from dppo.records.observer import Observer, RunInfo


def main(argv: list[str]) -> int:
    """Train with the settings of the command line; return the exit code: 0, or 128 + n if signal n stopped the run."""
    seeds_flags, flags, env_id = COMMAND.split(argv)
    if seeds_flags:
        refuse(
            ConfigError(
                f"{flag(name)} has no effect with --seeds, which names all seeds and continues their runs. Leave it "
                f"out."
            )
            for name in ("seed", "resume", "branch")
            if name in flags
        )
    arguments = arguments_of(flags, env_id, COMMAND.prog)
    try:
        if seeds_flags:
            code: int = plugin("seeds")(arguments.settings, arguments.notes, **seeds_flags)
            return code
        config = Config(**arguments.settings)
    except ConfigError as error:
        is_about_preset = any(setting in str(error) for setting in arguments.tuned)
        if "is not a known setting" in str(error) or not is_about_preset:
            raise
        raise ConfigError(
            f"{error}\nThe preset {arguments.preset} applies; --preset none disables it."
        ) from None
    if arguments.resume and not arguments.branch and is_over(config, arguments.resume):
        print_lines(nothing_to_do(config.total_steps))
        return 0
    if isinstance(arguments.resume, Path):
        # a prior may also be the baseline
        for action in dict.fromkeys(code_named_by(arguments.settings).values()):
            print_lines(f"{arguments.resume} {action}.")

    from dppo.run.runner import train

    observers = [_LogNotes(arguments.notes)]
    result = train(config, resume=arguments.resume, branch=arguments.branch, observers=observers)
    if result.stopped_by is None:
        return 0
    return 128 + signal.Signals[result.stopped_by]


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
    """The title of the group of the command's own flags."""
    flags: Flags
    """The command's own flags."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Flags of a single run that have no effect here, which its help does not show, and why."""
    defaults: FlatSettings = field(default_factory=dict)
    """Defaults of settings, where they differ from `dppo train`."""

    def split(
        self, argv: list[str], word: str = "ENV_ID"
    ) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Return the command's own flags, the flags of settings, and the only other word.

        If help is asked for, print it with the defaults that apply to the other words, and exit. Raises a UsageError if
        a flag is unknown or there is a stray word, a ConfigError if one is refused.
        """
        arguments = Arguments({})
        if is_help(argv):
            with suppress(DppoError):
                without_help = [argument for argument in argv if not is_help([argument])]
                _, flags, env_id = self.split(without_help)
                arguments = arguments_of(flags, env_id, self.prog)
        flags, words = self._parser(arguments).split(argv)
        names = flags.keys() - {*settings_by_name(), *EXTRA}
        command_flags = {name: flags.pop(name) for name in names}
        refuse(
            ConfigError(f"{flag(name)} has no effect here: {reason}. Leave it out.")
            for name, reason in self.refused.items()
            if name in flags
        )
        return command_flags, flags, only_word(words, word, self.prog)

    def _parser(self, arguments: Arguments) -> Parser:
        source = ""
        if isinstance(arguments.resume, Path):
            source = f" Defaults are the settings of {arguments.resume}."
        elif arguments.preset is not None:
            source = (
                f" Defaults are those tuned for {arguments.preset}; --preset none disables them."
            )
        parser = Parser(self.prog, self.usage, f"{self.description}{source}")
        parser.add_argument_group("ENV_ID", help_by_name()["env_id"])
        parser.add_flags(self.title, self.flags)
        add_settings(parser, {**self.defaults, **arguments.settings}, leave_out=self.refused)
        return parser


COMMAND = Command(
    prog="dppo train",
    usage="ENV_ID [--flag value ...]\n--resume RUN [--flag value ...]",
    description="Train a policy with PPO or SAC, and write checkpoints, metrics and a learning curve to the folder of "
    "the run.",
    title="several seeds",
    flags={
        "--seeds A..B|A,B,...": "Train a run for each of these seeds, in processes of their own and in folders below "
        "--run-dir, and report the mean with an interval. The same command continues those that have not finished.",
        "--seeds-at-once N": "Runs at the same time. (default: one with actors, else as many as there are cores and "
        "memory)",
    },
)


def arguments_of(flags: dict[str, Any], env_id: str | None, prog: str) -> Arguments:
    """Return the settings and options that flags, as the parser returned them, and the environment ask for.

    Raises a ConfigError if a file or a preset contains no settings, and a UsageError if the environment is missing.
    """
    settings = as_settings({name: text for name, text in flags.items() if name not in EXTRA})
    if env_id is not None:
        settings["env_id"] = env_id
    resume = flags.get("resume")
    resumes = resume not in (None, "auto")
    if resume == "auto" and "run_dir" not in settings:
        raise ConfigError("resume=auto: needs a folder that is the same each time. Add --run-dir.")
    if "branch" in flags and not resumes:
        raise ConfigError(
            f"branch={flags['branch']}: needs a run to branch from. Name it with --resume RUN."
        )
    if resumes:
        return _resume_arguments(flags, settings)
    if "trust" in flags:
        raise ConfigError(
            "--trust has no effect: it applies to the code of a run to resume. Leave it out."
        )
    if "config" in flags:
        check_file(flags["config"], replaced=settings)
        settings = read_settings(flags["config"]) | settings
    if settings.get("env_id") is None:
        raise UsageError(f"the environment is missing. For example: {as_called(prog)} CartPole-v1")
    preset, note = _preset(flags.get("preset", "auto"), str(settings["env_id"]))
    if preset is None:
        return Arguments(settings, resume=resume, notes=note)
    merged, notes = merge_preset(settings, preset.settings)
    tuned = frozenset(merged.keys() & preset.settings.keys() - settings.keys())
    if not tuned:
        return Arguments(merged, resume=resume, notes=notes)
    return Arguments(merged, preset.name, tuned, resume, notes=(*note, *notes))


def _preset(choice: str, env_id: str) -> tuple[Preset | None, tuple[str, ...]]:
    """Return the preset to use, if any, and a note on the one that is used or that could be."""
    if choice == "none":
        return None, ()
    preset = preset_of(env_id) if choice == "auto" else preset_named(choice)
    if preset is None:
        return None, ()
    applies = preset.about.get("applies")
    if choice != "auto" or applies == "by itself":
        return preset, (f"using the preset {preset.name}; --preset none disables it",)
    if applies == "on request":
        return None, (
            f"`{command('presets', preset.name)}` shows settings and scores for this environment",
        )
    return None, ()


def _resume_arguments(flags: dict[str, Any], changes: dict[str, Any]) -> Arguments:
    fact = "continues a run in its own folder"
    if "branch" in flags:
        fact = "starts a run in the folder of --branch"
    user_settings = flags | changes
    refuse(
        ConfigError(
            f"{flag(name)} {user_settings[name]} has no effect with --resume, which {fact}, with its own settings. "
            f"Leave it out."
        )
        for name in ("config", "preset", "run_dir", "init_from")
        if user_settings.get(name) is not None
    )
    run = Path(flags["resume"])
    run_dir = {"run_dir": flags["branch"]} if "branch" in flags else {}
    check_stored_names(run, changes)
    # the display belongs to the terminal, not to the run
    settings = settings_to_resume(run, {"progress": "auto"} | changes | run_dir)
    _check_program(run, settings, changes, ["--branch", flags["branch"]] if run_dir else [])
    if "trust" not in flags:
        require_trust(settings, changes, flags["resume"], nameable=NAMING)
    return Arguments(settings, resume=run, branch="branch" in flags)


def _check_program(
    run: Path, settings: dict[str, Any], changes: dict[str, Any], words: Sequence[str]
) -> None:
    """Raise ConfigError if a run names what its program has defined, which no command can import by that name."""
    definitions = definitions_of_program(settings, changes)
    if not definitions:
        return
    stored_settings = {
        setting: value for setting, value in settings.items() if setting not in changes
    }
    program = find(run).checkpoint.state.get("program")
    raise refusal(
        run, stored_settings, definitions, program, ["train", "--resume", str(run), *words]
    )
