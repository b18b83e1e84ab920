"""Read metrics.jsonl: one row per iteration."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.files import open_file, read_file
from dppo.records.files.disk import cause

FILE, TRACE, EPISODES = "metrics.jsonl", "trace.jsonl", "episodes.jsonl"
COUNTERS = ("iteration", "global_step")  # in each row
MOST_ROWS, LONGEST, WHOLE = 4000, 2**18, 2**24  # of a sample; bytes of a row in it, and of a file that is read whole


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl, or of the run in the folder `path`; null becomes NaN.

    Skips an incomplete last line, and values that are not numbers. Raises a DppoError if another line is not a row.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = read_file(path)
    except OSError as error:
        raise DppoError(f"{path}: {cause(error)} Pass the folder of a run.") from error
    rows = []
    for number, (line, row) in enumerate(parsed(data), 1):
        if row is not None:
            rows.append({key: value for key, value in row.items() if _is_number(value)})
        elif line.endswith(b"\n"):
            raise DppoError(f"{path}:{number}: not a row of metrics. Delete this line.")
    return rows


def sampled_metrics(run: Path) -> list[dict[str, float]]:
    """Return up to about MOST_ROWS rows of a run, evenly spread, with the first and the last; none without a file.

    Takes about as long, and as much memory, for a file of any size. Leaves out what is not a row or not a number.
    """
    rows: dict[tuple[float, float], dict[str, float]] = {}
    try:
        for _, row in (one for line in _sampled_lines(run / FILE) for one in parsed(line)):
            if row is not None:
                of = {key: value for key, value in row.items() if _is_number(value)}
                rows[of["iteration"], of.get("eval/iteration", -1)] = of  # an iteration may end several evaluations
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DppoError(f"{run / FILE}: {cause(error)} Pass the folder of a run.") from error
    return [rows[place] for place in sorted(rows)]


def _sampled_lines(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE:
            lines = file.read(WHOLE).splitlines(keepends=True)
            every = max(1, len(lines) // MOST_ROWS)
            yield from (*lines[::every], *lines[-2:])  # the last may be incomplete
            return
        yield file.readline(LONGEST)
        for number in range(MOST_ROWS):
            file.seek(size * number // MOST_ROWS)
            if not file.readline(LONGEST).endswith(b"\n"):
                break  # these are no rows of ours
            yield file.readline(LONGEST)
        file.seek(size - LONGEST)
        yield from file.read(LONGEST).splitlines(keepends=True)[1:][-2:]  # not all, which would be no even sample


def last_row(run: Path) -> dict[str, float]:
    """Return the last row of a run, reading only the end of the file; {} if there is none."""
    with suppress(OSError), os.fdopen(open_file(run / FILE), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST))
        return next((row for _, row in reversed(list(parsed(file.read(LONGEST)))) if row is not None), {})
    return {}


def parsed(data: bytes) -> Iterator[tuple[bytes, dict[str, float] | None]]:
    """Yield each line, and its row of metrics; None if the line is incomplete or not a row."""
    for line in data.splitlines(keepends=True):
        row = None
        with suppress(RecursionError, ValueError):
            content = json.loads(line) if line.endswith(b"\n") else None
            found = content if isinstance(content, dict) else {}
            if all(isinstance(one, int) and _is_number(one) for one in map(found.get, COUNTERS)):
                row = {key: math.nan if value is None else value for key, value in found.items()}
        yield line, row


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def plain(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a row as Python numbers; NaN and infinity, which JSON does not have, become None."""
    values = {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
