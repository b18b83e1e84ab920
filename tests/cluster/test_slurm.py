"""`examples/slurm.sh` with real daemons of Slurm on one and two hosts: runs are saved, and have the same weights."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi import compiled_heat, use_mpi
from processes import wait_until
from slurm import Slurm, slurm_of, slurm_possible
from test_remote import settings

import dppo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not slurm_possible(),
        reason="needs root, iproute2, and slurmd, slurmctld, munge of Debian in PATH",
    ),
]
with_mpi = pytest.mark.skipif(shutil.which("mpicc") is None, reason="needs mpicc")
TWO_NODES = "--nodes=2 --cpus-per-task=2"


@dataclass
class HeatedBars:
    """Runs of the heated bar on two nodes."""

    slurm: Slurm
    instances: int
    iterations: int
    cores_per_rank: int
    ranks_per_env: int = 2
    nodes_per_env: int = 1
    pause_ms: int = 0
    substeps: int = 20

    def __post_init__(self) -> None:
        self.heat = compiled_heat(self.slurm.folder, self.pause_ms, self.substeps)
        self._steps = self.instances * 8 * self.iterations

    def submit(self) -> str:
        return self.slurm.submit(
            TWO_NODES,
            f"""dppo.remote:make --env-kwargs '{{"command": ["{self.heat}"]}}'""",
            f"--ranks-per-env {self.ranks_per_env} --nodes-per-env {self.nodes_per_env} "
            f"--cores-per-rank {self.cores_per_rank} --num-samplers {self.instances} "
            "--num-steps 8 --update-epochs 1 --preset none --progress plain "
            f"--total-timesteps {self._steps}",
        )

    def ranks(self) -> list[int]:
        """Return the number of ranks on each host."""
        return [len(host.processes(self.heat, whole=True)) for host in self.slurm.hosts]

    def wait_for_end(self, job: str, state: str) -> None:
        """Wait for the end of a job, and for the end of all ranks and launchers within 10 s."""
        self.slurm.wait_for_state(job, state)
        wait_until(lambda: not any(host.processes(self.heat) for host in self.slurm.hosts), 10)

    def stop(self, job: str) -> None:
        """Send SIGTERM to a job, which saves its run."""
        self.slurm.call(f"scancel --signal=TERM {job}")
        self.wait_for_end(job, "FAILED")
        assert "Stopped by SIGTERM" in self.slurm.log, self.slurm.log

    def end_with_the_weights_of_one_process(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_mpi("openmpi", folder, monkeypatch)
        whole = settings(
            folder / "whole",
            [compiled_heat(folder, substeps=self.substeps)],
            num_samplers=self.instances,
            ranks_per_env=self.ranks_per_env,
            cores_per_rank=0,
            num_steps=8,
            total_timesteps=self._steps,
        )
        result = dppo.train(whole)
        resumed = dppo.load_policy(self.slurm.folder / "run")
        assert resumed.weights.tobytes() == dppo.load_policy(result.run_dir).weights.tobytes()


def test_a_job_on_one_node_saves_at_sigterm_and_continues(tmp_path: Path) -> None:
    sizes = "--num-samplers 2 --num-steps 64 --total-timesteps 40000 --progress plain"
    with slurm_of(1, tmp_path) as slurm:
        first = slurm.submit("", "CartPole-v1", sizes)
        slurm.wait_for_rows(6)
        slurm.call(f"scancel --signal=TERM {first}")
        slurm.wait_for_state(first, "FAILED")
        assert "Stopped by SIGTERM" in slurm.log, slurm.log
        assert "Between 1 and 2 Ray actors" in slurm.log, slurm.log
        second = slurm.submit("", "CartPole-v1", sizes)
        slurm.wait_for_state(second, "COMPLETED")
        assert "Resuming from iter_" in slurm.log, slurm.log


@with_mpi
def test_ranks_under_srun_lead_to_the_same_weights_through_signals_resumes_and_a_drained_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_of(2, tmp_path) as slurm:
        bars = HeatedBars(slurm, instances=2, iterations=30, cores_per_rank=1)
        stopped = bars.submit()
        slurm.wait_for_rows(3)
        assert all(host.processes(f"rank 0:1 -- {bars.heat}") for host in slurm.hosts)
        slurm.hosts[1].send(signal.SIGKILL, bars.heat)
        slurm.wait_for_rows(slurm.rows + 2)
        bars.stop(stopped)
        drained = bars.submit()
        slurm.wait_for_rows(slurm.rows + 2)
        slurm.call("scontrol update nodename=h2 state=drain reason=test")
        bars.wait_for_end(drained, "COMPLETED")
        assert "Resuming from iter_" in slurm.log, slurm.log
        assert "is not bound" not in slurm.log
        bars.end_with_the_weights_of_one_process(tmp_path, monkeypatch)


@with_mpi
def test_ranks_of_one_solver_on_two_nodes_are_started_by_srun_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the hosts have the same two cores
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    monkeypatch.setenv("DPPO_NAP", "1")
    with slurm_of(2, tmp_path) as slurm:
        bars = HeatedBars(
            slurm, 1, iterations=8, cores_per_rank=1, ranks_per_env=4, nodes_per_env=2, substeps=1
        )
        stopped = bars.submit()
        slurm.wait_for_rows(2)
        assert bars.ranks() == [2, 2]
        [further] = [host for host in slurm.hosts if not host.processes("ray::PPOActor")]
        os.kill(further.processes(bars.heat, whole=True)[0], signal.SIGKILL)
        slurm.wait_for_rows(slurm.rows + 2)
        bars.stop(stopped)
        resumed = bars.submit()
        bars.wait_for_end(resumed, "COMPLETED")
        assert "is not bound" not in slurm.log
        bars.end_with_the_weights_of_one_process(tmp_path, monkeypatch)


@with_mpi
def test_eight_solvers_of_four_ranks_go_on_after_the_time_limit_and_when_their_job_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 32 ranks share two cores
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    monkeypatch.setenv("DPPO_NAP", "1")
    with slurm_of(2, tmp_path) as slurm:
        bars = HeatedBars(
            slurm, 8, iterations=150, cores_per_rank=0, ranks_per_env=4, pause_ms=50, substeps=1
        )
        job = bars.submit()
        slurm.wait_for_rows(3)
        wait_until(lambda: bars.ranks() == [16, 16], 120)
        slurm.call(f"scontrol update jobid={job} timelimit=1")
        bars.wait_for_end(job, "TIMEOUT")
        assert slurm.log.count("Stopped by SIGTERM") == 1, slurm.log

        slurm.call(f"scontrol requeue {job}")
        slurm.call(f"scontrol update jobid={job} timelimit=60 starttime=now")
        slurm.wait_for_rows(slurm.rows + 2)
        assert slurm.log.count("Resuming from iter_") == 1, slurm.log
        slurm.call(f"scontrol requeue {job}")
        bars.wait_for_end(job, "PENDING")
        assert slurm.log.count("Stopped by SIGTERM") == 2, slurm.log

        slurm.call(f"scontrol update jobid={job} starttime=now")
        bars.wait_for_end(job, "COMPLETED")
        assert slurm.log.count("Resuming from iter_") == 2, slurm.log
        bars.end_with_the_weights_of_one_process(tmp_path, monkeypatch)
