"""Commands that play a run again in a single process, which a step that the run gave up would end."""

from __future__ import annotations

import json
from pathlib import Path

from commandline import run

from dppo.records.files import checkpoint as checkpoints


def check_that_it_is_left_out_in_one_process(run_dir: Path) -> None:
    """Verify the run and replay what it gave up; a process that entered the step would be killed."""
    [start, *_, end] = checkpoints.paths_in(run_dir)
    assert "given_up" not in checkpoints.load(start).state
    steps = checkpoints.load(end).state["given_up"]
    assert (0, 2, 3) in {tuple(step[2:]) for step in steps}

    assert "equal" in printed_by(run_dir, "verify", run_dir, "--num-actors", "0")

    incidents = sorted((run_dir / "incidents").glob("*/incident.json"))
    [given_up, *_] = [file for file in incidents if json.loads(file.read_text()).get("error")]
    words = "is the same until step 3, which the run gave up"
    assert words in printed_by(run_dir, "replay", given_up.parent)


def printed_by(folder: Path, *words: object) -> str:
    """Run a command that trusts the run; return what it printed."""
    exit_code, out, err = run([*map(str, words), "--trust"], folder)
    assert exit_code == 0, out + err
    return out
