"""Limits of this process: cores, by affinity and by quota, and the size of its files."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from dppo.errors import counted

CGROUPS = Path("/sys/fs/cgroup")
CGROUPS_OF_THIS_PROCESS = Path("/proc/self/cgroup")
SCHEDULING_OF_THIS_THREAD = Path("/proc/thread-self/schedstat")


def usable_cores() -> int:
    """Return the number of cores this process may use, by affinity and by the quota of its cgroup, rounded up.

    Ray's own count ignores affinity, newer cpusets and a quota of less than a core.
    """
    cores = _cores_by_affinity()
    quota = cpu_quota()
    if quota is None:
        return cores
    return max(1, min(cores, math.ceil(quota)))


def cores_in_words() -> str:
    """Format the usable cores as `2 cores`, and name the quota that limits them."""
    cores = _cores_by_affinity()
    quota = cpu_quota()
    if quota is None or quota >= cores:
        return counted(cores, "core")
    return f"{counted(cores, 'core')}, of which a quota (cgroup) allows {quota:g}"


def cpu_quota() -> float | None:
    """Return the cores' worth of time that the cgroups of this process allow; None if they do not limit it."""
    quota = _smallest_quota()
    return None if quota is None else quota[0]


def seconds_of_quota() -> tuple[float, float] | None:
    """Return the seconds of cores that were used under the quota, and those that it allowed, both since some time.

    None if there is no quota, it allows all cores, or the system does not count what is used.
    """
    quota = _smallest_quota()
    if quota is None or quota[0] >= _cores_by_affinity():
        return None
    cores, folder = quota
    used_s = _seconds_used(folder)
    if used_s is None:
        return None
    return (used_s, cores * time.monotonic())


def waited_for_a_core_s() -> float:
    """Return the seconds for which this thread could run and had no core; 0 if the system does not count them."""
    with suppress(OSError, ValueError, IndexError):
        return int(SCHEDULING_OF_THIS_THREAD.read_text().split()[1]) / 1e9
    return 0.0


def load_average() -> float:
    """Return the threads of this machine that wanted a core in the last minute; 0 if the system does not count them."""
    with suppress(AttributeError, OSError):
        return os.getloadavg()[0]
    return 0.0


def file_size_limits() -> tuple[int, int] | None:
    """Return the most bytes of a file that this process may write, and the most that the user may set it to.

    None if there is no limit. The second is 0 if the user may remove the limit.
    """
    try:
        import resource  # which Windows does not have
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return None
    may_remove = hard == resource.RLIM_INFINITY or os.geteuid() == 0
    return soft, 0 if may_remove else hard


def file_size_remedy() -> str:
    """Return how large a file may be, and how to write larger ones; "" if the limit is not the limit of the process."""
    limits = file_size_limits()
    if limits is None:
        return ""
    soft, hard = limits
    fact = f"This process may not write files larger than {soft:,} bytes (RLIMIT_FSIZE)."
    if hard == 0:
        return f"{fact} Run `ulimit -f unlimited` first."
    return f"{fact} Its hard limit is {hard:,}: start it in a shell in which `ulimit -H -f` prints unlimited."


def cores_of_affinity() -> set[int] | None:
    """Return the numbers of the cores on which this process may run; None if the system has no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return None


def _smallest_quota() -> tuple[float, Path] | None:
    quotas = []
    for folder in _folders_of_version_2():
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append((int(quota) / int(period), folder))  # "max" is no number
    for folder in _folders_of_version_1():
        with suppress(OSError, ValueError):
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
            quotas.append((int(quota) / int(period), folder))  # -1: no limit
    return min((quota for quota in quotas if quota[0] > 0), default=None)


def _seconds_used(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        for line in (folder / "cpu.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "usage_usec":
                return int(count) / 1e6
    with suppress(OSError, ValueError):
        return int((folder / "cpuacct.usage").read_text()) / 1e9  # of version 1, in nanoseconds
    return None


def _cores_by_affinity() -> int:
    cores = cores_of_affinity()
    if cores is None:
        return os.cpu_count() or 1
    return len(cores)


def _folders_of_version_2() -> Iterator[Path]:
    """Yield the folder of this process's cgroup, and the folders of all cgroups above it, which limit it, too."""
    yield CGROUPS  # in a container, the root is its own cgroup
    for controllers, name in _cgroups():
        if controllers == "":
            yield from _with_parents(CGROUPS, name)


def _folders_of_version_1() -> Iterator[Path]:
    yield CGROUPS / "cpu"
    for controllers, name in _cgroups():
        if "cpu" in controllers.split(","):
            for mounted in ("cpu", controllers):
                yield from _with_parents(CGROUPS / mounted, name)


def _cgroups() -> Iterator[tuple[str, str]]:
    """Yield the controllers and the name of each cgroup of this process; version 2 has no names of controllers."""
    with suppress(OSError):
        for line in CGROUPS_OF_THIS_PROCESS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            yield controllers, name


def _with_parents(root: Path, name: str) -> Iterator[Path]:
    inside = PurePosixPath(name.lstrip("/"))
    for path in (inside, *inside.parents):
        yield root / path
