"""Save and find checkpoints. The last good one survives a crash at any moment; a damaged one is never used.

A checkpoint is one safetensors file, `iter_000123.safetensors`. Its arrays are named `model/policy.0.weight`; its
metadata holds the rest as JSON. Nothing is pickled, and loading runs no code.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo.errors import CheckpointError, CheckpointNotWritten
from dppo.files import check_kind, read_file
from dppo.log import logger
from dppo.records.comparison import BaselineComparison
from dppo.records.files import disk, sealed
from dppo.records.files.run_files import CHECKPOINTS, PARTS, check_run_files
from dppo.spaces.actions import Actions, actions_from_json

BEST = "best.json"
FORMAT = 2  # 1 was a folder of files
NAME = re.compile(r"iter_(\d+)\.safetensors")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")
PASS_A_RUN = "Pass the folder of a run, or one of its checkpoints."
REQUIRED = {"iteration": int, "global_step": int, "episodes": int, "config": dict, "model": dict}


@dataclass(frozen=True)
class Checkpoint:
    """The complete state from which a run can continue."""

    arrays: dict[str, dict[str, np.ndarray]]
    """Part ("model", "optimizer", "samplers") -> arrays by name, in no particular order."""
    state: dict[str, Any]
    """JSON values: iteration, global_step, config, versions ... Floats are restored exactly, NaN included."""

    @property
    def episode_lengths(self) -> list[np.ndarray]:
        """Steps of the open episode of each environment, an array for each sampler; 0: no step has been taken."""
        samplers = self.arrays.get("samplers", {})
        return [array for name, array in samplers.items() if name.endswith(".episode_lengths")]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The newest good checkpoint of a run."""

    path: Path
    checkpoint: Checkpoint
    damaged: tuple[str, ...] = ()
    """One line for each newer checkpoint that cannot be used: its path, the expected content, the content found."""
    newest: bool = True
    """False if the run has written a good checkpoint after this one."""
    comparison: BaselineComparison | None = None
    """The comparison of the run's best evaluation with a baseline, where `policies` has read it."""

    @property
    def actions(self) -> Actions | None:
        """The action space of the run; None if the checkpoint, which may be a stranger's, has no valid one."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            return actions_from_json(self.checkpoint.state["model"]["actions"])
        return None


class _Entry(NamedTuple):
    """A file in the folder of checkpoints, as described by its header."""

    path: Path
    iteration: int
    serial: int = -1
    """Position in the order of writing; -1 if the header cannot be read. The highest serial is the newest checkpoint:
    after a resume from an older checkpoint, newer files have lower iterations."""
    score: float | None = None
    problem: str = ""


class Keep(NamedTuple):
    """The checkpoints that stay in the folder, besides the best one and those that evaluations need."""

    newest: int
    every: int = 0
    """Iterations that are multiples of it are kept, too, unless the disk is full; 0: none."""

    def includes(self, iteration: int) -> bool:
        """Return whether the checkpoint of an iteration stays, however old it is."""
        return self.every > 0 and iteration % self.every == 0


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoints:
    """The checkpoints that evaluations need."""

    scores: Mapping[int, float | None]
    """Iteration -> score of the best checkpoint, or None for checkpoints that are being evaluated."""
    comparison: Mapping[str, Any] = field(default_factory=dict)
    """Values of a comparison with a baseline, which replace values of equal names in best.json."""


def file_name(iteration: int) -> str:
    return f"iter_{iteration:06d}{sealed.SUFFIX}"


def saved_iteration(path: Path) -> int | None:
    """Return the iteration in the file name of a checkpoint; None if it is not the name of a checkpoint."""
    match = NAME.fullmatch(path.name)
    if match is None:
        return None
    return int(match[1])


def save(
    folder: Path,
    iteration: int,
    checkpoint: Checkpoint,
    *,
    keep: Keep,
    score: float | None,
    evaluated: EvaluatedCheckpoints | None = None,
) -> Path:
    """Write a checkpoint, then delete older ones, except `keep` and the one with the best `score`.

    Waits for the disk: the file is flushed before it gets its name. Replaces a checkpoint of the same iteration, which
    exists if the run was resumed from an older one. Old files that cannot be deleted are logged, and stay.

    Args:
        keep: the checkpoints to keep however they score.
        score: score of this checkpoint; None if it has none.
        evaluated: the checkpoints that evaluations need, which are kept, too; their scores replace those in the files.

    Raises:
        CheckpointNotWritten: for example because the disk is full; earlier checkpoints are untouched.
    """
    path = folder / file_name(iteration)
    if score is not None:
        score = float(score) if math.isfinite(score) else None
    try:
        check_kind(folder, stat.S_IFDIR)
        disk.make_folder(folder)
        # Files of writers that were killed. No other writer is active, because run.lock excludes it.
        _remove(folder.glob(".tmp-*"))
        serial = 1 + max((entry.serial for entry in _scan(folder)), default=-1)
        disk.write_file(path, *_encode(checkpoint, iteration, serial, score))
    except OSError as error:
        raise CheckpointNotWritten(
            f"{path}: the checkpoint could not be written: {disk.cause(error)}\n"
            f"Earlier checkpoints are untouched. {disk.remedy(error)}"
        ) from error
    _rotate(folder, keep, evaluated)
    return path


def making_room(
    write: Callable[[], Path], folder: Path, evaluated: EvaluatedCheckpoints | None = None
) -> Path:
    """Write a checkpoint; while the disk is full, delete the oldest checkpoint and try again.

    The newest checkpoint, the best one and those in `evaluated` are never deleted.

    Args:
        write: calls `save` for `folder`, and returns the path of the new checkpoint.

    Raises:
        CheckpointNotWritten: for another reason than a full disk, or because nothing is left to delete.
    """
    while True:
        try:
            return write()
        except CheckpointNotWritten as error:
            is_full = getattr(error.__cause__, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            if not (is_full and _delete_oldest(folder, evaluated)):
                raise


def _delete_oldest(folder: Path, evaluated: EvaluatedCheckpoints | None) -> bool:
    """Delete the oldest checkpoint that need not be kept; return False if there is none. The newest is always kept."""
    stored = _stored(folder, evaluated)
    deletable = [entry.path for entry in stored.newest_first[1:] if entry not in stored.protected]
    if not deletable:
        return False
    oldest = deletable[-1]
    logger.warning("%s: deleted to make room for the last checkpoint on a full disk", oldest)
    disk.DISK.remove(oldest)
    return True


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in the file `path`; raise a CheckpointError if a byte of the file is wrong."""
    arrays, metadata = sealed.read_all(path)
    with _checking(path, metadata):
        parts: dict[str, dict[str, np.ndarray]]
        parts = {part: {} for part in json.loads(metadata["parts"])}
        for full_name, array in arrays.items():
            part, _, name = full_name.partition("/")
            parts[part][name] = array
        state = sealed.parse_json(path, metadata["state"])
        invalid = [name for name, kind in REQUIRED.items() if not _is_valid(state[name], kind)]
    if invalid:
        raise sealed.damaged(path, f"the {invalid[0]} of a run", repr(state[invalid[0]]))
    return Checkpoint(parts, state)


def _is_valid(value: Any, kind: type) -> bool:
    if type(value) is not kind:
        return False
    return not isinstance(value, int) or value >= 0


def find(path: Path) -> LoadedCheckpoint:
    """Return the newest good checkpoint of a run folder or a folder of checkpoints, or `path` itself if it is one.

    `path` may also be a best.json, which names a checkpoint beside it.

    Raises:
        CheckpointError: there is no good checkpoint, `path` is a damaged one, or the run folder contains links.
    """
    if not path.exists() and not path.suffix:
        with_suffix = path.with_name(path.name + sealed.SUFFIX)
        if with_suffix.is_file():
            path = with_suffix
    if path.name == BEST and path.is_file():
        path = _named_by(path)
    if path.suffix == sealed.SUFFIX and not path.is_dir():
        checkpoint = load(path)
        entries = _scan(path.parent)
        is_newest = bool(entries) and entries[0].path.name == path.name
        return LoadedCheckpoint(path, checkpoint, newest=is_newest)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. {PASS_A_RUN}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a checkpoint. {PASS_A_RUN}")
    check_run_files(path)
    folder = path / CHECKPOINTS
    if not folder.is_dir():
        folder = path
    return _newest_good(path, folder)


def best_json(folder: Path) -> dict[str, Any]:
    """Return best.json of a folder of checkpoints; {} without one. Raise CheckpointError if it is damaged."""
    path = folder / BEST
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = dict(
            json.loads(read_file(path, PARTS[f"{CHECKPOINTS}/{BEST}"].max_bytes))
        )
        return content
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}). Pass one of the checkpoints beside it."
        ) from None


def _named_by(best: Path) -> Path:
    """Return the checkpoint that a best.json names; raise CheckpointError if it names none."""
    content = best_json(best.parent)
    name = content.get("checkpoint")
    if isinstance(name, str) and NAME.fullmatch(name):
        return best.with_name(name)
    if content.get("deployed") == "baseline":
        raise CheckpointError(
            f"{best}: names no checkpoint, because the run deploys its baseline. Play the baseline, or pass one of the "
            f"checkpoints beside it to play a policy that was not shown to be better."
        )
    raise CheckpointError(f"{best}: names no checkpoint. Pass one of the checkpoints beside it.")


def _newest_good(path: Path, folder: Path) -> LoadedCheckpoint:
    """Return the newest good checkpoint in `folder`; `path` is the run, or that folder, for messages."""
    entries = _scan(folder)
    if not entries:
        runs = sorted(str(checkpoints.parent) for checkpoints in path.glob(f"*/{CHECKPOINTS}"))
        example = "a run that has one"
        if runs:
            example = f"a run: {', '.join(runs[-3:])}"
        raise CheckpointError(f"{path}: contains no checkpoint. Pass the folder of {example}.")
    problems = []
    for entry in entries:
        try:
            checkpoint = load(entry.path)
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
        else:
            later = [newer.problem for newer in entries if newer.iteration > entry.iteration]
            return LoadedCheckpoint(entry.path, checkpoint, (*problems, *filter(None, later)))
    raise CheckpointError(
        f"{path}: contains only damaged checkpoints ({len(entries)}). The newest: {problems[0]}\n"
        f"Restore the folder from a backup, or start the run again."
    )


def paths_in(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, good or damaged, in the order of their iterations."""
    if not has_any(run_dir):
        return []
    entries = _scan(run_dir / CHECKPOINTS)
    return [entry.path for entry in sorted(entries, key=lambda entry: entry.iteration)]


def has_any(run_dir: Path) -> bool:
    return (run_dir / CHECKPOINTS).is_dir() and bool(_scan(run_dir / CHECKPOINTS))


def _scan(folder: Path) -> list[_Entry]:
    """Return the checkpoints in `folder`, newest first; those with an unreadable header come last."""
    entries = []
    for path in folder.iterdir():
        iteration = saved_iteration(path)
        if iteration is not None:
            entries.append(_entry(path, iteration))
    return sorted(entries, key=lambda entry: (entry.serial, entry.iteration), reverse=True)


def _entry(path: Path, iteration: int) -> _Entry:
    try:
        metadata = sealed.read_metadata(path)
        with _checking(path, metadata):
            score = json.loads(metadata["score"])
            if score is not None:
                score = float(score)
            return _Entry(path, int(metadata["iteration"]), int(metadata["serial"]), score)
    except CheckpointError as error:
        return _Entry(path, iteration, problem=str(error).splitlines()[0])


@contextmanager
def _checking(path: Path, metadata: dict[str, str]) -> Iterator[None]:
    """Context that raises a CheckpointError if `metadata` does not describe a checkpoint, or reading it raises."""
    file_format = metadata.get("format", "")
    if file_format.isdecimal() and int(file_format) > FORMAT:
        raise CheckpointError(
            f"{path}: has format {file_format}, but this dppo reads format {FORMAT}.\nUse a newer dppo."
        )
    try:
        if file_format != str(FORMAT):
            raise ValueError
        yield
    except (KeyError, RecursionError, TypeError, ValueError):
        raise sealed.damaged(path, "a dppo checkpoint", "another safetensors file") from None


def _encode(
    checkpoint: Checkpoint, iteration: int, serial: int, score: float | None
) -> tuple[bytes, memoryview]:
    arrays = {}
    for part, part_arrays in checkpoint.arrays.items():
        for name, array in part_arrays.items():
            assert array.dtype.name in DTYPES, (
                f"{part}/{name} has dtype {array.dtype}, which cannot be stored"
            )
            arrays[f"{part}/{name}"] = array
    metadata = {
        "format": str(FORMAT),
        "iteration": str(iteration),
        "serial": str(serial),
        "score": json.dumps(score),
        "parts": json.dumps(list(checkpoint.arrays)),
        "state": json.dumps(checkpoint.state),
    }
    return sealed.seal(arrays, metadata)


class _Stored(NamedTuple):
    """The checkpoints in a folder whose headers can be read."""

    newest_first: list[_Entry]
    protected: list[_Entry]
    """Checkpoints that are kept at any age: the best one, and those that evaluations need."""
    best: _Entry | None


def _stored(folder: Path, evaluated: EvaluatedCheckpoints | None) -> _Stored:
    entries = [entry for entry in _scan(folder) if entry.serial >= 0]
    needed: Mapping[int, float | None] = {}
    if evaluated is not None:
        needed = evaluated.scores
        entries = [entry._replace(score=needed.get(entry.iteration)) for entry in entries]
    scored = [entry for entry in entries if entry.score is not None]
    best = max(scored, key=lambda entry: (entry.score, entry.serial), default=None)
    protected = [entry for entry in entries if entry is best or entry.iteration in needed]
    return _Stored(entries, protected, best)


def _rotate(folder: Path, keep: Keep, evaluated: EvaluatedCheckpoints | None) -> None:
    """Delete the checkpoints that `keep` and evaluations do not need; skip files that cannot be read or deleted."""
    with _warning_once(folder):
        stored = _stored(folder, evaluated)
        outdated = [
            entry for entry in stored.newest_first[keep.newest :] if entry not in stored.protected
        ]
        _remove(entry.path for entry in outdated if not keep.includes(entry.iteration))
        if stored.best is not None:
            _write_best(folder, stored.best, evaluated or EvaluatedCheckpoints({}))


def _write_best(folder: Path, best: _Entry, evaluated: EvaluatedCheckpoints) -> None:
    """Write the name of the best checkpoint to best.json.

    It is for the user; dppo itself reads the scores in the files, and best.json only to load what is deployed or named
    by its path.
    """
    path = folder / BEST
    content = {"checkpoint": best.path.name, "iteration": best.iteration, "score": best.score}
    content |= evaluated.comparison
    data = json.dumps(content).encode() + b"\n"
    with _warning_once(path):
        if not os.path.lexists(path) or read_file(path) != data:
            disk.write_file(path, data)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with _warning_once(path):
            disk.DISK.remove(path)


_warned: set[Path] = set()


@contextmanager
def _warning_once(path: Path) -> Iterator[None]:
    """Context that logs an OSError instead of raising it, once for each path."""
    try:
        yield
    except OSError as error:
        if path not in _warned:
            logger.warning(
                "%s: cannot be deleted or replaced: %s It is left as it is; saving continues.",
                path,
                disk.cause(error),
            )
        _warned.add(path)
