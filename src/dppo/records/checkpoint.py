"""Checkpoints: whatever moment the power goes, the last good one is there, and a bad one is never used.

A checkpoint is a sealed folder `iter_000123/{*.safetensors, state.json, manifest.json}`. Arrays are
safetensors and the rest is JSON: nothing is pickled, and loading runs no code.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as decode_safetensors
from safetensors.numpy import save as encode_safetensors

from dppo.errors import CheckpointError
from dppo.records import sealed

FOLDER = "checkpoints"  # within a run's folder
STATE, ARRAYS = "state.json", ".safetensors"
NAME = re.compile(r"iter_(\d+)(\.replaced)?")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on."""

    arrays: dict[str, dict[str, np.ndarray]]
    """File stem ("model", "optimizer", "samplers") -> named arrays, whose order is not kept."""
    state: dict[str, Any]
    """JSON values: iteration, global_step, config, versions ... Floats come back exactly, NaN included."""


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint, and what was passed over to get there."""

    path: Path
    damaged: tuple[str, ...] = ()
    """One line for each newer checkpoint that cannot be used: file, expected, found."""


@dataclass(frozen=True)
class _Entry:
    """A checkpoint in its folder, as far as its manifest tells."""

    path: Path
    iteration: int
    serial: int = -1
    """Order of writing, which tells the newest: a run that is resumed further back writes newer checkpoints
    of lower iterations. -1: the manifest cannot be read."""
    score: float | None = None
    problem: str = ""

    @property
    def superseded(self) -> bool:
        """Set aside for a new one of the same iteration, which is in place."""
        return self.path.suffix == ".replaced" and self.path.with_suffix("").exists()


def save(folder: Path, iteration: int, checkpoint: Checkpoint, *, keep: int, score: float | None) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the best by `score`.

    Waits for the disk: every file is flushed before the checkpoint gets its name. One of the same iteration,
    left by a run that is resumed further back, is replaced.

    Raises:
        CheckpointError: the disk is full, say. The checkpoints from before are as good as they were.
    """
    files = {f"{stem}{ARRAYS}": _encode(stem, arrays) for stem, arrays in checkpoint.arrays.items()}
    files[STATE] = json.dumps(checkpoint.state, indent=1).encode()
    path = folder / f"iter_{iteration:06d}"
    score = float(score) if score is not None and math.isfinite(score) else None
    try:
        sealed.make_folder(folder)
        sealed.clear_abandoned(folder)
        serial = 1 + max((entry.serial for entry in _scan(folder)), default=-1)
        sealed.write_folder(path, files, iteration=iteration, serial=serial, score=score)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the checkpoint could not be written: {sealed.cause(error)}\n"
            f"Those from before are untouched. {sealed.remedy(error)}"
        ) from error
    try:
        _rotate(folder, keep)
    except OSError as error:
        raise CheckpointError(
            f"{path}: written, but older checkpoints could not be tidied up: {sealed.cause(error)}\n"
            f"{sealed.remedy(error)}"
        ) from error
    return path


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, every byte checked before use.

    Raises:
        CheckpointError: file, expected, found; what to do.
    """
    contents = sealed.read_folder(path)
    if STATE not in contents:
        raise sealed.damaged(path / STATE, "a file", "nothing")
    state = sealed.parse_json(path / STATE, contents.pop(STATE))
    arrays = {name.removesuffix(ARRAYS): _decode(path / name, data) for name, data in contents.items()}
    return Checkpoint(arrays, state)


def find(path: Path) -> Found:
    """The newest good checkpoint of a run's folder or its checkpoints folder; or `path`, if it is one itself.

    Raises:
        CheckpointError: nothing there, nothing good there, or `path` is itself a damaged checkpoint.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {what}. Give the folder of a run, or one of its checkpoints.")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if folder is path and (NAME.fullmatch(path.resolve().name) or (path / sealed.MANIFEST).exists()):
        load(path)
        return Found(path)
    entries = _scan(folder)
    if not entries:
        raise CheckpointError(f"{path}: holds no checkpoint. Give the folder of a run that has written one.")
    problems = []
    for entry in entries:
        try:
            load(entry.path)
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
        else:
            later = [other.problem for other in entries if other.iteration > entry.iteration]
            return Found(entry.path, (*problems, *filter(None, later)))
    raise CheckpointError(
        f"{path}: none of its {len(entries)} checkpoints is good. The newest: {problems[0]}\n"
        f"Restore the folder from a backup, or start the run afresh."
    )


def _scan(folder: Path) -> list[_Entry]:
    """The checkpoints in `folder`, newest first; those whose manifest cannot be read last."""
    entries = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        try:
            manifest = sealed.read_manifest(path)
        except CheckpointError as error:
            entries.append(_Entry(path, int(match[1]), problem=str(error).splitlines()[0]))
        else:
            entries.append(_Entry(path, manifest.iteration, manifest.serial, manifest.score))
    return sorted(entries, key=lambda entry: (entry.serial, entry.iteration), reverse=True)


def _rotate(folder: Path, keep: int) -> None:
    """Keep the newest and the best. One whose manifest cannot be read is left for a person to look at."""
    entries = _scan(folder)
    current = [entry for entry in entries if entry.serial >= 0 and not entry.superseded]
    scored = [entry for entry in current if entry.score is not None]
    best = max(scored, key=lambda entry: (entry.score, entry.serial), default=None)
    if best is not None:
        _name_best(folder / "best.json", best)
    outdated = [entry for entry in current[keep:] if entry is not best]
    for entry in outdated + [entry for entry in entries if entry.superseded]:
        sealed.delete(entry.path)


def _name_best(path: Path, best: _Entry) -> None:
    """Say for people which is best; the scores themselves are in the manifests."""
    content = {"checkpoint": best.path.name, "iteration": best.iteration, "score": best.score}
    data = json.dumps(content).encode() + b"\n"
    with suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return
    sealed.write_file(path, data)


def _encode(stem: str, arrays: dict[str, np.ndarray]) -> bytes:
    assert sealed.FILE_NAME.fullmatch(stem + ARRAYS), f"{stem!r} cannot name a file of arrays"
    for name, array in arrays.items():
        assert array.dtype.name in DTYPES, f"{stem}: {name} is of dtype {array.dtype}, which cannot be stored"
    # safetensors takes the bytes as they lie, whatever the strides say.
    return encode_safetensors({name: np.asarray(array, order="C") for name, array in arrays.items()})


def _decode(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        return decode_safetensors(data)
    except (SafetensorError, KeyError, ValueError):
        raise sealed.damaged(path, "safetensors", sealed.looks_like(data)) from None
