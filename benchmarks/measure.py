"""Shared by the benchmarks: child processes, their memory, the machine, the peer's virtual environment."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
SB3_VENV = HERE / ".venvs" / "sb3"
SB3_CONSTRAINTS = HERE / "constraints-sb3.txt"
SB3_PACKAGES = [
    "stable-baselines3",
    "sb3-contrib",
    "torch",
    "gymnasium[mujoco]",
    "ale-py",
    "box2d",
    "pygame",  # which Gymnasium's Box2D tasks import, rendered or not
    "opencv-python-headless",
]


class MeasurementError(Exception):
    """One side of a row could not be measured. The other sides continue."""


def ours_environment(checkout: Path = REPO) -> dict[str, str]:
    """Return environment variables that make the dppo and the benchmarks of `checkout` importable in a child."""
    paths = [
        str(checkout / "src"),
        str(checkout / "benchmarks"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_json(command: list[str], env: dict[str, str], timeout_s: float = 900.0) -> dict[str, Any]:
    """Run a child and return the JSON that it prints last, with `wall_s` from its start to its exit.

    Raises:
        MeasurementError: the child failed, printed nothing, or took longer than `timeout_s`.
    """
    # removes files that libraries leave, such as MuJoCo's log
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        child = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stop(child)
            raise MeasurementError(f"took more than {timeout_s:.0f} s") from None
        except BaseException:
            stop(child)
            raise
        wall_s = time.perf_counter() - began
    if child.returncode != 0 or not out.strip():
        lines = [line for line in err.strip().splitlines() if line.strip()] or ["no output"]
        raise MeasurementError(f"exit code {child.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result | {"wall_s": wall_s}


def run_all(
    calls: Iterable[Callable[[], dict[str, Any]]], jobs: int, store: Path
) -> Iterator[dict[str, Any]]:
    """Make `calls`, `jobs` at a time, and yield their results as they come, first added to `store` unless an `error`.

    A result is a line of JSON there, so that what has run is not run again after an interruption.
    """
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(call) for call in calls]):
            line = done.result()
            if "error" not in line:
                with store.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            yield line


def stop(child: subprocess.Popen[Any]) -> None:
    """End `child` and all that it started: SIGTERM first, SIGKILL after 15 s."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(15)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# ---------------------------------------------------------------------------------------------- processes


def descendants(pid: int) -> Iterator[tuple[int, int, str]]:
    """Yield (pid, depth, command line) of every process below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    todo = [(child, 1) for child in children.get(pid, [])]
    while todo:
        one, depth = todo.pop()
        todo += [(child, depth + 1) for child in children.get(one, [])]
        with contextlib.suppress(OSError):
            yield (
                one,
                depth,
                (Path("/proc") / str(one) / "cmdline").read_text().replace("\0", " ").strip(),
            )


def unique_mb(pid: int) -> float:
    """Return the private pages of a process in MB: the memory that its end would free."""
    with contextlib.suppress(OSError):
        lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    return 0.0


# ---------------------------------------------------------------------------------------------- the peer


def sb3_python() -> str:
    """Return the interpreter of the peer's virtual environment, which is created on first use.

    Raises:
        MeasurementError: it could not be created.
    """
    python, stamp = SB3_VENV / "bin" / "python", SB3_VENV / "complete"
    wanted = hashlib.sha256(SB3_CONSTRAINTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    print(
        f"Creating {SB3_VENV.relative_to(REPO)} for Stable-Baselines3 (once) ...", file=sys.stderr
    )
    venv.create(SB3_VENV, with_pip=True, clear=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(SB3_CONSTRAINTS),
        *SB3_PACKAGES,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeasurementError(
            f"its virtual environment could not be created: {done.stderr.strip().splitlines()[-1]}"
        )
    stamp.write_text(wanted)
    return str(python)


# ---------------------------------------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """Describe the machine, the versions and the commit of this measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("ray", "torch", "gymnasium", "numpy", "mujoco")
        },
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _git(*arguments: str) -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
