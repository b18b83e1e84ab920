"""`dppo diff`: name the first quantity in which two runs differ."""

from collections.abc import Mapping
from pathlib import Path

from dppo.commands.flags import Parser, UsageError
from dppo.config.parts import settings_by_name
from dppo.errors import CheckpointError, DppoError, counted
from dppo.files import read_file
from dppo.invocation import as_called
from dppo.records.files.disk import check_parts
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.metrics.reading import TRACE, parsed

PROG = "dppo diff"
DESCRIPTION = (
    "Name the first iteration, sampler, step and quantity in which two runs with --trace-hashes differ, and the "
    "settings in which they do. The exit code is 0 if they are equal, 1 if they differ."
)
WHOLE = 8  # digits of a checksum; those with more have four for each step as well


def main(argv: list[str]) -> int:
    """Compare the traces of two runs; return the exit code."""
    runs = [Path(word) for word in Parser(PROG, "RUN RUN", DESCRIPTION).split(argv)[1]]
    if len(runs) != 2:
        raise UsageError(f"needs two runs, not {len(runs)}. For example: {as_called(PROG)} runs/a runs/b")
    one, other = map(_checksums, runs)
    common = sorted(one.keys() & other.keys())
    if not common:
        raise DppoError(f"{runs[0]}, {runs[1]}: no iteration is in both traces. Train both with `trace_hashes=True`.")
    found = next((number for number in common if one[number] != other[number]), None)
    equal = f"equal in {counted(len(common), 'iteration')}, {common[0]} to {common[-1]}"
    print(equal if found is None else f"iteration {found}{_place(one[found], other[found])}")
    settings = [settings_to_resume(run, read_only=True) for run in runs]
    for name in settings_by_name():
        values = [ascii(of_run.get(name)) for of_run in settings]
        if values[0] != values[1]:
            print(f"{name}: {' and '.join(values)}")
    return int(found is not None)


def _checksums(run: Path) -> dict[int, dict[str, str]]:
    """Return the checksums of each iteration of a run; none if it has no trace."""
    check_parts(run)
    try:
        data = read_file(run / TRACE, 1 << 30)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise CheckpointError(f"{run / TRACE}: {error.strerror}.") from None
    rows = [row for _, row in parsed(data) if row is not None]
    return {int(row["iteration"]): {name: str(value) for name, value in row.items()} for row in rows}


def _place(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return where two lines of traces differ first: `, sampler 3, step 17: rewards`."""
    differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]  # in the order of their causes
    stepwise = [name for name in differing if len(one.get(name, "")) > WHOLE]
    equal = {name: [a == b for a, b in zip(one[name], other.get(name, ""), strict=False)] for name in stepwise}
    steps = {name: [*same, False].index(False) // 4 for name, same in equal.items()}
    first = min(steps, key=steps.__getitem__) if differing[0] in steps else differing[0]
    quantity, _, sampler = ascii(first)[1:-1].partition("/")
    step = f", step {steps[first]}" if first in steps else ""
    return f"{f', sampler {sampler}' if sampler else ''}{step}: {quantity}"
