"""Nodes of Ray on this machine, and programs of this folder that change them during a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders import make_config
from commandline import QUICK_CHECKS, Command
from recorder import Notes

import dppo

STORE = 80 * 2**20  # bytes of the object store of a node
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
SIZES = {
    "env_id": "CartPole-v1",
    "num_samplers": 4,
    "num_steps": 16,
    "update_epochs": 1,
    "hidden_sizes": (8,),
    "anneal_lr": False,
    "progress": "off",
}


def report_of(program: str, folder: Path, **env: str) -> Any:
    """Run a program of this folder in a process of its own, and return what it reports.

    A test that calls this has a timeout above the 400 s that it may take.
    """
    words = (str(Path(__file__).with_name(program)), str(folder))
    with Command([], folder, program=words, **QUICK_CHECKS, **env) as command:
        assert command.wait(400) == 0
        [line] = [line for line in command.out.splitlines() if line.startswith("report ")]
        return json.loads(line.removeprefix("report "))


def print_report(report: dict[str, Any]) -> None:
    print("report", json.dumps(report), flush=True)


def followed(
    folder: Path, address: str, observer: dppo.Observer, notes: Notes, **changes: Any
) -> dict[str, Any]:
    """Train with as many actors as there is room for until the observer ends the run; report what it logged.

    `same`: whether a run of as many iterations in this process has the same weights.
    """
    settings = SIZES | {"total_timesteps": 64 * 10_000} | changes
    place = {"run_dir": folder / "followed", "num_actors": "auto", "address": address}
    with notes:
        result = dppo.train(make_config(settings | place), observers=[observer])
    steps = 64 * result.iterations
    whole = settings | {"run_dir": folder / "whole", "total_timesteps": steps}
    same = dppo.train(make_config(whole)).weights_sha256 == result.weights_sha256
    return {"same": same, "notes": notes.texts, "incidents": result.incidents}
