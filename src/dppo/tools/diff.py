"""`dppo diff`: name the first quantity in which two runs differ."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from dppo.commands.flags import Parser, UsageError, print_lines
from dppo.config.parts import settings_by_name
from dppo.config.plain import plain_defaults
from dppo.errors import CheckpointError, DppoError, counted
from dppo.invocation import as_called
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.lock import training_notes
from dppo.records.files.run_files import CHECKPOINTS, METRICS, TRACE, check_run_files, read_run_file
from dppo.records.files.run_folder import run_dir_of, settings_to_resume
from dppo.records.metrics.reading import parsed, read_metrics
from dppo.records.metrics.writer import plain

PROG = "dppo diff"
DESCRIPTION = (
    "Name the first iteration, sampler, step and quantity in which two runs with --trace-hashes differ, and the "
    "settings that differ. Without traces, the metrics of each iteration and the weights of the last checkpoint "
    "of both are compared. The exit code is 0 if they are equal, 1 if they differ."
)
CHECKSUM_DIGITS = 8  # a checksum of steps has four digits for each step before these
DIGITS_PER_STEP = 4
Checksums = Mapping[str, str]
"""Checksums of an iteration by quantity and sampler, such as "rewards/3", in the order of their causes."""
Results = Mapping[str, float | None]
"""Metrics of an iteration that do not depend on clocks and actors."""
RESULTS = ("iteration", "global_step", "charts/", "losses/", "info/", "faults/")
"""Metrics that do not depend on clocks and actors, by the beginning of their names."""
NO_RESULTS = "charts/SPS"
FINER = ". Train both with --trace-hashes to get sampler, step and quantity"


def main(argv: list[str]) -> int:
    """Compare the traces of two runs; return the exit code."""
    _, words = Parser(PROG, "RUN RUN", DESCRIPTION).split(argv)
    if len(words) != 2:
        raise UsageError(
            f"needs two runs, not {len(words)}. For example: {as_called(PROG)} runs/a runs/b"
        )
    run_a, run_b = (run_dir_of(Path(word)) for word in words)
    trace_a = read_trace(run_a)
    trace_b = read_trace(run_b)
    print_lines(*training_notes(run_a, run_b))
    if trace_a.keys() & trace_b.keys():
        difference, compared = _different_traces(trace_a, trace_b)
    else:
        difference, compared = _different_metrics(run_a, run_b)
    if difference or compared:
        print_lines(difference or f"equal in {compared}")
    _print_different_settings(run_a, run_b)
    if not difference and not compared:
        raise DppoError(f"{run_a}, {run_b}: have no iteration in common. Continue the shorter run.")
    return 1 if difference else 0


def _different_traces(
    trace_a: Mapping[int, Checksums], trace_b: Mapping[int, Checksums]
) -> tuple[str, str]:
    """Return the first difference of two traces, "" if there is none, and what was compared."""
    common = sorted(trace_a.keys() & trace_b.keys())
    for iteration in common:
        if trace_a[iteration] != trace_b[iteration]:
            place = first_difference(trace_a[iteration], trace_b[iteration])
            return f"iteration {iteration}{place}", ""
    return "", _in_words(common)


def _different_metrics(run_a: Path, run_b: Path) -> tuple[str, str]:
    """Do as `_different_traces` for the metrics of two runs, and the weights of the last checkpoint of both."""
    rows_a = _results_by_iteration(run_a)
    rows_b = _results_by_iteration(run_b)
    common = sorted(rows_a.keys() & rows_b.keys())
    if not common:
        return "", ""
    shared = {*chain(*rows_a.values())} & {*chain(*rows_b.values())}
    for iteration in common:
        row_a = rows_a[iteration]
        row_b = rows_b[iteration]
        names = differing_results(row_a, row_b, shared)
        if names:
            values = f"{row_a.get(names[0])} and {row_b.get(names[0])}"
            return f"iteration {iteration}: {names[0]}: {values}{FINER}", ""
    iteration = max(_saved(run_a) & _saved(run_b), default=0)
    if not iteration:
        return "", f"the metrics of {_in_words(common)}; no checkpoint of the same iteration"
    if _weights(run_a, iteration) != _weights(run_b, iteration):
        return f"iteration {iteration}: weights{FINER}", ""
    return "", f"the metrics of {_in_words(common)}, and in the weights of iteration {iteration}"


def _results_by_iteration(run: Path) -> dict[int, Results]:
    """Return the results of each iteration; none if no iteration has finished."""
    if not (run / METRICS).exists():
        return {}
    return {int(row["iteration"]): results_of(plain(row)) for row in read_metrics(run)}


def _in_words(iterations: Sequence[int]) -> str:
    return f"{counted(len(iterations), 'iteration')}, {iterations[0]} to {iterations[-1]}"


def _saved(run: Path) -> set[int]:
    """Return the iterations of the checkpoints of a run, without that before the first iteration."""
    iterations = {checkpoints.saved_iteration(path) or 0 for path in checkpoints.paths_in(run)}
    return iterations - {0}


def _weights(run: Path, iteration: int) -> dict[str, Any]:
    path = run / CHECKPOINTS / checkpoints.file_name(iteration)
    arrays = checkpoints.load(path).arrays.get("model", {})
    return {name: bits_of(array) for name, array in arrays.items()}


def bits_of(array: np.ndarray) -> tuple[Any, ...]:
    """Return a value that is equal for arrays that are equal to the last bit."""
    return array.dtype, array.shape, array.tobytes()


def _print_different_settings(run_a: Path, run_b: Path) -> None:
    settings_a = _all_settings(run_a)
    settings_b = _all_settings(run_b)
    for name in settings_by_name():
        value_a = ascii(settings_a[name])
        value_b = ascii(settings_b[name])
        if value_a != value_b:
            print(f"{name}: {value_a} and {value_b}")


def _all_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run; those that an earlier version did not have are defaults."""
    settings = settings_to_resume(run, read_only=True)
    return {**plain_defaults(settings), **settings}


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names whose values are not the same in two mappings, in the order of the mappings."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def differing_results(first: Results, second: Results, shared: Collection[str]) -> list[str]:
    """Return the names of different metrics; those that only one of two versions of dppo writes are left out.

    `shared`: the names that some row of each of the two runs has.
    """
    return [
        name for name in differing(first, second) if name.startswith("faults/") or name in shared
    ]


def results_of(row: Mapping[str, float | None]) -> Results:
    """Return the metrics of a row that two runs with the same settings share: none depends on clocks or actors."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith(RESULTS) and not name.startswith(NO_RESULTS)
    }


def read_trace(run: Path) -> dict[int, Checksums]:
    """Return the checksums of each iteration of a run; none if it has no trace."""
    check_run_files(run)
    try:
        data = read_run_file(run / TRACE)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise CheckpointError(f"{run / TRACE}: {error.strerror}.") from None
    trace: dict[int, Checksums] = {}
    for _, row in parsed(data):
        if row is not None:
            checksums = {name: str(value) for name, value in row.items()}
            trace[int(row["iteration"])] = checksums
    return trace


def first_difference(checksums_a: Checksums, checksums_b: Checksums) -> str:
    """Return where two lines of traces differ first: `, sampler 3, step 17: rewards`."""
    names = differing(checksums_a, checksums_b)
    steps = {}  # the first different step of each quantity that has a checksum for each step
    for name in names:
        if len(checksums_a.get(name, "")) > CHECKSUM_DIGITS:
            digits = [checksums_a[name], checksums_b.get(name, "")]
            equal_digits = commonprefix(digits)  # noqa: RUF071  digits are meant, not folders
            steps[name] = len(equal_digits) // DIGITS_PER_STEP
    first = names[0]
    step = ""
    if first in steps:
        first = min(steps, key=steps.__getitem__)
        step = f", step {steps[first]}"
    quantity, _, sampler_id = ascii(first)[1:-1].partition("/")
    sampler = f", sampler {sampler_id}" if sampler_id else ""
    return f"{sampler}{step}: {quantity}"
