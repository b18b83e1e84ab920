"""The soak for a minute: faults of every kind, and the weights of one process."""

from __future__ import annotations

import json
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
