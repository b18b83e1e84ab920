"""The runs that `dppo compare` is asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.commands.arguments import arguments_of
from dppo.commands.parser import Parser, asks_for_help, one_word
from dppo.commands.settings_flags import add_settings
from dppo.config import Config, presets
from dppo.config.files import preset
from dppo.config.parts import about
from dppo.config.resume import leave_out_ineffective
from dppo.errors import ConfigError, counted

PROG = "dppo compare"
SAID_OTHERWISE = {
    "num_actors": "--actors says how many, e.g. --actors 1 8",
    "run_dir": "--out says where the runs are kept",
    "resume": "a comparison begins at the beginning",
    "branch": "a comparison begins at the beginning",
    "trust": "what you name yourself is trusted",
}
DESCRIPTION = (
    "Train with each number of actors in turn, and compare: mean episode return over wall time and over env steps, "
    "time to the end and to a target, speed-up, and efficiency against the bound of a synchronous cycle. With one "
    "number of actors, train several seeds. Writes compare.png and compare.json."
)
HELP = {
    "actors": "Numbers of actors to compare; 0 is in process, without Ray. (default: 1 8)",
    "seeds": "Runs with each number of actors, with seeds that follow one another from --seed. (default: 3)",
    "target": "Report the time until the mean episode return reaches this, e.g. 475.",
    "equal": "batch: the same --num-samplers samplers are hosted by few or many actors; the learning problem is the "
    "same, and so must be the weights. segment: each actor has one sampler, so the batch grows with the actors, as in "
    "PPO's own description. (default: batch)",
    "out": "Folder to write to. Default: runs/compare__ENV__TIME.",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare; everything else are settings of the training."""

    actors: tuple[int, ...]
    seeds: int
    target: float | None
    equal: str
    out: Path | None


def make_parser(defaults: dict[str, Any]) -> Parser:
    """Return the parser of this command's flags and of those of the training."""
    parser = Parser(PROG, "ENV_ID [--actors M M ...] [--flag value ...]", DESCRIPTION)
    parser.add_argument_group("ENV_ID", about("env_id").help)
    group = parser.add_argument_group("comparison")
    group.add_argument("--actors", nargs="+", type=int, metavar="M", help=HELP["actors"])
    group.add_argument("--seeds", type=int, metavar="S", help=HELP["seeds"])
    group.add_argument("--target", type=float, metavar="RETURN", help=HELP["target"])
    group.add_argument("--equal", choices=["batch", "segment"], help=HELP["equal"])
    group.add_argument("--out", type=Path, metavar="DIR", help=HELP["out"])
    add_settings(parser, {"progress": "off"} | defaults, leave_out=SAID_OTHERWISE)
    return parser


def parse(argv: list[str]) -> tuple[Options, dict[str, Any]]:
    """Return what to compare, and the settings of the training, not yet checked.

    Raises:
        ConfigError, UsageError: an invalid option.
        SystemExit: help was asked for, and printed.
    """
    if asks_for_help(argv):
        env_id = next((word for word in argv if word in presets()), None)
        make_parser(preset(env_id) if env_id else {}).print_help()
        raise SystemExit(0)
    given, words = make_parser({}).split(argv)
    options = Options(
        tuple(given.pop("actors", (1, 8))),
        given.pop("seeds", 3),
        given.pop("target", None),
        given.pop("equal", "batch"),
        given.pop("out", None),
    )
    _check(options)
    _check_rest(options, given)
    return options, arguments_of(given, one_word(words, "ENV_ID", PROG), PROG).settings


def _check(options: Options) -> None:
    numbers = " ".join(map(str, options.actors))
    if len(set(options.actors)) < len(options.actors):
        raise ConfigError(f"actors={numbers}: a number is given twice. Use different numbers.")
    if min(options.actors) < 0:
        raise ConfigError(f"actors={numbers}: one is below zero. Use 0 for a run in process, without Ray.")
    if options.seeds < 1:
        raise ConfigError(f"seeds={options.seeds}: must be at least 1. Use 3 or more to show a spread.")
    if len(options.actors) == options.seeds == 1:
        raise ConfigError(
            f"actors={numbers}: one run with one seed leaves nothing to compare. Add numbers of actors, or seeds; "
            f"`dppo train` makes one run."
        )
    out = options.out
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out={out}: is not an empty folder. Use a new one.")


def _check_rest(options: Options, given: Collection[str]) -> None:
    """Refuse flags of the training that a comparison sets by itself."""
    for name, reason in SAID_OTHERWISE.items():
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect here: {reason}. Leave it out.")
    if options.equal == "segment" and "num_samplers" in given:
        raise ConfigError(
            "--num-samplers has no effect with --equal segment: each actor has one sampler. Leave it out."
        )


def folder_for(options: Options, settings: dict[str, Any]) -> Path:
    """Return the folder that the comparison is written to."""
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", str(settings["env_id"])).strip("-")
    return options.out or Path("runs") / f"compare__{env}__{time.strftime('%Y%m%d-%H%M%S')}"


def make_plan(options: Options, settings: dict[str, Any], folder: Path) -> list[Config]:
    """Return the runs in their order: each number of actors for the first seed, back again for the second, and so on.

    A drift of the machine then hits all numbers of actors alike. Settings of actors apply to the runs that have some.

    Raises:
        ConfigError: a setting that is invalid with one of the numbers of actors.
    """
    settings = {"progress": "off"} | settings

    def one(actors: int, **more: Any) -> Config:
        chosen = {"num_actors": actors, **more}
        if options.equal == "segment":
            chosen["num_samplers"] = max(1, actors)
        if any(options.actors):
            return Config(**leave_out_ineffective(settings, chosen))
        return Config(**(settings | chosen))

    first = one(max(options.actors)).seed
    return [
        one(actors, seed=first + turn, run_dir=folder / "runs" / f"actors{actors}__s{first + turn}")
        for turn in range(options.seeds)
        for actors in options.actors[:: 1 if turn % 2 == 0 else -1]
    ]


def caption(options: Options, plan: Sequence[Config]) -> str:
    """Return what is held equal, in one line."""
    first, numbers = plan[0], in_words(options.actors)
    seeds = counted(options.seeds, "seed")
    envs = f" of {first.envs_per_sampler} envs" if first.envs_per_sampler > 1 else ""
    segment = f"{first.num_steps} steps{envs}"
    if options.equal == "batch":
        samplers = "sampler" if first.num_samplers == 1 else f"{first.num_samplers} samplers"
        held = f"Equal batch: the same {samplers} of {segment}, hosted by {numbers} actors."
    else:
        batches = in_words([config.batch_size for config in plan[: len(options.actors)]])
        held = f"Equal segments: {segment} for each of {numbers} actors, so the batch is {batches} steps."
    return f"{first.env_name}, {seeds}. {held}"


def in_words(numbers: Sequence[int]) -> str:
    """Return `1, 4 or 8`."""
    *most, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(most)} or {last}" if most else last
