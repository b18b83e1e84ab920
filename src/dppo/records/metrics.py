"""The figures of a run: metrics.jsonl, one row an iteration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.records.disk import cause

FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl (or of the run in the folder `path`), with null as NaN.

    A last line that a kill has torn is left out.

    Raises:
        DppoError: no such file, or a line that is no row.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DppoError(f"{path}: {cause(error)} Give the folder of a run.") from error
    rows = []
    for number, (line, row) in enumerate(parsed(data), 1):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            raise DppoError(f"{path}:{number}: is not a row of metrics. Delete this line.")
    return rows


def parsed(data: bytes) -> Iterator[tuple[bytes, dict[str, float] | None]]:
    """Yield each line, and its row if it is whole and one."""
    for line in data.splitlines(keepends=True):
        row = None
        with suppress(ValueError):
            content = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(content, dict) and isinstance(content.get("iteration"), int):
                row = {key: math.nan if value is None else value for key, value in content.items()}
        yield line, row


def plain(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a row without NumPy's types; NaN and infinity become None, for JSON knows neither."""
    values = {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
