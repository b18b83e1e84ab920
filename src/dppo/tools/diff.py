"""`dppo diff`: name the first quantity in which two runs differ."""

from collections.abc import Mapping
from os.path import commonprefix
from pathlib import Path
from typing import Any

from dppo.commands.flags import Parser, UsageError
from dppo.config.parts import settings_by_name
from dppo.errors import CheckpointError, DppoError, counted
from dppo.invocation import as_called
from dppo.records.files.run_files import TRACE, check_run_files, read_run_file
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.metrics.reading import parsed

PROG = "dppo diff"
DESCRIPTION = (
    "Name the first iteration, sampler, step and quantity in which two runs with --trace-hashes differ, and the "
    "settings in which they do. The exit code is 0 if they are equal, 1 if they differ."
)
CHECKSUM_DIGITS = 8  # a checksum of steps has four digits for each step before these
DIGITS_PER_STEP = 4
Checksums = Mapping[str, str]
"""Checksums of an iteration by quantity and sampler, such as "rewards/3", in the order of their causes."""


def main(argv: list[str]) -> int:
    """Compare the traces of two runs; return the exit code."""
    _, words = Parser(PROG, "RUN RUN", DESCRIPTION).split(argv)
    if len(words) != 2:
        raise UsageError(
            f"needs two runs, not {len(words)}. For example: {as_called(PROG)} runs/a runs/b"
        )
    run_a, run_b = map(Path, words)
    trace_a = read_trace(run_a)
    trace_b = read_trace(run_b)
    common = sorted(trace_a.keys() & trace_b.keys())
    if not common:
        _print_different_settings(run_a, run_b)
        raise DppoError(
            f"{run_a}, {run_b}: no iteration is in both traces. Train both with `trace_hashes=True`."
        )
    differing = [iteration for iteration in common if trace_a[iteration] != trace_b[iteration]]
    if differing:
        first = differing[0]
        print(f"iteration {first}{first_difference(trace_a[first], trace_b[first])}")
    else:
        print(f"equal in {counted(len(common), 'iteration')}, {common[0]} to {common[-1]}")
    _print_different_settings(run_a, run_b)
    return 1 if differing else 0


def _print_different_settings(run_a: Path, run_b: Path) -> None:
    settings_a = settings_to_resume(run_a, read_only=True)
    settings_b = settings_to_resume(run_b, read_only=True)
    for name in settings_by_name():
        value_a = ascii(settings_a.get(name))
        value_b = ascii(settings_b.get(name))
        if value_a != value_b:
            print(f"{name}: {value_a} and {value_b}")


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names whose values are not the same in two mappings, in the order of the mappings."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


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
