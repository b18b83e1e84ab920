"""The files of a run folder, which may be a stranger's: what each part must be, and how many bytes of it are read."""

import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dppo.errors import CheckpointError
from dppo.files import MAX_SETTINGS_BYTES, Irregular, check_kind, read_file
from dppo.records.files.disk import REMEDY

CONFIG = "config.yaml"
LOCK = "run.lock"
METRICS = "metrics.jsonl"
TRACE = "trace.jsonl"
EPISODES = "episodes.jsonl"
BASELINE = "baseline.json"
CERTIFICATE = "certificate.json"
CHECKPOINTS = "checkpoints"
INCIDENT = "incident.json"
ROWS = (METRICS, TRACE, EPISODES)
"""Files with a line for each iteration or episode."""

FILE = stat.S_IFREG
FOLDER = stat.S_IFDIR


class PartRule(NamedTuple):
    """Kind and largest size of a part of a run folder."""

    kind: int
    max_bytes: int = 0
    """Largest size of a file that is read as a whole. The memory of the machine limits checkpoints, see `sealed`."""


PARTS = {
    LOCK: PartRule(FILE, 2**12),
    CONFIG: PartRule(FILE, MAX_SETTINGS_BYTES),
    METRICS: PartRule(FILE, 2**31),
    TRACE: PartRule(FILE, 2**30),
    EPISODES: PartRule(FILE, 2**28),
    BASELINE: PartRule(FILE, 2**24),
    CERTIFICATE: PartRule(FILE, 2**20),
    "trackers.json": PartRule(FILE, 2**16),
    "learning_curve.png": PartRule(FILE),
    "events.out.tfevents.*": PartRule(FILE),
    CHECKPOINTS: PartRule(FOLDER),
    f"{CHECKPOINTS}/best.json": PartRule(FILE, 2**16),
    "logs": PartRule(FOLDER),
    "logs/*": PartRule(FILE, 2**22),
    "incidents": PartRule(FOLDER),
    "states": PartRule(FOLDER),
    "states/*": PartRule(FOLDER),
}
"""Files and folders by path, which may be a pattern. All are checked before a run folder is used."""
MAX_READ_INCIDENTS = 100  # folders of incidents
INCIDENT_PART = PartRule(FILE, 2**24)
"""`incident.json` in a folder of `incidents`, which is checked when it is read."""


def check_run_files(run_dir: Path) -> None:
    """Raise a CheckpointError if a part that a run reads or writes is a link, a pipe or the like."""
    try:
        for name, part in PARTS.items():
            paths = run_dir.glob(name) if "*" in name else [run_dir / name]
            for path in paths:
                check_kind(path, part.kind)
    except Irregular as error:
        raise refusal(error) from None


def refusal(error: Irregular) -> CheckpointError:
    return CheckpointError(f"{error.filename}: {error.strerror}. {REMEDY}")


def read_run_file(path: Path) -> bytes:
    """Return the content of a file of the table; raise an OSError if it is too large or not a regular file."""
    part = INCIDENT_PART
    if path.name != INCIDENT:
        part = next(part for name, part in PARTS.items() if path.match(name))
    return read_file(path, part.max_bytes)


def json_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the table; {} if there is none, or the file is damaged."""
    with suppress(OSError, RecursionError, TypeError, ValueError):
        return dict(json.loads(read_run_file(path)))
    return {}


def stored_incidents(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of each `incident.json` of a run, with the name of its folder as `number`."""
    for folder in sorted(run_dir.glob("incidents/*"))[:MAX_READ_INCIDENTS]:
        with suppress(OSError):
            check_kind(folder, stat.S_IFDIR)
            incident = json_in(folder / INCIDENT)
            if incident:
                yield {**incident, "number": folder.name}
