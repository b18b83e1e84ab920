"""Real daemons of Slurm, munge included, on the hosts of `hosts.py`, which share a folder.

Needs root and slurmctld, slurmd and munge of Debian. Where the machine has cgroups of version 1, each job has its own,
as on most clusters: they hold its processes, and bind them to its cores.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hosts import Host, Hosts, iterations_of, possible

PLUGINS = Path(os.environ.get("SLURM_PLUGINS", "/usr/lib/x86_64-linux-gnu/slurm-wlm"))
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm.sh"
CGROUPS = [Path("/sys/fs/cgroup", name) for name in ("cpuset", "freezer")]
PLACE = "/tmp/slurm"  # of the daemons' files, on each host
CONFIGURATION = """
ClusterName=hosts
SlurmctldHost={head.name}({head.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
PluginDir={plugins}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType={proctrack}
TaskPlugin={task}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=5
ReturnToService=2
MailProg=/bin/true
MinJobAge=300
KillWait=30
"""
NODE = "NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=2000 State=UNKNOWN\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
DAEMONS = f"""mkdir -p {PLACE}/munge {PLACE}/state {PLACE}/spool
install -m 400 munge.key {PLACE}/munge/key
munged --force --key-file={PLACE}/munge/key --socket={PLACE}/munge/socket --pid-file={PLACE}/munge/pid \
    --log-file={PLACE}/munge/log --seed-file={PLACE}/munge/seed
[ $(hostname) != h1 ] || slurmctld -c
slurmd -N $(hostname) -d $(command -v slurmstepd)
"""


def slurm_possible() -> bool:
    """Return whether this machine can have hosts with a Slurm."""
    return PLUGINS.is_dir() and all(map(shutil.which, PROGRAMS)) and possible()


class Slurm:
    """Hosts with a Slurm of two CPUs each, and a folder that all of them see, which is the home of the user."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        (folder / "slurm.conf").write_text(_configuration(hosts))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=yes\n")
        (folder / "munge.key").write_bytes(os.urandom(64))
        for host in hosts:
            self.call(DAEMONS, host)
        self._wait_until(lambda: self.call("sinfo -h -o %D%T").split() == [f"{len(hosts)}idle"])

    def call(self, command: str, host: Host | None = None) -> str:
        """Return what a shell command prints on a host, by default the first one."""
        host = host or self.hosts[0]
        words = ["bash", "-c", f"cd {self.folder} && {command}"]
        script = f"import os; os.execvp('bash', {words!r})"
        variables = {
            "HOME": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RUN_DIR": str(self.folder / "run"),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        log = host.folder / "printed"
        log.write_text("")
        assert host.start(["-c", script], log.name, **variables).wait(60) == 0, log.read_text()
        return log.read_text()

    def submit(self, options: str, env_id: str, settings: str) -> str:
        """Submit `examples/slurm.sh`, which trains in the folder `run`, and return the number of the job."""
        words = f"sbatch --parsable --export=ALL --output=job.log {options} {SCRIPT} {env_id} {settings}"
        return self.call(words).strip()

    @property
    def rows(self) -> int:
        """Iterations of the run so far."""
        return iterations_of(self.folder / "run")

    @property
    def log(self) -> str:
        output = self.folder / "job.log"
        return output.read_text(errors="replace") if output.exists() else ""

    def wait_for_rows(self, number: int) -> None:
        self._wait_until(lambda: self.rows >= number)

    def wait_for_state(self, job: str, state: str) -> None:
        self._wait_until(lambda: self.state_of(job) == state)

    def state_of(self, job: str) -> str:
        return self.call(f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'").strip()[9:]

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not happened():
            if time.monotonic() > deadline:
                pytest.fail(f"{self.call('scontrol show job')}\n{self.log[-8000:]}")
            time.sleep(0.5)


@contextmanager
def slurm_of(number: int, folder: Path) -> Iterator[Slurm]:
    """Yield a Slurm on so many hosts. Its folder is not below /tmp, of which each host has its own."""
    shared = Path(mkdtemp(dir="/var/tmp"))
    try:
        with Hosts(number, folder) as hosts:
            yield Slurm(hosts, shared)
    finally:
        shutil.rmtree(shared)
        _remove_cgroups(number)


def _configuration(hosts: list[Host]) -> str:
    cgroups = _has_cgroups()
    text = CONFIGURATION.format(
        head=hosts[0],
        place=PLACE,
        plugins=PLUGINS,
        proctrack="proctrack/cgroup" if cgroups else "proctrack/linuxproc",
        task="task/affinity,task/cgroup" if cgroups else "task/affinity",
    )
    return text + "".join(NODE.format(host=host) for host in hosts) + PARTITION


def _has_cgroups() -> bool:
    return all((folder / "release_agent").exists() for folder in CGROUPS)


def _remove_cgroups(number: int) -> None:
    """Remove the empty cgroups that the daemons of the hosts have left."""
    for folder in CGROUPS:
        for host in range(1, number + 1):
            for inner, _, _ in os.walk(folder / f"slurm_h{host}", topdown=False):
                with suppress(OSError):
                    os.rmdir(inner)
