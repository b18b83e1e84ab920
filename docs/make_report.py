"""Make docs/report.png and docs/seeds.png, the pictures of RUNS.md (about four minutes; needs Chromium).

A run with four actors loses one, is stopped and resumed; then two settings are trained with five seeds each.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import dppo
from dppo.__main__ import main

DOCS = Path(__file__).resolve().parent
SIZES = {
    "num_actors": 4,
    "total_timesteps": 49_152,
    "env_kwargs": {"step_s": 0.001},
    "progress": "off",
}


class Trouble(dppo.Observer):
    """Kill the process of an actor once, and stop the run later."""

    def __init__(self, run: Path, kill_at: int, stop_at: int) -> None:
        self.run = run
        self.kill_at = kill_at
        self.stop_at = stop_at

    def on_iteration(self, row: dict[str, float]) -> bool:
        """Act at the two iterations."""
        if row["iteration"] == self.kill_at:
            log = (self.run / "logs" / "actor-1.log").read_text()
            processes = re.findall(r"process (\d+) began", log)
            os.kill(int(processes[-1]), signal.SIGKILL)
        return row["iteration"] == self.stop_at


def report(folder: Path) -> None:
    """Train the run of the report, and take its picture, light and dark side by side."""
    run = folder / "run"
    config = dppo.Config.preset("dppo/SlowCartPole-v0", run_dir=run, **SIZES)
    dppo.train(config, observers=[Trouble(run, config.iterations // 3, config.iterations * 2 // 3)])
    dppo.train(config, resume=run)
    assert main(["report", str(run)]) == 0
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from browser import Browser

    with Browser(folder / "profile") as browser:
        browser.open(run / "report.html")
        browser.screenshot(DOCS / "report.png", height=1330)


def seeds(folder: Path) -> None:
    """Train two settings with five seeds each, and draw them together."""
    command = [
        "train",
        "CartPole-v1",
        "--seeds",
        "1..5",
        "--total-timesteps",
        "30000",
        "--preset",
        "none",
    ]
    folders = []
    for rate in ("3e-4", "1e-3"):
        folders.append(str(folder / rate))
        assert main([*command, "--learning-rate", rate, "--run-dir", folders[-1]]) == 0
    assert main(["plot", *folders, "--out", str(DOCS / "seeds.png")]) == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for draw in (report, seeds):
            draw(Path(made))
    subprocess.run(["ls", "-l", DOCS / "report.png", DOCS / "seeds.png"], check=True)
