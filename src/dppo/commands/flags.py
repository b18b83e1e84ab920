"""The flags of all commands: argparse without defaults, and every setting of `Config` as a flag."""

import argparse
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from dppo.config.aliases import answer_to, meant_by
from dppo.config.field import FlatSettings
from dppo.config.parts import (
    PARTS,
    default_of,
    help_by_name,
    may_be_none,
    names_of,
    settings_by_name,
    types_by_name,
)
from dppo.errors import ConfigError, DppoError, printable, unknown_name
from dppo.files import home_expanded
from dppo.invocation import as_called, command, flag
from dppo.records.files.run_files import CONFIG

WIDTH = 80

FIRST = (
    "total_timesteps",
    "num_actors",
    "num_samplers",
    "envs_per_sampler",
    "num_steps",
    "learning_rate",
    "gamma",
    "seed",
    "env_kwargs",
    "run_dir",
)
"""The settings that people use first."""
RENDER = "Show the environment in a window (render_mode=human)."
TRUST = "Import and call the code that the settings of RUN name, beyond plain Gymnasium ids and what you name yourself."
SOURCES = {
    "--config FILE": "YAML or TOML file of settings. Flags take precedence over it.",
    "--preset NAME": "Settings that `dppo presets` lists; fast, for environments that step in microseconds; none; or "
    "auto, those that apply to ENV_ID by default. --config and flags take precedence over them. (default: auto)",
    "--resume RUN": "Continue the run in this folder (or from one of its checkpoints) exactly. auto: continue the run "
    "in --run-dir if there is one, else start it.",
    "--branch NEW_DIR": "Instead of continuing the RUN of --resume, start a new run in NEW_DIR from its weights, "
    "optimizer and normalizers. Counters begin at zero, and other settings are allowed, but not other shapes: "
    "--init-from takes the weights that fit another task or network.",
    "--trust": TRUST,
}
EXTRA = ("config", "preset", "resume", "branch", "trust")
"""The names of these flags."""
NUMBERS_AND_WORDS = {
    "num_actors": "INT|auto|INT..INT",
    "nodes_per_env": "INT|auto",
    "keep_checkpoints": "INT|every=INT",
}
"""Forms of settings that are a number or a word."""
Flags = Mapping[str, str]
"""The help of flags: {"--seed INT": "...", "--actors N ...": "...", "--equal {batch,segment}": "", "--json": "..."}."""


class UsageError(DppoError):
    """An invalid command line."""

    exit_code = 2


def _named_path(text: str) -> str:
    try:
        return home_expanded(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def _path(text: str) -> Path:
    return Path(_named_path(text))


TYPES: dict[str, Any] = {  # name in the help -> type of the value; others are text
    "INT": int,
    "N": int,
    "S": float,
    "RETURN": float,
    "FILE": _path,
    "DIR": _path,
    "RUN": _named_path,  # "auto" is one, too
    "NEW_DIR": _named_path,
}


class Parser(argparse.ArgumentParser):
    """Returns only the flags that were typed, by name: an absent flag has no value, not even its default."""

    def __init__(
        self, prog: str, usage: str, description: str, groups: Mapping[str, Flags] | None = None
    ) -> None:
        """Build a parser; each line of `usage` shows one way to use the command.

        `groups`: flags by the title of their group.
        """
        prog = as_called(prog)
        indent = " " * len("usage: ")
        super().__init__(
            prog=prog,
            usage=f"\n{indent}".join(f"{prog} {line}" for line in usage.splitlines()),
            description=as_called(description).replace("%", "%%"),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=28, width=WIDTH
            ),
        )
        # argparse's has no -1e-3
        self._negative_number_matcher = re.compile(r"-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")
        for title, flags in (groups or {}).items():
            self.add_flags(title, flags)

    def add_flags(self, title: str, flags: Flags) -> None:
        """Add a group of flags."""
        group = self.add_argument_group(title)
        for usage, description in flags.items():
            name, *values = usage.split()
            text = as_called(description)
            if not values:
                group.add_argument(name, action="store_true", help=text)
                continue
            value = values[0]
            options: dict[str, Any] = {"metavar": value, "type": TYPES.get(value, str)}
            if value.startswith("{"):
                options = {"choices": value.strip("{}").split(",")}
            elif values[1:]:
                options["nargs"] = "+"
            group.add_argument(name, help=text, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print as a `UsageError`."""
        raise UsageError(
            f"{message.removeprefix('argument ')}. `{self.prog} --help` lists the flags."
        )

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the flags that were typed, and the other words; raise a UsageError if a flag is wrong.

        If help is asked for, print it and exit: the other words need not be valid then.
        """
        if is_help(argv):
            self.print_help()
            raise SystemExit(0)
        # --num_actors=8
        dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        flags, words = self.parse_known_args(dashed)
        unknown = [word.partition("=")[0] for word in words if re.match("--?[a-zA-Z]", word)]
        if unknown:
            problems = " ".join(map(self._describe_unknown, dict.fromkeys(unknown)))
            raise UsageError(f"{problems} `{self.prog} --help` lists the flags.")
        # only the folder of a run may begin with ~
        return vars(flags), [home_expanded(word) for word in words]

    def split_word(
        self, argv: Sequence[str], name: str = "RUN", example: str = "runs/..."
    ) -> tuple[dict[str, Any], str]:
        """Return the flags that were typed, and the only other word; raise a UsageError if there is none, or more."""
        flags, words = self.split(argv)
        word = only_word(words, name, self.prog)
        if word is None:
            raise UsageError(f"{name} is missing. For example: {self.prog} {example}")
        return flags, word

    def _describe_unknown(self, flag: str) -> str:
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        ours = meant_by(flag.removeprefix("--"))
        if "--env-id" in (flag, *ours) and "--env-id" not in flags:
            return f"{flag} is not a known flag: the environment is typed without one, as in {self.prog} CartPole-v1."
        answer = answer_to(flag.lstrip("-"), [name.removeprefix("--") for name in flags])
        if answer is not None:
            return f"{flag} is not a known flag. {in_flags(answer)}"
        return unknown_name("flag", flag, flags, ours)


def print_lines(*lines: str) -> None:
    """Print lines that may hold a stranger's text."""
    for line in lines:
        print(printable(line), flush=True)


def is_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


def only_word(words: Sequence[str], name: str, prog: str) -> str | None:
    """Return the only word that is not a flag, or None; raise a UsageError for more words, and for runs."""
    is_run = len(words) == 1 and (Path(words[0]) / CONFIG).exists()
    if name == "ENV_ID" and (is_run or len(words) > 1) and all(map(os.path.isdir, words)):
        raise UsageError(
            f"{', '.join(words)}: not an environment, but the folder of a run. To compare runs, use "
            f"`{command('plot', *words)}`; to continue one, `{command('train', '--resume', words[0])}`."
        )
    if len(words) > 1:
        fact = f"{as_called(prog)} takes one {name}, here {words[0]!r}"
        raise UsageError(f"unexpected argument {words[1]!r}: {fact}. Switches take no value.")
    return next(iter(words), None)


def add_settings(
    parser: Parser, defaults: FlatSettings, *, leave_out: Collection[str] = ()
) -> None:
    """Add a flag for each setting, in groups: the most used ones, sources of settings, then the parts of `Config`.

    For --help, `defaults` apply in place of the settings' own, and the flags named in `leave_out` are not listed.
    """
    most_used = parser.add_argument_group("most used")
    for name in FIRST:
        _add(most_used, name, defaults, hidden=name in leave_out)
    hidden = {
        usage: argparse.SUPPRESS
        for usage, name in zip(SOURCES, EXTRA, strict=True)
        if name in leave_out
    }
    parser.add_flags("files, presets and earlier runs", SOURCES | hidden)
    for part, record in PARTS.items():
        group = parser.add_argument_group(f"{part}: {(record.__doc__ or '').rstrip('.')}")
        for name in names_of(part):
            if name not in (*FIRST, "env_id"):
                _add(group, name, defaults, hidden=name in leave_out)


def _add(group: Any, name: str, defaults: FlatSettings, *, hidden: bool) -> None:
    text = argparse.SUPPRESS
    if not hidden:
        text = _help_text(name, defaults.get(name, default_of(name)))
    hint = types_by_name()[name]
    options: dict[str, Any] = {"metavar": _metavar(name)}
    if _is_switch(hint):
        options = {"action": argparse.BooleanOptionalAction}
    elif get_origin(hint) is tuple:
        options["nargs"] = "*"
    group.add_argument(flag(name), help=text, **options)


def _help_text(name: str, default: Any) -> str:
    text = help_by_name()[name]
    if default is not None or "Default: " not in text:
        text = f"{text} (default: {printable(shown(default))})"
    return as_called(text).replace("%", "%%")


def shown(value: Any) -> str:
    match value:
        case True:
            return "on"
        case False:
            return "off"
        case None | () | []:
            return "none"
        case tuple() | list():
            return " ".join(map(str, value))
        case dict():
            return json.dumps(value)
    return str(value)


def _is_switch(hint: Any) -> bool:
    return bool in (hint, *get_args(hint))


def _metavar(name: str) -> str:
    hint = types_by_name().get(name, str)
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    kinds = {hint, get_origin(hint), *get_args(hint), *map(get_origin, get_args(hint))}
    if {int, str} <= kinds:
        return NUMBERS_AND_WORDS[name]
    for kind, word in ((dict, "JSON"), (Path, "PATH"), (int, "INT"), (float, "NUMBER")):
        if kind in kinds:
            return word
    return "TEXT"


def in_flags(text: str) -> str:
    """Return an error's text with the settings between backticks as flags: `norm_adv=False` becomes --no-norm-adv."""
    return re.sub("`([a-z_]+)(?:=([^`]*))?`", _as_flag, text)


def _as_flag(match: re.Match[str]) -> str:
    name, value = match.groups()
    if name not in (*settings_by_name(), *EXTRA, "render", "video", "episode"):
        return match[0]
    if name == "branch":
        return "--branch NEW_DIR"
    if name == "env_id":  # the environment has no flag
        return value or "ENV_ID"
    if _is_switch(types_by_name().get(name, bool)):
        if value == "False":
            return flag(f"no_{name}")
        if value == "True":
            return flag(name)
    return f"{flag(name)} {value or ''}".rstrip()


def as_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags of settings as settings, not yet checked; raise as `parsed_json`."""
    settings: dict[str, Any] = {}
    for name, text in flags.items():
        if text == "none" and may_be_none(name):
            settings[name] = None
        elif _metavar(name) == "JSON":
            settings[name] = parsed_json(name, text)
        else:
            settings[name] = text
    return settings


def as_words(settings: FlatSettings) -> list[str]:
    """Return the flags that set these values; objects of a Python program are shown, but no flag can pass them."""
    words = []
    for name, value in settings.items():
        if value is False:
            words.append(flag(f"no_{name}"))
            continue
        words.append(flag(name))
        if isinstance(value, list | tuple) and _metavar(name) == "JSON":
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += map(str, value)
        elif value is not True:
            words.append(shown(value))
    return words


def parsed_json(name: str, text: str) -> Any:
    """Return the value of a flag that is written as JSON; raise a ConfigError if it is not."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{name}={text}: is not JSON ({error}). Write it like '{{\"licence\": 1}}'."
        ) from None
