"""`dppo compare`: repeat one training with several numbers of actors and several seeds, and compare the runs."""

import json
import platform
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dppo.commands.train import Command, arguments_of
from dppo.config import Config, plain_settings
from dppo.config.resume import leave_out_ineffective
from dppo.config.settings import Settings
from dppo.errors import ConfigError, counted, refuse
from dppo.machine import usable_cores
from dppo.records.closing_lines import WITHOUT_WIDE
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_folder import new_folder, versions
from dppo.records.terminal.figures import duration, number
from dppo.signals import INTERRUPTIONS, RaisingSignals
from dppo.tools.compare.measured import (
    Group,
    MeasuredRun,
    by_actors,
    differing_seeds,
    group_of,
    groups_of,
)
from dppo.tools.curves import CurveGroup
from dppo.tools.pictures.comparison import compare_figure
from dppo.tools.whole_time import SeveralRuns, WholeTime

EXPLAIN_NOISE = (
    "Noise: an efficiency above 100 %, or a speed-up above that of perfect parallelism. The load of the machine "
    "changed between the runs. Repeat it on a quiet machine, with more iterations, more seeds, or slower environments."
)

COMMAND = Command(
    prog="dppo compare",
    usage="ENV_ID [--actors N N ...] [--seeds N] [--flag value ...]",
    description="Train with several numbers of actors, and compare the mean episode return over training time and over "
    "env steps, the time to a target, the speed-up, and the efficiency relative to the bound of a synchronous cycle; "
    "or train several seeds. Runs alternate, so that a change of the machine's speed affects all alike. It writes "
    "compare.png and compare.json.",
    title="comparison",
    flags={
        "--actors N ...": "Numbers of actors to compare; 0 trains in process, without Ray. (default: 1 8)",
        "--seeds N": "Seeds for each number of actors: --seed, --seed + 1, ... (default: 3)",
        "--target RETURN": "Report the time until the mean episode return reaches this value, e.g. 475.",
        "--equal {batch,segment}": "batch: all numbers of actors host the same --num-samplers samplers, so the "
        "learning problem and the final weights are the same. segment: each actor has one sampler, so the batch grows "
        "with the number of actors, as in the PPO paper. (default: batch)",
        "--out DIR": "Folder of the comparison. Default: runs/compare__ENV__TIME.",
    },
    refused={
        "num_actors": "use --actors, e.g. --actors 1 8",
        "run_dir": "use --out, which is the folder of all runs",
        "resume": "a comparison always starts new runs",
        "branch": "a comparison always starts new runs",
        "trust": "the environment that you name is trusted",
    },
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


def main(argv: list[str]) -> int:
    """Train with each number of actors, and write compare.json and compare.png; return the exit code.

    It is 0; 1 if runs with equal batches ended with different weights; 128 + n if signal n stopped a run.
    """
    options, settings = parse(argv)
    folder = (options.out or new_folder("compare", str(settings["env_id"]))).absolute()
    plan = make_plan(options, settings, folder)
    console = Console(highlight=False, soft_wrap=True)
    console.print(caption(options, plan))
    runs: list[MeasuredRun] = []
    stopped_by = None
    try:
        with RaisingSignals() as signals:
            _train_all(options, plan, runs, folder, console, signals)
    except INTERRUPTIONS as request:
        stopped_by = request.signal
    code = _report(options, plan, runs, folder, console) if runs else 0
    if stopped_by is not None:
        print(
            f"Stopped by {stopped_by.name} after {len(runs)} of {len(plan)} runs; see {folder}.",
            file=sys.stderr,
        )
        return 128 + stopped_by
    return code


def _report(
    options: Options,
    plan: Sequence[Config],
    runs: Sequence[MeasuredRun],
    folder: Path,
    console: Console,
) -> int:
    """Draw and print the result of the runs that have finished; return the exit code."""
    groups = groups_of(runs, options.target)
    curves = [
        CurveGroup(
            group["label"], [run.curve() for run in group_runs], noise=group["speed_up_is_noise"]
        )
        for group, group_runs in zip(groups, by_actors(runs), strict=True)
    ]
    words = caption(options, plan)
    if len(runs) < len(plan):
        words += f" Stopped after {len(runs)} of {len(plan)} runs."
    with writing(folder / "compare.png"):
        compare_figure(curves, folder / "compare.png", words, options.target)
    console.print(make_table(groups, options.target), soft_wrap=False)
    console.print(explain_bound(groups[-1]))
    console.print(f"Written: {folder / 'compare.png'} and {folder / 'compare.json'}")
    if any(group["cycle"]["efficiency_is_noise"] or group["speed_up_is_noise"] for group in groups):
        console.print(EXPLAIN_NOISE)
    if _must_have_equal_weights(options, runs):
        return _report_equality(runs, console)
    return 0


def _must_have_equal_weights(options: Options, runs: Sequence[MeasuredRun]) -> bool:
    """Decide whether some of the runs have the same seed, and must end with the same weights."""
    return options.equal == "batch" and len(by_actors(runs)) > 1


def _train_all(
    options: Options,
    plan: Sequence[Config],
    runs: list[MeasuredRun],
    folder: Path,
    console: Console,
    signals: RaisingSignals,
) -> None:
    """Train, and add each run that has finished to `runs`; a signal raises one of INTERRUPTIONS."""
    from dppo.run.runner import train  # imports torch, so only after the options have been checked

    runs_to_train = SeveralRuns(len(plan), max(config.total_steps for config in plan))
    whole_time = WholeTime(runs_to_train, console.print)
    for config in plan:
        observers = [] if runs else [whole_time]
        result = train(config, observers=observers)
        if result.stopped_by is None:
            run = MeasuredRun(config, result, result.metrics)
            runs.append(run)
            _write_json(options, plan, runs, folder / "compare.json")
            console.print(
                f"{len(runs)} of {len(plan)}: {group_of([run])['label']}, seed {config.seed}: return "
                f"{number(result.episodic_return)} after {result.global_step:,} steps in {result.training_s:.1f} s "
                f"(start-up {run.startup_s:.1f} s), weights {result.weights_sha256[:12]}{_time_left(plan, runs)}"
            )
        signals.check()


def _time_left(plan: Sequence[Config], runs: Sequence[MeasuredRun]) -> str:
    configs_left = plan[len(runs) :]
    if not configs_left:
        return ""
    wall_s = {run.config.num_actors: run.result.wall_s for run in runs}
    if not all(config.num_actors in wall_s for config in configs_left):
        return f"; {len(configs_left)} to go"
    left_s = sum(wall_s[config.num_actors] for config in configs_left)
    return f"; {len(configs_left)} to go, about {duration(left_s)}"


def _write_json(
    options: Options, plan: Sequence[Config], runs: Sequence[MeasuredRun], path: Path
) -> None:
    """Write all measurements so far; done after each run, so that an interrupted comparison is not lost."""
    differs_between_runs = ("num_actors", "num_samplers", "seed")
    same_weights = None
    if _must_have_equal_weights(options, runs):
        same_weights = not differing_seeds(runs)
    everything = {
        "caption": caption(options, plan),
        "env_id": plan[0].env_name,
        "equal": options.equal,
        "actors": options.actors,
        "seeds": list(dict.fromkeys(config.seed for config in plan)),
        "target": options.target,
        "runs_planned": len(plan),
        "same_weights": same_weights,
        "groups": groups_of(runs, options.target),
        "runs": [run.as_json(options.target) for run in runs],
        "settings": {
            key: value
            for key, value in plain_settings(plan[0]).items()
            if key not in differs_between_runs
        },
        "machine": {"system": platform.platform(), "cpus": usable_cores()},
        "versions": versions(),
    }
    data = json.dumps(everything, indent=1) + "\n"
    with writing(path):
        make_folder(path.parent)
        write_file(path, data.encode())


def parse(argv: list[str]) -> tuple[Options, dict[str, Any]]:
    """Return the options of the comparison, and unchecked settings; raise as `Command.split` and `arguments_of`."""
    flags_of_comparison, flags, env_id = COMMAND.split(argv)
    options = Options(**flags_of_comparison)
    refuse(_invalid(options, flags))
    if options.equal == "segment":  # a preset must fit the smallest batch, and be the same for all
        flags["num_samplers"] = str(max(1, min(options.actors)))
    training = arguments_of(flags, env_id, COMMAND.prog)
    for note in training.notes:
        print(note, file=sys.stderr)
    return options, training.settings


def _invalid(options: Options, settings: Collection[str]) -> Iterator[ConfigError]:
    numbers = " ".join(map(str, options.actors))
    if len(set(options.actors)) < len(options.actors):
        yield ConfigError(f"actors={numbers}: contains a number twice. Use different numbers.")
    if min(options.actors) < 0:
        yield ConfigError(
            f"actors={numbers}: must not be negative. Use 0 to train in process, without Ray."
        )
    if options.seeds < 1:
        yield ConfigError(
            f"seeds={options.seeds}: must be at least 1. Use 3 or more to show a spread."
        )
    if len(options.actors) == options.seeds == 1:
        yield ConfigError(
            f"actors={numbers}: a single run leaves nothing to compare. Add numbers of actors, or more seeds."
        )
    out = options.out
    if out is not None and out.exists():
        is_empty_folder = out.is_dir() and not any(out.iterdir())
        if not is_empty_folder:
            yield ConfigError(f"out={out}: is not an empty folder. Use a new folder.")
    if options.equal == "segment" and "num_samplers" in settings:
        yield ConfigError(
            "--num-samplers has no effect with --equal segment: each actor has one sampler. Leave it out."
        )


def make_plan(options: Options, settings: dict[str, Any], folder: Path) -> list[Config]:
    """Return the runs in order: for each seed all numbers of actors, forwards for one seed and backwards for the next.

    A drift of the machine then affects all numbers of actors alike. Settings of actors apply to the runs with actors.
    Raises a ConfigError if a setting is invalid with one of the numbers of actors.
    """
    settings = {"progress": "off"} | settings
    most_actors = max(options.actors)
    num_samplers = Settings(**settings).num_samplers
    if options.equal == "batch" and most_actors > num_samplers:
        raise ConfigError(
            f"actors={' '.join(map(str, options.actors))}: {most_actors} is more than num_samplers={num_samplers}, and "
            f"each actor hosts one at least. Use numbers up to {num_samplers}, or `num_samplers={most_actors}`, which "
            f"makes the batch larger and so changes the learning problem."
        )

    def config_with(num_actors: int, changes: dict[str, Any]) -> Config:
        changes["num_actors"] = num_actors
        if options.equal == "segment":
            changes["num_samplers"] = max(1, num_actors)
        if any(options.actors):
            return Config(**leave_out_ineffective(settings, changes))
        return Config(**(settings | changes))

    first_seed = config_with(most_actors, {}).seed
    plan = []
    for turn in range(options.seeds):
        seed = first_seed + turn
        is_backwards = turn % 2 == 1
        actor_counts = options.actors[::-1] if is_backwards else options.actors
        for num_actors in actor_counts:
            run_dir = folder / "runs" / f"actors{num_actors}__s{seed}"
            plan.append(config_with(num_actors, {"seed": seed, "run_dir": run_dir}))
    return plan


def caption(options: Options, plan: Sequence[Config]) -> str:
    """Return one line that describes the comparison and what its runs have in common."""
    first_run = plan[0]
    actor_counts = _alternatives(options.actors)
    segment = f"{first_run.num_steps} steps"
    if first_run.envs_per_sampler > 1:
        segment += f" of {first_run.envs_per_sampler} envs"
    if options.equal == "batch":
        num_samplers = first_run.num_samplers
        samplers = "sampler"
        if num_samplers != 1:
            samplers = f"{num_samplers} samplers"
        common = f"Equal batch: the same {samplers} of {segment}, hosted by {actor_counts} actors."
    else:
        # the plan begins with the runs of the first seed, in the order of options.actors
        runs_of_first_seed = plan[: len(options.actors)]
        batch_sizes = _alternatives([config.batch_size for config in runs_of_first_seed])
        common = f"Equal segments: {segment} for each of {actor_counts} actors, so the batch is {batch_sizes} steps."
    left_out = f" Returns are{WITHOUT_WIDE[1:]}." if first_run.noise == "wide" else ""
    return f"{first_run.env_name}, {counted(options.seeds, 'seed')}. {common}{left_out}"


def _alternatives(numbers: Sequence[int]) -> str:
    *first, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(first)} or {last}" if first else last


def make_table(groups: Sequence[Group], target: float | None) -> Table:
    """Return a table with one row per number of actors: mean times over the seeds, speed-up relative to the first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in _cells(groups[0], target):
        table.add_column(heading, justify="right")
    for group in groups:
        cells = _cells(group, target)
        table.add_row(group["label"], *cells.values())
    return table


def _cells(group: Group, target: float | None) -> dict[str, str]:
    """Return the cells of the row of a group, by the headings of their columns."""
    cycle = group["cycle"]
    cells = {"start-up": f"{group['startup_s']:.1f} s"}
    cells["training"] = f"{group['training_s']:.1f} s"
    if target is not None:
        cells[f"to {target:g}"] = _time_to_target(group)
    cells["speed-up"] = f"{group['speed_up']:.2f} x"
    cells["steps/s"] = f"{cycle['steps'] / cycle['iteration_s']:,.0f}"
    cells["bound"] = f"{cycle['bound_steps_per_s']:,.0f}"
    cells["efficiency"] = f"{100 * cycle['efficiency']:.1f} %"
    if group["speed_up_is_noise"]:
        cells["speed-up"] = "noise"
    if cycle["efficiency_is_noise"]:
        cells["efficiency"] = "noise"
    return cells


def _time_to_target(group: Group) -> str:
    """Return the mean time of the seeds that reached the target, with their number if some did not."""
    seconds = group["time_to_target_s"]
    if seconds is None:
        return "never"
    num_reached = group["seeds_that_reached_target"]
    num_seeds = len(group["seeds"])
    mean = f"{seconds:.1f} s"
    if num_reached < num_seeds:
        mean += f" ({num_reached}/{num_seeds})"
    return mean


def explain_bound(group: Group) -> str:
    """Explain the bound in one line, with its measured parts."""
    return (
        "Bound: an iteration of {steps:,} env steps takes at least {bound_s:.3f} s with {label}: {exchange_s:.3f} s to "
        "send weights and receive segments, {collect_s:.3f} s until the slowest actor has collected, and "
        "{update_s:.3f} s to update. It took {iteration_s:.3f} s. The first iteration, which makes the environments, "
        "counts for training and speed-up only."
    ).format(label=group["label"], **group["cycle"])


def _report_equality(runs: Sequence[MeasuredRun], console: Console) -> int:
    """Report whether runs with the same seed have the same weights; return the exit code."""
    differing = differing_seeds(runs)
    if not differing:
        console.print("The same weights, bit for bit, for every seed.")
        return 0
    lines = ["THE WEIGHTS DIFFER: the number of actors changed the result."]
    for seed, hashes in differing.items():
        described = [f"{actors} actors {sha[:16]}" for actors, sha in hashes.items()]
        lines.append(f"  seed {seed}: {', '.join(described)}")
    lines.append(
        "If the environment is deterministic for a given seed, this is a bug in dppo: please report it."
    )
    print("\n".join(lines), file=sys.stderr)
    return 1
