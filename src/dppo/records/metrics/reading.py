"""Read metrics.jsonl: one row per iteration."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.files import open_file, read_file
from dppo.records.files.disk import cause
from dppo.records.files.run_files import METRICS, PARTS

Row = dict[str, float]
"""The metrics of an iteration."""
Rows = Sequence[Row]
COUNTERS = ("iteration", "global_step")  # keys that every row has
SAMPLED_ROWS = 4000
MAX_ROW_BYTES = 2**18
SMALL_FILE_BYTES = 2**24  # a sample reads a file of at most this size as a whole


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, or of the run in the folder `path`; null becomes NaN.

    Skips an incomplete last line, and values that are not numbers. Raises a DppoError if another line is not a row.
    """
    if path.is_dir():
        path /= METRICS
    try:
        data = read_file(path, PARTS[METRICS].max_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error
    rows = []
    for number, (line, row) in enumerate(parsed(data), 1):
        if row is not None:
            rows.append(_numbers(row))
        elif line.endswith(b"\n"):
            raise DppoError(f"{path}:{number}: not a row of metrics. Delete this line.")
    return rows


def sampled_metrics(run: Path) -> list[Row]:
    """Return up to about 4000 rows of a run, evenly spread, with the first and the last; none without a file.

    Takes about as long, and as much memory, for a file of any size. Leaves out what is not a row or not a number.
    """
    rows: dict[tuple[float, float], Row] = {}
    path = run / METRICS
    try:
        for line in _sampled_lines(path):
            for _, row in parsed(line):
                if row is not None:
                    numbers = _numbers(row)
                    # An iteration may end several evaluations.
                    rows[numbers["iteration"], numbers.get("eval/iteration", -1)] = numbers
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path, error) from error
    return [rows[place] for place in sorted(rows)]


def _sampled_lines(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SMALL_FILE_BYTES:
            lines = file.read(SMALL_FILE_BYTES).splitlines(keepends=True)
            every = max(1, len(lines) // SAMPLED_ROWS)
            yield from (*lines[::every], *lines[-2:])  # the last may be incomplete
            return
        yield file.readline(MAX_ROW_BYTES)
        for number in range(SAMPLED_ROWS):
            file.seek(size * number // SAMPLED_ROWS)
            if not file.readline(MAX_ROW_BYTES).endswith(b"\n"):
                break  # not a file of metrics
            yield file.readline(MAX_ROW_BYTES)
        file.seek(size - MAX_ROW_BYTES)
        last_lines = file.read(MAX_ROW_BYTES).splitlines(keepends=True)[1:]
        yield from last_lines[-2:]  # two of them, as the sample must be even


def last_row(run: Path) -> Row:
    """Return the last row of a run, reading only the end of the file; {} if there is none."""
    with suppress(OSError), os.fdopen(open_file(run / METRICS), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_ROW_BYTES))
        rows = [row for _, row in parsed(file.read(MAX_ROW_BYTES)) if row is not None]
        if rows:
            return _numbers(rows[-1])
    return {}


def missing_steps(row: Row, batch_size: int) -> int:
    """Return how many rows of the batches so far are no env steps: those of agents that had left, and of faults."""
    batch_rows = row.get("iteration", 0) * batch_size
    return max(0, int(batch_rows - row.get("global_step", 0)))


def parsed(data: bytes) -> Iterator[tuple[bytes, Row | None]]:
    """Yield each line, and its row of metrics; None if the line is incomplete or not a row."""
    for line in data.splitlines(keepends=True):
        row = None
        if line.endswith(b"\n"):
            with suppress(RecursionError, ValueError):
                row = _row(json.loads(line))
        yield line, row


def _row(content: Any) -> Row | None:
    if not isinstance(content, dict):
        return None
    for name in COUNTERS:
        counter = content.get(name)
        if not isinstance(counter, int) or not _is_number(counter):
            return None
    return {key: math.nan if value is None else value for key, value in content.items()}


def _numbers(row: Mapping[str, Any]) -> Row:
    return {key: value for key, value in row.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _unreadable(path: Path, error: OSError) -> DppoError:
    return DppoError(f"{path}: {cause(error)} Pass the folder of a run.")
