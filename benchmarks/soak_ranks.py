"""The faults of `soak.py --ranks`: processes of solvers are killed, stopped and made to crash, at random.

Four heated bars (`examples/solvers/heat.c`) of two ranks of Open MPI, two actors, one machine. Every few seconds, one
process is chosen: a rank, the guard around it, the mpirun above, the keeper of all three, or an actor. It gets SIGKILL,
SIGSEGV or SIGSTOP. At the end, the weights are compared with those of a run in one process without any of that, and
what is left of the processes is counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import dppo

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "solvers" / "heat.c"
INCLUDE = Path(dppo.__file__).parent / "remote"
FAULT_S = 1.5  # from one fault to the next, on average
# age of processes that are spared in most cases: a solver has to come to life now and then
YOUNG_S = 4.0
END_S = 10.0  # in which all processes of the run must have ended
# how often each kind is chosen
KINDS = {"rank": 4, "guard": 2, "launcher": 2, "keeper": 1, "actor": 1}
# a process that is stopped costs a step_timeout_s
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSEGV, signal.SIGSTOP)
SETTINGS: dict[str, Any] = {
    "env_id": "dppo.remote:make",
    "num_samplers": 4,
    "num_steps": 8,
    "update_epochs": 1,
    "ranks_per_env": 2,
    "cores_per_rank": 0,
    "total_timesteps": 10_000_000,
    "checkpoint_interval_s": 20.0,
}
ON_ACTORS: dict[str, Any] = {
    "num_actors": 2,
    "step_timeout_s": 20.0,
    "reset_timeout_s": 30.0,
    "start_timeout_s": 60.0,
    "max_actor_restarts": 1000,
}


def drive(folder: Path) -> None:
    """Train with actors until a signal; write the result."""
    config = dppo.Config(
        **SETTINGS,
        **ON_ACTORS,
        env_kwargs={"command": [str(folder / "heat")]},
        run_dir=folder / "run",
        progress="plain",
    )
    result = dppo.train(config)
    facts = {
        "iterations": result.iterations,
        "weights": result.weights_sha256,
        "incidents": result.incidents,
        "env_faults": result.env_faults,
    }
    (folder / "result.json").write_text(json.dumps(facts))


def repeat(folder: Path, iterations: int) -> None:
    """Train so many iterations in this process; print the weights."""

    class Stop(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> bool | None:
            return row["iteration"] >= iterations

    config = dppo.Config(
        **SETTINGS,
        env_kwargs={"command": [str(folder / "heat")]},
        run_dir=folder / "alone",
        progress="off",
    )
    print(dppo.train(config, observers=[Stop()]).weights_sha256)


class Solvers:
    """The processes of a run: found by the path of their solver, which no other run has."""

    def __init__(self, driver: subprocess.Popen[bytes], heat: str) -> None:
        self._driver = psutil.Process(driver.pid)
        self._heat = heat
        self.keepers: dict[int, psutil.Process] = {}
        """All keepers seen so far by their ids: one whose launcher has ended is not found any more."""

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of each kind that run."""
        kinds: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if self._heat not in words or process.pid == self._driver.pid:
                continue
            if words == [self._heat]:
                kinds["rank"].append(process)
            elif Path(words[0]).name.startswith("mpirun"):
                kinds["launcher"].append(process)
                with suppress(psutil.Error):
                    if process.ppid() > 1:
                        kinds["keeper"] += [psutil.Process(process.ppid())]
            elif "rank" in words:
                kinds["guard"].append(process)
        with suppress(psutil.Error):
            for process in self._driver.children(recursive=True):
                with suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith("ray::PPOActor"):
                        kinds["actor"].append(process)
        self.keepers |= {process.pid: process for process in kinds["keeper"]}
        return kinds

    def end(self) -> None:
        """End what is left of the run, so that nothing outlives this program."""
        left = [process for processes in self.by_kind().values() for process in processes]
        for process in [*left, *self.keepers.values()]:
            with suppress(psutil.Error):
                process.kill()


def soak(minutes: float, folder: Path) -> dict[str, Any]:
    """Run for so many minutes; return the faults, what is left, and the verdict."""
    os.environ |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TMPDIR": str(folder),
    }
    heat = str(folder / "heat")
    words = ["mpicc", "-O2", "-I", str(INCLUDE), str(SOURCE), "-o", heat, "-lm"]
    subprocess.run(words, check=True)
    here = [sys.executable, str(Path(__file__).with_name("soak.py")), "--ranks"]
    with (folder / "driver.log").open("wb") as log:
        driver = subprocess.Popen([*here, "--drive", str(folder)], stdout=log, stderr=log)
    solvers = Solvers(driver, heat)
    try:
        faults = _disturb(solvers, driver, folder, 60 * minutes)
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(120)
    finally:
        driver.kill()
        driver.wait()
    time.sleep(END_S)
    left = {kind: len(processes) for kind, processes in solvers.by_kind().items()}
    remaining = [process for process in solvers.keepers.values() if process.is_running()]
    stopped = [process for process in remaining if process.status() == psutil.STATUS_STOPPED]
    left["keeper"] = len(remaining) - len(stopped)
    solvers.end()
    if not (folder / "result.json").exists():
        sys.exit(f"the driver ended with {code}:\n{_last_lines(folder)}")
    result = json.loads((folder / "result.json").read_text())
    command = [*here, "--repeat", str(folder), "--iterations", str(result["iterations"])]
    alone = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    return {
        "minutes": minutes,
        "equal_weights": result["weights"] == alone,
        **result,
        "faults": sum(faults.values()),
        "events": faults,
        "left": left,
        # nobody wakes up a keeper that was stopped and whose actor was killed
        "stopped_keepers": len(stopped),
    }


def _disturb(
    solvers: Solvers, driver: subprocess.Popen[bytes], folder: Path, whole_s: float
) -> Counter[str]:
    """Send a signal to a process every few seconds, once the run trains."""
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() and driver.poll() is None:
        time.sleep(0.5)
    until = time.monotonic() + whole_s
    faults: Counter[str] = Counter()
    while time.monotonic() < until:
        time.sleep(random.expovariate(1 / FAULT_S))
        if driver.poll() is not None:
            sys.exit(f"the driver ended by itself with {driver.returncode}:\n{_last_lines(folder)}")
        running = solvers.by_kind()
        [kind] = random.choices([*KINDS], [*KINDS.values()])
        number = random.choice(SIGNALS)
        with suppress(psutil.Error, IndexError):
            random.choice(_victims(running[kind])).send_signal(number)
            faults[f"{kind} {number.name}"] += 1
    return faults


def _victims(processes: list[psutil.Process]) -> list[psutil.Process]:
    now = time.time()
    return [
        process
        for process in processes
        if now - process.create_time() > YOUNG_S or random.random() < 0.2
    ]


def _last_lines(folder: Path) -> str:
    return (folder / "driver.log").read_text()[-4000:]
