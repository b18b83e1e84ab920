"""Measure many actors on few cores: 64 actors whose simulator waits 10 ms a step, and the CPU time they use.

    python benchmarks/many_actors.py
    python benchmarks/many_actors.py --actors 16 --iterations 20
    python benchmarks/many_actors.py --actors 4 --samplers 64             64 simulators in the threads of 4 actors

Runs the command, watches its processes in /proc, and prints env steps per second, the parts of an iteration, the time
to the first step, the memory of each kind of process, and their CPU seconds over the window after the warm-up. The
main thread of an actor, which steps and acts, is counted apart from Ray's threads in the same process. Run it alone.

Two bounds: 5,940 env steps/s, where a step takes 10 ms and an update 50 ms; and that of the window, where an update
takes as long as it did, and a step as long as that of bare threads that sleep, as many in as many processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import descendants, ours_environment, stop

WARM_UP = 4  # iterations before the window
STEPS = 64  # of a segment
PARTS = (
    "iteration",
    "collect",
    "slowest_actor",
    "env",
    "act",
    "wait",
    "transfer",
    "update",
    "other",
)
BOUND = 5_940.0  # env steps/s of 64 samplers, T=64, M=512, if a step took 10 ms and Ray no time
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, default=64)
    parser.add_argument(
        "--samplers", type=int, help="as many as actors by default; more are stepped by threads"
    )
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.01)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samplers = wanted.samplers or wanted.actors
        result = measured(wanted.actors, samplers, wanted.iterations, wanted.step_s, Path(folder))
    slept_s = STEPS * step_of_bare_threads(wanted.actors, samplers // wanted.actors, wanted.step_s)
    result["bare_step_ms"] = 1e3 * slept_s / STEPS
    result["bound_of_bare_threads"] = (
        STEPS * samplers / (slept_s + 1e-3 * result["parts_ms"]["update"])
    )
    if samplers == 64:
        result["percent_of_bound"] = 100 * result["steps_per_s"] / BOUND
    print(json.dumps(result, indent=2))


def measured(
    actors: int, samplers: int, iterations: int, step_s: float, folder: Path
) -> dict[str, Any]:
    """Run the command in `folder`, and return its rates, memory and CPU time."""
    batch = STEPS * samplers
    words = [
        *(
            "train",
            "dppo/SlowCartPole-v0",
            "--preset",
            "fast",
            "--progress",
            "off",
            "--run-dir",
            "run",
        ),
        *("--env-kwargs", json.dumps({"step_s": step_s})),
        *("--num-actors", str(actors), "--num-samplers", str(samplers), "--num-steps", str(STEPS)),
        *(("--env-threads",) if samplers > actors else ()),
        *(
            "--minibatch-size",
            str(min(512, batch)),
            "--total-timesteps",
            str(batch * (WARM_UP + iterations)),
        ),
    ]
    began = time.monotonic()
    log = (folder / "log").open("w+")
    child = subprocess.Popen(
        [sys.executable, "-m", "dppo", *words], cwd=folder, env=ours_environment(), stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    metrics, first_s = folder / "run" / "metrics.jsonl", None
    before: dict[str, float] | None = None
    memory: dict[str, Any] = {}
    try:
        while child.poll() is None:
            rows = metrics.read_text().splitlines() if metrics.exists() else []
            if rows and first_s is None:
                row = json.loads(rows[0])
                first_s = time.monotonic() - began - row["time/training_s"]
            if len(rows) >= WARM_UP and before is None:
                before, since = cpu_seconds(child.pid), len(rows)
                memory = {name: memory_mb(child.pid, name) for name in ("Pss", "Rss")}
            if len(rows) >= WARM_UP + iterations - 1 and before is not None:
                after, until = cpu_seconds(child.pid), len(rows)
                break
            time.sleep(0.1)
        else:
            raise SystemExit((folder / "log").read_text())
    finally:
        stop(child)
        log.close()
    window = [json.loads(line) for line in metrics.read_text().splitlines()[since - 1 : until]]
    first, last = window[0], window[-1]
    window_s = last["time/wall_s"] - first["time/wall_s"]
    steps = last["global_step"] - first["global_step"]
    used = {name: after[name] - before[name] for name in after}
    return {
        "actors": actors,
        "samplers": samplers,
        "steps_per_s": steps / window_s,
        "first_step_s": first_s,
        "window_s": window_s,
        "parts_ms": {
            part: 1e3 * fmean(row[f"perf/{part}_s"] for row in window[1:]) for part in PARTS
        },
        "pss_mb": sum(memory["Pss"].values()),
        "rss_mb": sum(memory["Rss"].values()),
        "pss_mb_of": memory["Pss"],
        "cpu_s": used,
        "cores_used": sum(used.values()) / window_s,
        "actor_cpu_us_per_step": 1e6 * used.get("actors", 0.0) / steps,
        "load_1_min": os.getloadavg()[0],
    }


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU seconds used so far, by kind of process."""
    seconds: dict[str, float] = defaultdict(float)
    for pid in [root, *(pid for pid, _, _ in descendants(root))]:
        with contextlib.suppress(OSError):
            name = kind(pid, root)
            for task in Path(f"/proc/{pid}/task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                beside = name == "actors" and task.name != str(pid)
                seconds["actors' other threads" if beside else name] += (
                    int(fields[11]) + int(fields[12])
                ) / TICKS_PER_S
    return seconds


def memory_mb(root: int, name: str) -> dict[str, float]:
    """Return the memory in MB, by kind of process; Pss counts a shared page once."""
    total: dict[str, float] = defaultdict(float)
    for pid in [root, *(pid for pid, _, _ in descendants(root))]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    total[kind(pid, root)] += int(line.split()[1]) / 1024
    return total


def step_of_bare_threads(processes: int, threads: int, step_s: float) -> float:
    """Return the seconds of a step of the slowest of all threads, which do nothing but sleep: the median of 5 tries."""
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        tries = [
            max(pool.map(_slowest, [(threads, step_s)] * processes, chunksize=1)) for _ in range(5)
        ]
    return sorted(tries)[2]


def _slowest(of: tuple[int, float]) -> float:
    number, step_s = of
    took: list[float] = []

    def sleep() -> None:
        began = time.perf_counter()
        for _ in range(STEPS):
            time.sleep(step_s)
        took.append((time.perf_counter() - began) / STEPS)

    threads = [threading.Thread(target=sleep) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took)


def kind(pid: int, root: int) -> str:
    """Return the kind of a process: the driver, an actor, or one of Ray's own."""
    if pid == root:
        return "driver"
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    for word, name in (
        ("ray::PPOActor", "actors"),
        ("gcs_server", "gcs"),
        ("raylet/raylet", "raylet"),
    ):
        if word in line:
            return name
    return "ray's helpers"


if __name__ == "__main__":
    main()
