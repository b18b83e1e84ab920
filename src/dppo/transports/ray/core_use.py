"""Use of the cores of this machine during a run, which shows whether more actors than cores gained anything."""

import psutil

from dppo.errors import counted
from dppo.machine import cores_in_words, cores_of_affinity, seconds_of_quota, usable_cores

BUSY = 0.9  # share of the time from which on there is no core left for another actor


class CoreUse:
    """Measures from its creation on how busy the cores are that this process may use."""

    def __init__(self, actors: int) -> None:
        self._actors = actors
        self._began = _core_seconds()

    def notes(self) -> list[str]:
        """Return a line for the end of the run if there are more actors than cores, and the cores were busy."""
        cores = usable_cores()
        if self._actors <= cores:
            return []
        busy_s, all_s = _core_seconds()
        busy_before_s, all_before_s = self._began
        share = min(1.0, (busy_s - busy_before_s) / max(all_s - all_before_s, 1e-9))
        if share < BUSY:
            return []
        fact = f"{counted(self._actors, 'actor')} on {cores_in_words()}, busy for {share:.0%} of the time"
        return [f"{fact}: more actors would gain nothing on this machine."]


def _core_seconds() -> tuple[float, float]:
    """Return the seconds for which the cores that this process may use were busy, and all of their seconds."""
    quota_s = seconds_of_quota()
    if quota_s is not None:
        return quota_s
    times = psutil.cpu_times(percpu=True)
    cores = cores_of_affinity()
    if cores is not None:
        times = [core_times for core, core_times in enumerate(times) if core in cores]
    idle_s = sum(core.idle + getattr(core, "iowait", 0.0) for core in times)
    # Linux counts the time of guests as time of users, too
    guests_s = sum(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0) for core in times)
    all_s = sum(sum(core) for core in times) - guests_s
    return all_s - idle_s, all_s
