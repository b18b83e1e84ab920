"""`dppo verify`: compute iterations of a run again, and check that they are equal to the last bit."""

import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from dppo.commands.flags import TRUST, Parser, print_lines
from dppo.config import Config
from dppo.errors import CheckpointError, ConfigError, counted
from dppo.invocation import command
from dppo.numerics.fingerprint import cpu_name
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import Checkpoint
from dppo.records.files.disk import check_writable
from dppo.records.files.lock import training_notes
from dppo.records.files.run_files import CERTIFICATE
from dppo.records.files.run_folder import (
    check_stored_names,
    run_dir_of,
    settings_to_resume,
    versions,
)
from dppo.records.metrics.reading import Rows, read_metrics
from dppo.records.terminal.figures import duration
from dppo.run.sources import changed_sources
from dppo.signals import StopRequested, StopSignals
from dppo.tools.verify.certificate import write_certificate
from dppo.tools.verify.recompute import Comparison, NotEqual, NotReplayed, config_of, recompute
from dppo.tools.verify.stored import Stretch, changed_files, stretches_of

PROG = "dppo verify"
USAGE = "RUN [--iterations N] [--num-actors N] [--seed N] [--out FILE] [--trust]"
DESCRIPTION = (
    "Check a RUN: compute iterations again, each from the checkpoint before it, and compare the policy, the optimizer, "
    "the metrics and, with --trace-hashes, each step. The exit code is 0 if all is equal to the last bit, else 1. "
    "--keep-checkpoints every=N keeps more checkpoints of a run, so that there are more to choose from."
)
FLAGS = {
    "--iterations N": "Checkpoints to compute again: the newest, and others chosen at random. (default: 5)",
    "--num-actors N": "Actors to compute with, 0: in this process. (default: as in the run)",
    "--seed N": "Seed of that choice. (default: a new one each time)",
    "--out FILE": "The certificate. (default: RUN/certificate.json)",
    "--trust": TRUST,
}
ITERATIONS = 5
FAR_LONGER = 10  # times the median: longer stretches are not drawn, such as the iterations after an old best checkpoint
START_S = 5.0  # time in which the parts of a run are made
SHOW_EVERY_S = 10.0


def main(argv: list[str]) -> int:
    """Verify a run, print what was found, and write a certificate; return the exit code."""
    flags, word = Parser(PROG, USAGE, DESCRIPTION, {"options": FLAGS}).split_word(argv)
    count = flags.get("iterations", ITERATIONS)
    if count < 1:
        raise ConfigError(f"iterations={count}: must be at least 1.")
    run = run_dir_of(Path(word))
    began = time.monotonic()
    try:
        stretches = stretches_of(run)
        newest = checkpoints.find(run)
        problems = list(changed_files(run, newest))
    except CheckpointError as error:
        if not checkpoints.has_any(run):
            raise
        problems = [str(error).partition("\n")[0]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a stranger's file
        problems = [f"the newest checkpoint contains values that no run writes ({error!r})"]
    if problems:
        print_lines(*(f"differs  {problem}" for problem in problems))
        return 1
    check_stored_names(run)
    settings_to_resume(run)  # refuses Python objects, which a folder cannot hold
    if not stretches:
        raise CheckpointError(
            f"{run}: has a single checkpoint, and an iteration is computed again from the checkpoint before it. Train "
            f"with `keep_checkpoints=every=100`, or another number."
        )
    seed = flags.get("seed", secrets.randbelow(10**6))
    chosen = _drawn(stretches, count, seed)
    state = newest.checkpoint.state
    config = config_of(newest.checkpoint, flags.get("num_actors"), run, trust="trust" in flags)
    out = flags.get("out", run / CERTIFICATE)
    check_writable(out.absolute().parent, f"out={out}")
    run_line = f"run      {config.env_name}, seed {config.seed}, {state['iteration']:,} iterations"
    print_lines(*training_notes(run), run_line)
    print_lines(*_expectations(newest.checkpoint, config), *_left_out(stretches))
    rows = read_metrics(run)
    seconds = sum(_estimated_s(stretch, rows, config) for stretch in chosen)
    iterations = sum(stretch.iterations for stretch in chosen)
    print_lines(
        f"compute  {counted(iterations, 'iteration')}, about {duration(seconds)}: {len(chosen)} of {len(stretches)} "
        f"intervals between checkpoints, chosen by --seed {seed}"
    )
    weights_sha256 = _computed_weights(run, chosen, flags)
    if not weights_sha256:
        return 1
    took_s = time.monotonic() - began
    print_lines(
        f"verified weights {weights_sha256[:16]}, in {duration(took_s)}",
        "write    the certificate, with a hash of the simulator's first steps ...",
    )
    measured = {"weights_sha256": weights_sha256, "seconds": round(took_s, 1), "draw_seed": seed}
    write_certificate(out, run, newest, config, chosen, measured)
    print_lines(f"wrote    {out}")
    return 0


def _drawn(stretches: Sequence[Stretch], count: int, seed: int) -> list[Stretch]:
    """Return the last stretch, which leads to the newest policy, and others at random."""
    longest = FAR_LONGER * median(stretch.iterations for stretch in stretches)
    usual = [stretch for stretch in stretches[:-1] if stretch.iterations <= longest]
    drawn = random.Random(seed).sample(usual, min(count - 1, len(usual)))
    return sorted([*drawn, stretches[-1]], key=lambda stretch: stretch.first)


def _left_out(stretches: Sequence[Stretch]) -> list[str]:
    """Return a line on the iterations before the oldest checkpoint, which cannot be computed again."""
    last = stretches[0].first - 1
    if last == 0:
        return []
    return [
        f"left out iterations 1 to {last:,}: no checkpoint from before them was kept. `--keep-checkpoints every=N` "
        f"keeps more in a new run"
    ]


def _expectations(newest: Checkpoint, config: Config) -> list[str]:
    """Return lines on this machine, and on what to expect where the run had another one."""
    state = newest.state
    own_versions = versions()
    numerics = state.get("numerics", {}).get("own", {})
    cpu_of_run = numerics.get("cpu", "unknown")
    lines = [f"here     {cpu_name()}; {', '.join(' '.join(item) for item in own_versions.items())}"]
    if cpu_of_run != cpu_name():
        lines.append(f"the run  {cpu_of_run}")
        if config.numerics == "native":
            lines.append("expect   different last bits on another type of CPU: numerics=native")
        else:
            lines.append(f"expect   equal bits on x86-64 with AVX2: numerics={config.numerics}")
    other_versions = [
        f"{package} {version}"
        for package, version in state["versions"].items()
        if own_versions.get(package) != version
    ]
    if other_versions:
        lines.append(f"the run  {', '.join(other_versions)}: other versions may compute other bits")
    return lines


def _estimated_s(stretch: Stretch, rows: Rows, config: Config) -> float:
    """Return the seconds that the run took for a stretch, for as many actors as now, with the replay at its start."""
    workers = max(1, min(config.most_actors, config.num_samplers))
    seconds = START_S
    for row in rows:
        if stretch.first <= row["iteration"] <= stretch.last:
            workers_before = max(1.0, row.get("actors/alive", 0))
            seconds += row.get("perf/iteration_s", 0.0)
            seconds += row.get("perf/collect_s", 0.0) * (workers_before / workers - 1)
            if row["iteration"] == stretch.first:
                step_s = row.get("perf/env_step_ms", 0.0) / 1e3
                seconds += stretch.open_steps * step_s / workers
    return seconds


def _computed_weights(run: Path, chosen: Sequence[Stretch], flags: Mapping[str, Any]) -> str:
    """Compute the stretches again, printing a line for each; return the SHA-256 of the last weights, "" if unequal."""
    weights_sha256 = ""
    show = _shown_now_and_then()
    with StopSignals(lambda text: print(text, file=sys.stderr)) as stop:
        for number, stretch in enumerate(chosen):
            began = time.monotonic()
            end = checkpoints.load(stretch.end)
            config = config_of(end, flags.get("num_actors"), run, trust="trust" in flags)
            comparison = Comparison(run, stretch, show)
            try:
                recompute(config, comparison, stretch, stop)
            except NotReplayed as reason:
                print_lines(f"unproven {reason}")
                return ""
            except NotEqual as difference:
                print_lines(f"differs  {difference}")
                print_lines(f"         {_find_cause(config, comparison, stretch, stop)}")
                return ""
            except StopRequested as request:
                request.progress = f"{number} of {len(chosen)} intervals were computed, all equal"
                raise
            weights_sha256 = comparison.weights_sha256
            print_lines(f"equal    {stretch}, in {duration(time.monotonic() - began)}")
    return weights_sha256


def _find_cause(config: Config, comparison: Comparison, stretch: Stretch, stop: StopSignals) -> str:
    """Return why an iteration may differ: this process, or, after computing it once more, environment or folder."""
    if comparison.other_numerics:
        return f"Equal results cannot be expected here: {comparison.other_numerics}"
    for name, file in changed_sources(checkpoints.load(stretch.end).state, config):
        return f"Equal results cannot be expected: {name}: its file {file} has changed since."
    repetition = Comparison(comparison.run, stretch, comparison.show)
    with suppress(NotEqual):
        recompute(config, repetition, stretch, stop)
    if repetition.computed != comparison.computed:
        doctor = command("doctor", config.env_name)
        return (
            f"A second computation differs again: the environment does not follow from its seed. Run `{doctor}`, "
            f"which looks for the cause."
        )
    return (
        "A second computation gives the same. Either the folder was changed, or the run had something that is missing "
        "here: other versions, also of files that its code imports, an observer that calls set_env (then use "
        "keep_checkpoints='every=1'), or something that its environments keep from earlier episodes."
    )


def _shown_now_and_then() -> Callable[[str], None]:
    last_s = time.monotonic()

    def show(text: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > SHOW_EVERY_S:
            last_s = time.monotonic()
            print(f"         {text} ...", file=sys.stderr, flush=True)

    return show
