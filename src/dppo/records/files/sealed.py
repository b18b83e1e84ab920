"""A safetensors file with checksums over all of its bytes.

    length of the header | header: names, types and places of arrays; metadata, str -> str | arrays

The metadata holds the SHA-256 of the arrays, and the SHA-256 of everything before them, so that the header can be
checked without reading the arrays. This detects damage, not forgery.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as decode_safetensors
from safetensors.numpy import save as encode_safetensors

from dppo.config.memory import memory_of_this_machine
from dppo.errors import CheckpointError
from dppo.files import Irregular, is_deep, open_file
from dppo.records.files.disk import cause, remedy

SUFFIX = ".safetensors"
LENGTH = 8  # bytes, little-endian
MAX_HEADER_BYTES = 100 * 2**20  # the limit of safetensors
UNSEALED = "0" * 64
# Quotes are escaped inside metadata values, so neither pattern can match there.
SEAL_OF_HEADER = re.compile(rb'"header_sha256":"([0-9a-f]{64})"')
SEAL_OF_ARRAYS = re.compile(rb'"arrays_sha256":"([0-9a-f]{64})"')


def seal(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> tuple[bytes, memoryview]:
    # safetensors writes the bytes in memory order and ignores strides.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    seals = {"header_sha256": UNSEALED, "arrays_sha256": UNSEALED}
    data = encode_safetensors(ordered, {**metadata, **seals})
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    body = memoryview(data)[end:]
    header = _filled(SEAL_OF_ARRAYS, data[:end], hashlib.sha256(body).hexdigest())
    return _filled(SEAL_OF_HEADER, header, hashlib.sha256(header).hexdigest()), body


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a sealed file without reading its arrays; raise as `read_all`."""
    with _reading(path) as file:
        _, metadata = _read_header(path, file)
    return metadata


def read_all(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays and the metadata of a sealed file, after checking every byte. Runs no code.

    Raises a CheckpointError if the file is missing, not a regular file, or damaged.
    """
    with _reading(path) as file:
        header, metadata = _read_header(path, file)
        body = file.read()
    expected = metadata.get("arrays_sha256", "")
    actual = hashlib.sha256(body).hexdigest()
    if actual != expected:
        raise damaged(path, f"SHA-256 {expected[:12]}... of its arrays", f"{actual[:12]}...")
    try:
        return decode_safetensors(header + body), metadata
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError):
        raise damaged(path, "arrays in the safetensors format", "something else") from None


def damaged(path: Path, expected: str, actual: str) -> CheckpointError:
    """Return the error for a damaged file; its first line is the fact, its second the remedy."""
    return CheckpointError(
        f"{path}: expected {expected}, found {actual}.\n"
        f"The checkpoint is damaged. Pass the folder of its run to use the newest good one."
    )


def _filled(pattern: re.Pattern[bytes], header: bytes, digest: str) -> bytes:
    match = pattern.search(header)
    assert match is not None, "safetensors has changed the way in which it writes metadata"
    return header[: match.start(1)] + digest.encode() + header[match.end(1) :]


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file; turn errors of the disk into a CheckpointError."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = memory_of_this_machine()
            if memory is not None and size > memory:
                raise damaged(
                    path, f"at most the {memory:,} bytes of memory of this machine", f"{size:,}"
                )
            yield file
    except Irregular as error:
        raise damaged(path, "a regular file", error.kind) from None
    except FileNotFoundError:
        raise damaged(path, "a file", "nothing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {cause(error)}\n{remedy(error)}") from error


def _read_header(path: Path, file: BinaryIO) -> tuple[bytes, dict[str, str]]:
    """Return the bytes of the length and the header, after checking them, and the metadata in them."""
    start = file.read(LENGTH)
    length = int.from_bytes(start, "little")
    limit = min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size - LENGTH)
    if len(start) < LENGTH or length > limit:
        raise damaged(path, "a checkpoint", _looks_like(start + file.read(1)))
    header = start + file.read(length)
    seals = SEAL_OF_HEADER.findall(header)
    if len(seals) != 1:
        raise damaged(path, "a checkpoint", _looks_like(header))
    expected = seals[0].decode()
    actual = hashlib.sha256(_filled(SEAL_OF_HEADER, header, UNSEALED)).hexdigest()
    if actual != expected:
        raise damaged(path, f"SHA-256 {expected[:12]}... of its header", f"{actual[:12]}...")
    metadata: Any = parse_json(path, header[LENGTH:]).get("__metadata__")
    if not isinstance(metadata, dict) or {*map(type, metadata.values())} - {str}:
        raise damaged(path, "metadata", "something else")
    return header, metadata


def parse_json(path: Path, data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in `data`, which was read from `path`; raise a CheckpointError if it is something else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict) and not is_deep(value):
            return value
    raise damaged(path, "a JSON object", "something else")


def _looks_like(data: bytes) -> str:
    """Guess the kind of a file that is not a checkpoint, for the error message."""
    if data[:4] == b"PK\x03\x04":
        return "a zip archive (as torch.save writes), which is never loaded because it may run code"
    if data[:1] == b"\x80":
        return "a pickle, which is never loaded because it may run code"
    if not data:
        return "an empty file"
    length = int.from_bytes(data[:LENGTH], "little")
    if len(data) < LENGTH or (data[LENGTH:] == b"{" and length <= MAX_HEADER_BYTES):
        return "the beginning of one, which was cut short"
    return "something else"
