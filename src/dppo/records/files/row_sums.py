"""RowSums: checksums of the files with a row for each iteration. Checkpoints hold them; `dppo verify` checks them."""

import hashlib
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dppo.files import open_file
from dppo.records.files.run_files import METRICS, TRACE

CHUNK_BYTES = 2**20


class RowSums:
    """Sums up the rows in the files of a run; each call reads only what was added since the last one."""

    def __init__(self, run_dir: Path) -> None:
        self._paths = [run_dir / name for name in (METRICS, TRACE)]
        self._digests = {path: hashlib.sha256() for path in self._paths}
        self._sizes = dict.fromkeys(self._paths, 0)

    def now(self) -> dict[str, dict[str, Any]]:
        """Return bytes and SHA-256 of each file that the run writes, as JSON values by the name of the file."""
        sums = {}
        for path in self._paths:
            with suppress(OSError):  # the run has no such file, or it cannot be read at the moment
                self._read_on(path)
                sha256 = self._digests[path].hexdigest()
                sums[path.name] = {"bytes": self._sizes[path], "sha256": sha256}
        return sums

    def _read_on(self, path: Path) -> None:
        with os.fdopen(open_file(path), "rb") as file:
            file.seek(self._sizes[path])
            for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                self._digests[path].update(chunk)
                self._sizes[path] += len(chunk)
