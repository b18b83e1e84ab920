"""Stored files of a run: agreement with its newest checkpoint, and the iterations between checkpoints."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dppo.config.groups import flattened
from dppo.config.reading import read_settings, versions_in
from dppo.errors import ConfigError
from dppo.numerics.fingerprint import Fingerprint
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import LoadedCheckpoint
from dppo.records.files.run_files import CONFIG, read_run_file
from dppo.records.metrics.reading import parsed
from dppo.tools.diff import differing


@dataclass(frozen=True)
class Stretch:
    """The iterations from one checkpoint to the next one."""

    start: Path
    end: Path
    first: int
    """The first iteration behind `start`."""
    last: int
    """The iteration of `end`."""
    open_steps: int
    """Env steps of the open episodes of `start`, which are replayed."""

    @property
    def iterations(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"iterations {self.first:,} to {self.last:,}"


def stretches_of(run: Path) -> list[Stretch]:
    """Return the stretches between the checkpoints of a run, in order; raise CheckpointError if one is damaged."""
    return [
        Stretch(start, end, iteration + 1, last, open_steps)
        for (start, iteration, open_steps), (end, last, _) in pairwise(_places(run))
    ]


def _places(run: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each checkpoint, its iteration, and the env steps of its open episodes."""
    for path in checkpoints.paths_in(run):
        checkpoint = checkpoints.load(path)
        open_steps = sum(int(lengths.sum()) for lengths in checkpoint.episode_lengths)
        yield path, checkpoint.state["iteration"], open_steps


def changed_files(run: Path, newest: LoadedCheckpoint) -> Iterator[str]:
    """Yield each difference of config.yaml and the files with rows from the newest checkpoint."""
    state = newest.checkpoint.state
    try:
        settings = read_settings(run / CONFIG, trusted=False)
        versions = versions_in(run / CONFIG)
    except ConfigError as error:
        yield str(error)
        return
    numerics = Fingerprint(**state["numerics"]["own"]).summary() if "numerics" in state else {}
    in_checkpoint = flattened(state["config"])
    for values, stored in ((settings, in_checkpoint), (versions, state["versions"] | numerics)):
        for name in sorted(differing(values, stored)):
            in_file = f"{CONFIG} has {name}: {values.get(name)}"
            yield f"{in_file}, and the newest checkpoint {stored.get(name)}"
    for name, summed in state.get("rows", {}).items():
        yield from _changed_rows(run / name, **summed)


def _changed_rows(path: Path, bytes: int, sha256: str) -> Iterator[str]:
    """Yield what was changed in a file of which the newest checkpoint knows the first `bytes`."""
    try:
        data = read_run_file(path)
    except OSError as error:
        yield f"{path.name} cannot be read: {error.strerror}"
        return
    if hashlib.sha256(data[:bytes]).hexdigest() != sha256:
        yield f"{path.name} was changed: the newest checkpoint has another SHA-256 of its first {bytes:,} bytes"
    # Rows of earlier iterations than the checkpoint's may follow: on a full disk, they waited in memory for its end.
    iterations = [row["iteration"] for _, row in parsed(data[:bytes]) if row is not None]
    last_known = max(iterations, default=0)
    for line, row in parsed(data[bytes:]):
        is_later = row is not None and (row["iteration"] > last_known or "eval/iteration" in row)
        if line.endswith(b"\n") and not is_later:
            yield f"{path.name} was changed: lines were added behind the rows of the newest checkpoint"
            return
