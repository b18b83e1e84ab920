"""Half an hour of faults of every kind, in which nothing may grow: a picture, and the weights at the end.

    python benchmarks/soak.py --json benchmarks/soak.json --picture docs/soak.png

Four samplers of two environments (CartPole; each step sleeps 4 ms), `--num-actors 1..2` and `--policy-lag 1`, on a
cluster of Ray's `Cluster` utility with two nodes on this machine. The environments raise, return NaN and no reward, as
the seed of the episode wants it. Whatever the seed does not decide must not change a bit: they hang, exit, crash, leak,
print and leave detached processes behind. Meanwhile this program kills and freezes actors, freezes Ray's GCS for 12 s,
as a network does that loses packets, takes a node away and gives it back, ends the driver with SIGTERM and, later, with
SIGKILL, and resumes it. The last two thirds pass without a restart of the driver, so that what it accumulates shows. At
the end, the weights are compared with those of a run in one process without any of that.

`--ranks` does the same to the processes of MPI solvers: see `soak_ranks.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit

from dppo.numerics.portable import VARIABLES

STEP_S, LONGEST = 0.004, 200
SETTINGS: dict[str, Any] = {
    "env_id": "soak:Sick",
    "num_samplers": 4,
    "envs_per_sampler": 2,
    "num_steps": 32,
    "policy_lag": 1,
    "norm_obs": True,
    "norm_reward": True,
    "on_env_fault": "rebuild",
    "env_faults": "unlimited",
    "total_timesteps": 10_000_000,
    "checkpoint_interval_s": 20.0,
}
ON_ACTORS: dict[str, Any] = {
    "num_actors": "1..2",
    "segment_timeout_s": 60.0,
    "step_timeout_s": 4.0,
    "reset_timeout_s": 10.0,
    "max_actor_restarts": 50,
    "recycle_after": "0.15GB",
}
BY_SEED = 0.002  # faults in a step that follow from the seed: they are part of the result
# one in so many steps
BY_CHANCE = {"hang": 15_000, "exit": 15_000, "crash": 15_000, "print": 4_000, "orphan": 4_000}
LEAKED = 6_000  # bytes in each step
QUICK_CHECKS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000"}
NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}
SAMPLE_S = 5.0
LATE_S = 240.0  # longest wait for the restarts of the driver after the end
FROZEN_S = 12.0  # for which the GCS is frozen: long enough for the line about it
# Seconds that a detached process sleeps, by which it is known; children of this process inherit the number.
ORPHAN = os.environ.setdefault("SOAK_ORPHAN", str(100_000 + os.getpid()))

leaked: list[bytes] = []


class Sick(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole with faults that the seed of the episode decides, and, if `sick`, with others that nothing decides."""

    def __init__(self, sick: bool = False) -> None:
        super().__init__(TimeLimit(CartPoleEnv(), LONGEST))
        self._sick, self._drawn, self._chance = sick, np.random.default_rng(), random.SystemRandom()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._drawn = np.random.default_rng(seed)
        if self._drawn.random() < BY_SEED:
            raise ConnectionError("no answer to a reset")
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._sick:
            self._fall_ill()
        obs, reward, terminated, truncated, info = self.env.step(action)
        kind = int(self._drawn.random() / BY_SEED * 4)
        if kind == 0:
            raise ConnectionError("no answer to a step")
        if kind == 1:
            raise SystemExit(3)
        return (
            obs * np.nan if kind == 2 else obs,
            None if kind == 3 else reward,
            terminated,
            truncated,
            info,
        )

    def _fall_ill(self) -> None:
        time.sleep(STEP_S)
        leaked.append(bytes(bytearray(os.urandom(1) * LEAKED)))
        drawn = {kind for kind, one_in in BY_CHANCE.items() if self._chance.random() * one_in < 1}
        if "hang" in drawn:
            time.sleep(1e6)
        if "exit" in drawn:
            os._exit(3)
        if "crash" in drawn:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        if "print" in drawn:
            print(("all is well " * 10 + "\n") * 10_000, flush=True)
        if "orphan" in drawn:
            subprocess.Popen(["sleep", ORPHAN], start_new_session=True)


# ------------------------------------------------------------------ in processes of their own


def drive(folder: Path, address: str) -> None:
    """Train until a signal, from where the run in `folder` stands; write its result."""
    import dppo

    config = dppo.Config(
        **SETTINGS,
        **ON_ACTORS,
        env_kwargs={"sick": True},
        address=address,
        run_dir=folder / "run",
        progress="plain",
    )
    result = dppo.train(config, resume="auto")
    facts = {
        "iterations": result.iterations,
        "weights": result.weights_sha256,
        "incidents": result.incidents,
    }
    (folder / "result.json").write_text(
        json.dumps(facts | {"steps_lost": result.env_faults.get("steps lost", 0)})
    )


def repeat(folder: Path, iterations: int) -> None:
    """Train so many iterations in this process, without actors; print the weights."""
    import dppo

    class Stop(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> bool | None:
            return row["iteration"] >= iterations

    result = dppo.train(
        dppo.Config(**SETTINGS, run_dir=folder / "alone", progress="off"), observers=[Stop()]
    )
    print(result.weights_sha256)


# ------------------------------------------------------------------ faults from outside


class Soak:
    """A cluster, the driver of a run on it, and what happens to them; samples of their size."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        (folder / "tmp").mkdir()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= QUICK_CHECKS | {
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_worker_niceness": "0",
        }
        os.environ |= VARIABLES | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(folder / "tmp"),
        }
        self.folder, self.samples, self.events = (
            folder,
            list[dict[str, float]](),
            list[tuple[float, str]](),
        )
        self._began = time.monotonic()
        self._cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self._node = self._cluster.add_node(**NODE)
        self._log = (folder / "driver.log").open("ab")
        self._driver = self._started()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def _started(self) -> subprocess.Popen[bytes]:
        self._before = self.iterations
        command = [
            sys.executable,
            __file__,
            "--drive",
            str(self.folder),
            "--address",
            self._cluster.address,
        ]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    @property
    def iterations(self) -> int:
        """Iterations of the run so far."""
        rows = self.folder / "run" / "metrics.jsonl"
        return rows.read_bytes().count(b"\n") if rows.exists() else 0

    @property
    def is_training(self) -> bool:
        """True once the present driver has trained: before that, a signal may come too early to be handled."""
        return self.iterations > self._before

    def _processes(self, title: str) -> list[psutil.Process]:
        found = []
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                found += [one] if title in " ".join(one.cmdline()[:2]) else []
        return found

    def sample(self) -> None:
        """Measure the driver, the actors, the folder, and what was left behind."""
        actors = [
            one.memory_info().rss for one in self._processes("ray::PPOActor") if one.is_running()
        ]
        one: dict[str, float] = {
            "s": self.now,
            "actors": len(actors),
            "actor_mb": max(actors, default=0) / 1e6,
        }
        with suppress(psutil.Error), psutil.Process(self._driver.pid).oneshot() as _:
            driver = psutil.Process(self._driver.pid)
            one |= {"driver_mb": driver.memory_info().rss / 1e6, "driver_fds": driver.num_fds()}
            one |= {"driver_threads": driver.num_threads()}
        sleepers = [
            p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", ORPHAN]
        ]
        one |= {"iterations": self.iterations, "orphans": len(sleepers)}
        one |= {
            "run_mb": _size(self.folder / "run") / 1e6,
            "tmp_mb": _size(self.folder / "tmp", "dppo-*") / 1e6,
        }
        self.samples.append(one)

    def signal_actor(self, number: signal.Signals) -> None:
        """Send a signal to one of the actors."""
        actors = self._processes("ray::PPOActor")
        if actors:
            self.events.append((self.now, number.name))
            with suppress(psutil.Error):
                random.choice(actors).send_signal(number)

    def freeze_gcs(self) -> None:
        """Stop Ray's GCS for a while, as a network that loses packets does."""
        for gcs in self._processes("gcs_server"):
            self.events.append((self.now, "GCS frozen"))
            gcs.suspend()
            threading.Timer(FROZEN_S, gcs.resume).start()

    def change_node(self) -> None:
        """Take the second node away, or give it back."""
        if self._node is None:
            self._node = self._cluster.add_node(**NODE)
        else:
            self._cluster.remove_node(self._node, allow_graceful=False)
            self._node = None
        self.events.append((self.now, "node lost" if self._node is None else "node back"))

    def restart(self, number: signal.Signals) -> None:
        """End the driver with a signal, and resume the run."""
        self.end(number)
        self._driver = self._started()

    def end(self, number: signal.Signals) -> None:
        """End the driver with a signal."""
        self.events.append((self.now, f"driver {number.name}"))
        self._driver.send_signal(number)
        code, expected = (
            self._driver.wait(60),
            -number if number is signal.SIGKILL else 128 + number,
        )
        if code not in (0, expected):
            sys.exit(
                f"the driver ended with {code}:\n{(self.folder / 'driver.log').read_text()[-4000:]}"
            )

    def check(self) -> None:
        """Exit if the driver has ended by itself."""
        if self._driver.poll() is not None:
            text = (self.folder / "driver.log").read_text()
            sys.exit(f"the driver ended by itself with {self._driver.returncode}:\n{text[-4000:]}")

    def close(self) -> None:
        """End the cluster."""
        self._driver.kill()
        self._cluster.shutdown()


def _size(folder: Path, names: str = "**/*") -> int:
    total = 0
    for path in folder.glob(names):
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def soak(minutes: float, folder: Path) -> dict[str, Any]:
    """Run for so many minutes; return the samples, the events and the verdict."""
    run, whole_s = Soak(folder), 60 * minutes
    every: list[tuple[float, Callable[[], None]]] = [
        (SAMPLE_S, run.sample),
        (40.0, lambda: run.signal_actor(signal.SIGKILL)),
        (130.0, lambda: run.signal_actor(signal.SIGSTOP)),
        (100.0, run.change_node),
        (170.0, run.freeze_gcs),
    ]
    once = [(whole_s / 6, signal.SIGTERM), (whole_s / 3, signal.SIGKILL)]
    due = [min(seconds, whole_s / 3) for seconds, _ in every]
    due[-1] = min(every[-1][0], 0.6 * whole_s)  # not while a driver starts
    try:
        # on a busy machine, a restart comes later
        while run.now < whole_s or (once and run.now < whole_s + LATE_S):
            run.check()
            for number, (seconds, act) in enumerate(every):
                if run.now >= due[number]:
                    due[number] += seconds
                    act()
            if once and run.now >= once[0][0] and run.is_training:
                run.restart(once.pop(0)[1])
            time.sleep(0.2)
        run.end(signal.SIGTERM)
    finally:
        run.close()
    result = json.loads((folder / "result.json").read_text())
    command = [
        sys.executable,
        __file__,
        "--repeat",
        str(folder),
        "--iterations",
        str(result["iterations"]),
    ]
    alone = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    time.sleep(6.0)  # until keepers have ended all that is left
    run.sample()
    return {
        "minutes": minutes,
        "equal_weights": result["weights"] == alone,
        **result,
        "events": Counter(name for _, name in run.events),
        "slopes_per_hour": slopes(run.samples, whole_s / 3),
        "samples": [{name: round(value, 2) for name, value in one.items()} for one in run.samples],
        "at": [(round(when, 1), name) for when, name in run.events],
    }


def slopes(samples: list[dict[str, float]], since_s: float) -> dict[str, float]:
    """Return how much each figure grows in an hour, by least squares, from a minute after the last restart on."""
    found = {}
    for name in (
        "driver_mb",
        "driver_fds",
        "driver_threads",
        "actor_mb",
        "run_mb",
        "tmp_mb",
        "orphans",
    ):
        points = [
            (one["s"], one[name]) for one in samples if one["s"] > since_s + 60 and name in one
        ][:-1]
        if len(points) > 2:
            times, values = np.array(points).T
            found[name] = round(float(np.polyfit(times / 3600, values, 1)[0]), 3)
    return found


# ------------------------------------------------------------------ the picture


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the samples over time: memory, descriptors and threads, disk, iterations a minute."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from dppo.tools.pictures.style import COLOURS, DPI, GREY

    samples = [one for one in found["samples"] if one["s"] < 60 * found["minutes"]]
    minutes = np.array([one["s"] for one in samples]) / 60
    # else the driver is starting
    running = [{} if one.get("driver_threads", 0) < 10 else one for one in samples]
    running = [
        one if one.get("actors") else {name: one[name] for name in one.keys() - {"actor_mb"}}
        for one in running
    ]
    rates, width = _rates(samples), max(1, int(60 / SAMPLE_S))
    panels: tuple[tuple[str, dict[str, Any]], ...] = (
        ("memory, MB", {"driver": "driver_mb", "largest actor": "actor_mb"}),
        ("of the driver", {"file descriptors": "driver_fds", "threads": "driver_threads"}),
        ("disk, MB", {"run folder": "run_mb", "files of actors elsewhere": "tmp_mb"}),
        ("left processes", {"detached": "orphans"}),
        (f"iterations a minute\n(mean of {width * SAMPLE_S:.0f} s)", {"": rates}),
    )
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(9, 9), sharex=True, layout="constrained"
    )
    for axes, (label, lines) in zip(all_axes, panels, strict=True):
        for colour, (name, what) in zip(COLOURS, lines.items(), strict=False):
            values = (
                what if not isinstance(what, str) else [one.get(what, np.nan) for one in running]
            )
            axes.plot(minutes, values, color=colour, label=name, linewidth=1.2)
        for when, event in found["at"]:
            if event.startswith(("driver", "node")):
                style = "-" if event.startswith("driver") else ":"
                axes.axvline(when / 60, color=GREY, linewidth=0.8, linestyle=style, zorder=0)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, found["minutes"])
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            axes.legend(loc="best", frameon=False, ncols=2)
    all_axes[-1].set_xlabel(
        "minutes; lines: the driver ended and resumed, dotted: a node lost or back"
    )
    figure.savefig(path, dpi=DPI)


def _rates(samples: list[dict[str, float]]) -> np.ndarray:
    counts = np.maximum.accumulate([one["iterations"] for one in samples])
    width = max(1, int(60 / SAMPLE_S))
    seconds = np.array([one["s"] for one in samples])
    back = np.maximum(0, np.arange(len(samples)) - width)
    return np.where(
        seconds > seconds[back],
        (counts - counts[back]) / np.maximum(1e-9, seconds - seconds[back]) * 60,
        np.nan,
    )


def of_ranks(asked: argparse.Namespace) -> None:
    """Run the command with faults to the processes of solvers."""
    import soak_ranks

    if asked.drive:
        return soak_ranks.drive(asked.drive)
    if asked.repeat:
        return soak_ranks.repeat(asked.repeat, asked.iterations)
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as folder:
        found = soak_ranks.soak(asked.minutes, Path(folder))
    if asked.json:
        asked.json.write_text(json.dumps(found) + "\n")
    print(json.dumps(found, indent=1))
    if not found["equal_weights"]:
        sys.exit("the weights differ from those of one process")
    if any(found["left"].values()):
        sys.exit(f"processes are left {soak_ranks.END_S:g} s after the end: {found['left']}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--ranks", action="store_true", help="faults to the processes of solvers")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--iterations", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ranks:
        return of_ranks(asked)
    if asked.drive:
        return drive(asked.drive, asked.address)
    if asked.repeat:
        return repeat(asked.repeat, asked.iterations)
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as folder:
        found = soak(asked.minutes, Path(folder))
    if asked.json:
        asked.json.write_text(json.dumps(found) + "\n")
    if asked.picture:
        draw(found, asked.picture)
    print(
        json.dumps(
            {name: value for name, value in found.items() if name not in ("samples", "at")},
            indent=1,
        )
    )
    sys.exit(0 if found["equal_weights"] else "the weights differ from those of one process")


if __name__ == "__main__":
    main()
