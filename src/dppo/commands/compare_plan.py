"""What `dppo compare` is asked to do, and the runs that this comes to."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dppo.commands.arguments import UsageError
from dppo.config import Config, make_config
from dppo.errors import ConfigError

PROG = "dppo compare"
_SAID_OTHERWISE = {
    "--num-actors": "--actors says how many, e.g. --actors 1 8",
    "--run-dir": "--out says where the runs are kept",
    "--resume": "a comparison begins at the beginning",
}
_HELP = {
    "description": "Train with each number of actors in turn, and compare: mean episode return over wall "
    "time and over env steps, time to the end and to a target, speed-up, and efficiency against the bound of "
    "a synchronous cycle. Writes compare.png and compare.json.",
    "epilog": "Other flags are those of the training: see `dppo train --help`. --seed is the first seed.",
    "actors": "numbers of actors to compare; 0 is in process, without Ray (default: 1 8)",
    "seeds": "runs with each number of actors, with seeds that follow one another (default: 3)",
    "target": "tell the time until the mean episode return is this, e.g. 475",
    "equal": "batch (default): the same samplers (--num-samplers, or as many as the most actors) are hosted "
    "by few or many actors; the learning problem is the same, and so must be the weights. segment: each "
    "actor has one sampler, so the batch grows with the actors, as in PPO's own description",
    "out": "folder to write to (default: runs/compare__ENV__TIME)",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare; everything else are settings of the training."""

    actors: tuple[int, ...]
    seeds: int
    target: float | None
    equal: str
    out: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{PROG} --help` says more.")


def parse_options(argv: list[str]) -> tuple[Options, list[str]]:
    """Our own options, and the words that are left for the training.

    Raises:
        ConfigError, UsageError: an option that cannot be.
    """
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} ENV_ID [--actors M M ...] [options] [any flag of dppo train]",
        description=_HELP["description"],
        epilog=_HELP["epilog"],
        allow_abbrev=False,
    )
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 8], metavar="M", help=_HELP["actors"])
    parser.add_argument("--seeds", type=int, default=3, metavar="S", help=_HELP["seeds"])
    parser.add_argument("--target", type=float, metavar="RETURN", help=_HELP["target"])
    parser.add_argument("--equal", choices=["batch", "segment"], default="batch", help=_HELP["equal"])
    parser.add_argument("--out", type=Path, metavar="DIR", help=_HELP["out"])
    own, rest = parser.parse_known_args(argv)
    options = Options(tuple(own.actors), own.seeds, own.target, own.equal, own.out)
    _check(options)
    _check_rest(options, rest)
    return options, rest


def _check(options: Options) -> None:
    numbers = " ".join(map(str, options.actors))
    if len(options.actors) < 2 or len(set(options.actors)) < len(options.actors):
        raise ConfigError(f"actors={numbers}: nothing to compare. Give two or more different numbers.")
    if min(options.actors) < 0:
        raise ConfigError(f"actors={numbers}: one is below zero. Use 0 for a run in process, without Ray.")
    if options.seeds < 1:
        raise ConfigError(f"seeds={options.seeds}: comes to no run. Use at least 1; 3 show a spread.")
    out = options.out
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out={out}: holds something already. Give a new folder.")


def _check_rest(options: Options, rest: Sequence[str]) -> None:
    """Refuse flags of the training that a comparison sets by itself."""
    given = {word.partition("=")[0].replace("_", "-") for word in rest if word.startswith("--")}
    for flag, reason in _SAID_OTHERWISE.items():
        if flag in given:
            raise ConfigError(f"{flag} has no effect here: {reason}. Leave it out.")
    if options.equal == "segment" and "--num-samplers" in given:
        raise ConfigError(
            "--num-samplers has no effect with --equal segment: each actor has one sampler. Leave it out."
        )


def folder_for(options: Options, settings: dict[str, Any]) -> Path:
    """Where the comparison is written."""
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", str(settings["env_id"])).strip("-")
    return options.out or Path("runs") / f"compare__{env}__{time.strftime('%Y%m%d-%H%M%S')}"


def make_plan(options: Options, settings: dict[str, Any], folder: Path) -> list[Config]:
    """The runs in their order: for each seed each number of actors, so that a drift of the machine hits all.

    Raises:
        ConfigError: a setting that cannot be with one of the numbers of actors.
    """
    settings = {"progress": "off"} | settings

    def one(actors: int, samplers: Any, **more: Any) -> Config:
        return make_config(settings | {"num_actors": actors, "num_samplers": samplers} | more)

    most = max(options.actors)
    given = settings.get("num_samplers") if options.equal == "batch" else None
    largest = one(most, given or max(1, most))
    return [
        one(
            actors,
            largest.samplers if options.equal == "batch" else max(1, actors),
            seed=seed,
            run_dir=folder / "runs" / f"actors{actors}__s{seed}",
        )
        for seed in range(largest.seed, largest.seed + options.seeds)
        for actors in options.actors
    ]


def caption(options: Options, plan: Sequence[Config]) -> str:
    """What is held equal, in one line."""
    first, numbers = plan[0], in_words(options.actors)
    seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
    envs = f" of {first.envs_per_sampler} envs" if first.envs_per_sampler > 1 else ""
    segment = f"{first.num_steps} steps{envs}"
    if options.equal == "batch":
        samplers = "sampler" if first.samplers == 1 else f"{first.samplers} samplers"
        held = f"Equal batch: the same {samplers} of {segment}, hosted by {numbers} actors."
    else:
        batches = in_words([config.batch_size for config in plan[: len(options.actors)]])
        held = f"Equal segments: {segment} for each of {numbers} actors, so the batch is {batches} steps."
    return f"{first.env_name}, {seeds}. {held}"


def in_words(numbers: Sequence[int]) -> str:
    """1, 4 or 8"""
    *most, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(most)} or {last}" if most else last
