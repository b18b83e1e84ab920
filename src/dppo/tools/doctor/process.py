"""Effects of an environment on its process: memory, CPU, threads, processes, process-wide state."""

import ctypes
import gc
import hashlib
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import packages_distributions, version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from dppo.machine import waited_for_a_core_s
from dppo.process_state.borders import forget_notes, take_changes
from dppo.slots.program import processes_of_programs, running_programs

LEAST_WANTED_S = 0.1  # time of a core that a thread must have wanted, for a share that is no noise


class Usage(NamedTuple):
    """Memory and CPU of this process and of the processes that it has started."""

    mb: float
    """Resident memory of all of them."""
    children_cpu_s: float
    children: list[str]
    """Names of the processes that were started."""


class CoreClock:
    """Measures for which share of the time that this thread wanted a core it had one."""

    def __init__(self) -> None:
        """Begin to measure."""
        self._cpu_s = time.thread_time()
        self._waited_s = waited_for_a_core_s()

    def share(self) -> float:
        """Return the share since the start, above 0; 1 if the thread hardly computed, or the system does not count."""
        cpu_s = time.thread_time() - self._cpu_s
        waited_s = waited_for_a_core_s() - self._waited_s
        if cpu_s <= 0 or cpu_s + waited_s < LEAST_WANTED_S:
            return 1.0
        return cpu_s / (cpu_s + waited_s)


class ProcessWatch:
    """Compares this process with what it was when the watch began."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._children_before = set(self._process.children(recursive=True))
        self._started = set[psutil.Process]()  # processes that earlier looks have found
        self._threads_before = threading.active_count()
        self._state = global_state()
        self._modules_before = set(sys.modules)
        forget_notes()

    def usage(self) -> Usage:
        """Measure memory and CPU, also of processes that earlier looks have found and whose parents have ended."""
        mb = self._process.memory_info().rss / 2**20
        cpu_s = 0.0
        names = list[str]()
        # Python's tracker of shared memory is started with the first, and runs until the process ends
        tracker_pid = getattr(resource_tracker._resource_tracker, "_pid", None)
        started = {*self._process.children(recursive=True), *processes_of_programs()}
        started |= {child for child in self._started if _runs(child)}
        started -= self._children_before
        self._started |= started
        for child in started:
            if child.pid == tracker_pid:
                continue
            with suppress(psutil.Error):
                child_mb = child.memory_info().rss / 2**20
                times = child.cpu_times()
                name = child.name()
                mb += child_mb
                cpu_s += times.user + times.system
                names.append(name)
        return Usage(mb, cpu_s, names)

    def shared_cores(self) -> list[int]:
        """Return the cores on which several ranks of the environments' programs may run."""
        bound = Counter[int]()
        for program in running_programs():
            for rank in program.ranks.values():
                with suppress(psutil.Error):
                    bound.update(psutil.Process(rank.pid).cpu_affinity())
        return [core for core, ranks in bound.items() if ranks > 1]

    def new_threads(self) -> int:
        return threading.active_count() - self._threads_before

    def new_packages(self, env: Any) -> dict[str, str]:
        """Return versions of the packages that were loaded for an environment, and hashes of files that are in none."""
        loaded = set(sys.modules) - self._modules_before
        names = {name.partition(".")[0] for name in loaded}
        names.add(type(getattr(env, "unwrapped", env)).__module__.partition(".")[0])
        packages = _installed_packages()
        versions = {}
        for name in sorted(names):
            file = getattr(sys.modules.get(name), "__file__", None)
            if name in packages:
                package = packages[name][0]
                versions[package] = version(package)
            elif file is not None and name not in sys.stdlib_module_names:
                sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest()
                versions[name] = f"sha256 {sha256[:16]}"
        return versions

    def take_changes(self) -> list[str]:
        """Return the names of process-wide state that has changed since the last call."""
        state_before = self._state
        self._state = global_state()
        names = []
        for name, value in self._state.items():
            if state_before.get(name, value) != value:
                names.append(name)
        for change in take_changes():
            names += change.names
        return names


def release_unused_memory() -> None:
    """Collect garbage in cycles, and give the system the freed memory that the C library keeps."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@cache  # it reads the metadata of all packages, half a second
def _installed_packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def global_state() -> dict[str, Any]:
    """Return process-wide state that an environment might change, by name, besides the states of `process_state`."""
    _, numbers, position, *_ = np.random.get_state()
    state = {
        "NumPy's global generator": (np.asarray(numbers).tobytes(), position),
        "the global generator of random": random.getstate(),
        "a timer of the process": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch's threads"] = torch.get_num_threads()
        state["torch's global generator"] = torch.get_rng_state().numpy().tobytes()
    return state


def threads_that_hold_the_process() -> list[str]:
    """Return the names of threads for which Python waits before it ends this process."""
    main_thread = threading.main_thread()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not main_thread and not thread.daemon
    ]
