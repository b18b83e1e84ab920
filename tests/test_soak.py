"""The soaks for a minute: faults of every kind, and of ranks; the weights of one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def soaked(folder: Path, *words: str) -> Any:
    """Return the report of a soak of a minute."""
    path = folder / "found.json"
    command = [sys.executable, str(SOAK), *words, "--minutes", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["equal_weights"]
    return report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_faults_of_every_kind_changes_no_weight(tmp_path: Path) -> None:
    report = soaked(tmp_path)
    assert report["iterations"] > 0
    assert report["events"]["driver SIGKILL"] == 1
    assert report["events"]["GCS frozen"] == 1
    assert report["samples"][-1]["orphans"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("mpicc") is None, reason="needs Open MPI")
def test_a_minute_of_faults_of_ranks_changes_no_weight_and_leaves_nothing(tmp_path: Path) -> None:
    report = soaked(tmp_path, "--ranks")
    assert report["faults"] > 5
    assert not any(report["left"].values())
