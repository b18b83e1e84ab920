"""Time from the command to the first env step, and memory of each worker."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_envs import read_stamp
from measure import (
    HERE,
    MeasurementError,
    descendants,
    ours_environment,
    sb3_python,
    stop,
    unique_mb,
)

DEADLINE_S = 120.0
SETTLE_S = 6.0  # after the first step, before memory is read: a few iterations
STEP_S = 0.01


def measure_startup(side: str) -> dict[str, Any]:
    """Start one training of 8 workers, measure its first env step and its memory, and end it.

    Raises:
        MeasurementError: it ended early, or made no step within two minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "first_step"
        env = {"env_id": "CartPole-v1", "step_s": STEP_S, "stamp": str(stamp)}
        command = _ours(env, folder) if side == "ours" else _sb3(env)
        with (Path(folder) / "errors").open("w+") as errors:
            began = time.time()  # the time of day, because another process writes the stamp
            child = subprocess.Popen(
                command,
                env=ours_environment(),
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                first = _wait_for_stamp(child, stamp, errors)
                time.sleep(SETTLE_S)
                return {"first_step_s": first - began, **_memory(child.pid, side)}
            finally:
                stop(child)


def _ours(env: dict[str, Any], folder: str) -> list[str]:
    flags = [
        "--num-actors",
        "8",
        "--num-steps",
        "64",
        "--total-timesteps",
        "100000",
        "--run-dir",
        f"{folder}/run",
    ]
    kwargs = ["--env-kwargs", json.dumps(env)]
    return [sys.executable, "-m", "dppo", "train", "bench_envs:make", *flags, *kwargs]


def _sb3(env: dict[str, Any]) -> list[str]:
    work = {
        "env": env,
        "workers": 8,
        "num_envs": 8,
        "num_steps": 64,
        "update_epochs": 4,
        "minibatch_size": 128,
        "total_timesteps": 100_000,
        "threads": 1,
        "budget_s": DEADLINE_S,
        "seed": 1,
    }
    return [sb3_python(), str(HERE / "sb3_ppo.py"), json.dumps(work)]


def _wait_for_stamp(child: subprocess.Popen[Any], stamp: Path, errors: Any) -> float:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        first = read_stamp(stamp)
        if first is not None:
            return first
        if child.poll() is not None:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()] or ["no output"]
            raise MeasurementError(f"exit code {child.returncode}: {lines[-1]}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.02)
    raise MeasurementError(f"no env step within {DEADLINE_S:.0f} s")


def _memory(pid: int, side: str) -> dict[str, Any]:
    """Return the private memory, in MB, of a worker and of all processes together."""
    found = list(descendants(pid))
    if side == "ours":
        workers = [one for one, _, command in found if command.startswith("ray::PPOActor")]
    else:  # workers are children of the fork server
        workers = [one for one, depth, _ in found if depth >= 2]
    sizes = [unique_mb(one) for one in workers]
    if not sizes:
        raise MeasurementError(f"no worker found among its {len(found)} processes")
    return {
        "workers": len(workers),
        "mb_per_worker": statistics.fmean(sizes),
        "mb_in_all": unique_mb(pid) + sum(unique_mb(one) for one, _, _ in found),
    }
