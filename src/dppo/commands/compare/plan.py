"""Options of `dppo compare`, and the plan of its runs."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.commands.train import Command, arguments_of
from dppo.config import Config
from dppo.config.resume import leave_out_ineffective
from dppo.errors import ConfigError, counted

SET_BY_COMPARE = {
    "num_actors": "use --actors, e.g. --actors 1 8",
    "run_dir": "use --out, which is the folder of all runs",
    "resume": "a comparison always starts new runs",
    "branch": "a comparison always starts new runs",
    "trust": "the environment that you name is trusted",
}
DESCRIPTION = (
    "Train with several numbers of actors, and compare the mean episode return over wall time and over env steps, the "
    "time to a target, the speed-up, and the efficiency relative to the bound of a synchronous cycle; or train several "
    "seeds. Runs take turns, so that a drift of the machine affects all alike. It writes compare.png and compare.json."
)
ACTORS = "Numbers of actors to compare; 0 trains in process, without Ray. (default: 1 8)"
SEEDS = "Seeds for each number of actors: --seed, --seed + 1, ... (default: 3)"
TARGET = "Report the time until the mean episode return reaches this value, e.g. 475."
EQUAL = (
    "batch: all numbers of actors host the same --num-samplers samplers, so the learning problem and the final weights "
    "are the same. segment: each actor has one sampler, so the batch grows with the number of actors, as in the PPO "
    "paper. (default: batch)"
)
OUT = "Folder of the comparison. Default: runs/compare__ENV__TIME."
COMMAND = Command(
    prog="dppo compare",
    usage="ENV_ID [--actors M M ...] [--seeds S] [--flag value ...]",
    description=DESCRIPTION,
    title="comparison",
    own={
        "actors": {"nargs": "+", "type": int, "metavar": "M", "help": ACTORS},
        "seeds": {"type": int, "metavar": "S", "help": SEEDS},
        "target": {"type": float, "metavar": "RETURN", "help": TARGET},
        "equal": {"choices": ["batch", "segment"], "help": EQUAL},
        "out": {"type": Path, "metavar": "DIR", "help": OUT},
    },
    refused=SET_BY_COMPARE,
    defaults={"progress": "off"},
)


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of the comparison itself; all others are settings of the training."""

    actors: Sequence[int] = (1, 8)
    seeds: int = 3
    target: float | None = None
    equal: str = "batch"
    out: Path | None = None


def parse(argv: list[str]) -> tuple[Options, dict[str, Any]]:
    """Return the options of the comparison, and the settings of the training, not yet checked.

    Prints help if it is asked for, and exits. Raises a ConfigError or a UsageError if an option is invalid.
    """
    own, given, env_id = COMMAND.split(argv)
    options = Options(**own)
    _check(options, given)
    training = arguments_of(given, env_id, COMMAND.prog)
    for note in training.notes:
        print(note, file=sys.stderr)
    return options, training.settings


def _check(options: Options, others: Collection[str]) -> None:
    numbers = " ".join(map(str, options.actors))
    if len(set(options.actors)) < len(options.actors):
        raise ConfigError(f"actors={numbers}: contains a number twice. Use different numbers.")
    if min(options.actors) < 0:
        raise ConfigError(f"actors={numbers}: must not be negative. Use 0 to train in process, without Ray.")
    if options.seeds < 1:
        raise ConfigError(f"seeds={options.seeds}: must be at least 1. Use 3 or more to show a spread.")
    if len(options.actors) == options.seeds == 1:
        raise ConfigError(
            f"actors={numbers}: a single run leaves nothing to compare. Add numbers of actors, or more seeds."
        )
    out = options.out
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"out={out}: is not an empty folder. Use a new folder.")
    if options.equal == "segment" and "num_samplers" in others:
        raise ConfigError(
            "--num-samplers has no effect with --equal segment: each actor has one sampler. Leave it out."
        )


def make_plan(options: Options, settings: dict[str, Any], folder: Path) -> list[Config]:
    """Return the runs in order: for each seed all numbers of actors, forwards for one seed and backwards for the next.

    A drift of the machine then affects all numbers of actors alike. Settings of actors apply to the runs with actors.
    Raises a ConfigError if a setting is invalid with one of the numbers of actors.
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
    """Return one line that describes the comparison and what its runs have in common."""
    first, numbers = plan[0], _alternatives(options.actors)
    seeds = counted(options.seeds, "seed")
    envs = f" of {first.envs_per_sampler} envs" if first.envs_per_sampler > 1 else ""
    segment = f"{first.num_steps} steps{envs}"
    if options.equal == "batch":
        samplers = "sampler" if first.num_samplers == 1 else f"{first.num_samplers} samplers"
        held = f"Equal batch: the same {samplers} of {segment}, hosted by {numbers} actors."
    else:
        batches = _alternatives([config.batch_size for config in plan[: len(options.actors)]])
        held = f"Equal segments: {segment} for each of {numbers} actors, so the batch is {batches} steps."
    return f"{first.env_name}, {seeds}. {held}"


def _alternatives(numbers: Sequence[int]) -> str:
    """Return `1, 4 or 8`."""
    *most, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(most)} or {last}" if most else last
