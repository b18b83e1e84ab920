"""The soaks for a minute: faults of every kind, and of ranks; the weights of one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_faults_of_every_kind_changes_no_weight(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--minutes", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["equal_weights"]
    assert report["iterations"] > 0
    assert report["events"]["driver SIGKILL"] == 1
    assert report["events"]["GCS frozen"] == 1
    assert report["samples"][-1]["orphans"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("mpicc") is None, reason="needs Open MPI")
def test_a_minute_of_faults_of_ranks_changes_no_weight_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = [sys.executable, str(SOAK), "--ranks", "--minutes", "1", "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["equal_weights"]
    assert report["faults"] > 5
    assert not any(report["left"].values())
