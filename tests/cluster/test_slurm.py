"""Real daemons of Slurm on two hosts: solvers of two ranks have the same weights after signals and a drained node.

Needs root and slurmctld, slurmd and munge of Debian.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hosts import Host, Hosts, possible
from mpi import compiled_heat, use_mpi
from processes import wait_until
from test_job_scripts import EXAMPLES, PLUGINS, WITHOUT_SLURM
from test_remote import settings

import dppo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        WITHOUT_SLURM or not possible() or shutil.which("mpicc") is None,
        reason="needs root, and slurmd, slurmctld, munge and mpicc of Debian in PATH",
    ),
]
PLACE = "/tmp/slurm"  # on each host
CONFIGURATION = f"""
ClusterName=two
SlurmctldHost=h1(10.78.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={PLACE}/munge/socket
PluginDir={PLUGINS}
StateSaveLocation={PLACE}/state
SlurmdSpoolDir={PLACE}/spool
SlurmctldPidFile={PLACE}/slurmctld.pid
SlurmdPidFile={PLACE}/slurmd.pid
SlurmctldLogFile={PLACE}/slurmctld.log
SlurmdLogFile={PLACE}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
ReturnToService=2
MailProg=/bin/true
NodeName=h1 NodeAddr=10.78.0.1 CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=h2 NodeAddr=10.78.0.2 CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=h1,h2 Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = f"""mkdir -p {PLACE}/munge {PLACE}/state {PLACE}/spool
install -m 400 munge.key {PLACE}/munge/key
munged --force --key-file={PLACE}/munge/key --socket={PLACE}/munge/socket --pid-file={PLACE}/munge/pid \
    --log-file={PLACE}/munge/log --seed-file={PLACE}/munge/seed
[ $(hostname) = h2 ] || slurmctld -c
slurmd -N $(hostname) -d $(command -v slurmstepd)
"""
STEPS = 2 * 8 * 30  # of the run


class SlurmOfTwo:
    """Two hosts with a Slurm, and a folder that both see."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.heat = compiled_heat(folder)
        (folder / "slurm.conf").write_text(CONFIGURATION)
        (folder / "munge.key").write_bytes(os.urandom(64))
        for host in hosts:
            self.call(DAEMONS, host)
        wait_until(lambda: self.call("sinfo -h -o %D%T").split() == ["2idle"])

    def call(self, command: str, host: Host | None = None) -> str:
        """Return what a shell command prints on a host, by default the first one."""
        host = host or self.hosts[0]
        words = ["bash", "-c", f"cd {self.folder} && {command}"]
        script = f"import os; os.execvp('bash', {words!r})"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {
            "HOME": str(self.folder),
            "PATH": path,
            "RUN_DIR": str(self.folder / "run"),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        log = host.folder / "printed"
        log.write_text("")
        assert host.start(["-c", script], log.name, **variables).wait(60) == 0
        return log.read_text()

    def submit(self, *options: str) -> str:
        """Submit the run, and return the number of the job."""
        words = [
            "sbatch --parsable --nodes=2 --cpus-per-task=2 --export=ALL --output=job.log",
            *options,
            str(EXAMPLES / "slurm.sh"),
            f"""dppo.remote:make --env-kwargs '{{"command": ["{self.heat}"]}}'""",
            "--ranks-per-env 2 --num-samplers 2 --num-steps 8 --update-epochs 1 --preset none",
            f"--total-timesteps {STEPS} --progress plain",
        ]
        return self.call(" ".join(words)).strip()

    @property
    def rows(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def log(self) -> str:
        return (self.folder / "job.log").read_text(errors="replace")

    def wait_for_rows(self, number: int) -> None:
        try:
            wait_until(lambda: self.rows >= number, 240)
        except AssertionError as error:
            raise AssertionError(self.log[-8000:]) from error

    def wait_for_end(self, job: str, state: str) -> None:
        """Wait for the end of a job, and for the end of all ranks within 10 s."""
        wait_until(lambda: f"JobState={state}" in self.call(f"scontrol show job {job}"), 240)
        wait_until(lambda: not any(host.processes(self.heat) for host in self.hosts), 10)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmOfTwo]:
    folder = Path(mkdtemp(dir="/var/tmp"))
    try:
        with Hosts(2, tmp_path) as hosts:
            yield SlurmOfTwo(hosts, folder)
    finally:
        shutil.rmtree(folder)


def test_ranks_under_srun_lead_to_the_same_weights_through_signals_resumes_and_a_drained_node(
    slurm: SlurmOfTwo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = slurm.submit()
    slurm.wait_for_rows(3)
    assert all(host.processes(f"rank 0:1 -- {slurm.heat}") for host in slurm.hosts)
    slurm.hosts[1].send(signal.SIGKILL, slurm.heat)
    slurm.wait_for_rows(slurm.rows + 2)
    slurm.call(f"scancel --signal=TERM {stopped}")
    slurm.wait_for_end(stopped, "FAILED")
    assert "Stopped by SIGTERM" in slurm.log, slurm.log
    drained = slurm.submit()
    slurm.wait_for_rows(slurm.rows + 2)
    slurm.call("scontrol update nodename=h2 state=drain reason=test")
    slurm.wait_for_end(drained, "COMPLETED")
    assert "Resuming from iter_" in slurm.log, slurm.log
    assert "is not bound" not in slurm.log
    use_mpi("openmpi", tmp_path, monkeypatch)
    whole = settings(
        tmp_path / "whole",
        [slurm.heat],
        ranks_per_env=2,
        cores_per_rank=0,
        num_steps=8,
        total_timesteps=STEPS,
    )
    result = dppo.train(whole)
    resumed = dppo.load_policy(slurm.folder / "run")
    assert resumed.weights.tobytes() == dppo.load_policy(result.run_dir).weights.tobytes()
