"""Eight solvers of four ranks each on three hosts: the same weights for any number of actors and after any loss.

Hosts are network namespaces of this machine (`hosts.py`), so these tests need root. All are slow.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hosts import Host, Run, cluster, possible
from mpi import compiled_heat, use_mpi
from processes import wait_until
from test_remote import settings

import dppo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not possible() or shutil.which("mpicc") is None,
        reason="needs root, iproute2, util-linux and mpicc",
    ),
]
INSTANCES = 8
RANKS = 4
STEPS = 4 * INSTANCES * 30  # of a run
CUT_S = 90.0


class Bars:
    """Runs of the heated bar on hosts that share a folder."""

    run: Run

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.heat = str(folder / "heat")

    def train(self, driver: Host, actors: int, iterations: int = 0) -> Run:
        """Start a run whose driver is on this host; let it make iterations."""
        sizes = f"--num-samplers {INSTANCES} --num-steps 4 --update-epochs 1 --num-actors {actors}"
        ranks = f"--ranks-per-env {RANKS} --cores-per-rank 0 --step-timeout-s 20 --preset none"
        kwargs = f"""--env-kwargs {{"command":["{self.heat}"]}}"""
        words = f"dppo.remote:make {kwargs} {sizes} {ranks} --total-timesteps {STEPS} --resume auto"
        self.run = Run(driver, self.hosts[0], words, self.folder / "run")
        self.run.goes_on(iterations)
        return self.run

    def ranks(self, host: Host) -> list[int]:
        """Return the processes of the ranks on a host, without their guards and launchers."""
        return host.processes(self.heat, whole=True)

    def wait_for_end(self, code: int = 0) -> None:
        """Wait for the end of a run, and for the end of all ranks and launchers within 10 s."""
        assert self.run.wait(400) == code, self.run.out[-8000:]
        wait_until(lambda: not any(host.processes(self.heat) for host in self.hosts), 10)


@pytest.fixture(scope="module")
def heat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Compile the bar in a folder that is not below /tmp, of which each host has its own."""
    folder = Path(mkdtemp(dir="/var/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        use_mpi("openmpi", tmp_path_factory.mktemp("mpi"), patch)
        yield compiled_heat(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def alone(heat: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of a run in one process."""
    whole = settings(
        tmp_path_factory.mktemp("alone") / "run",
        [heat],
        num_samplers=INSTANCES,
        ranks_per_env=RANKS,
        cores_per_rank=0,
        num_steps=4,
        total_timesteps=STEPS,
    )
    return dppo.load_policy(dppo.train(whole).run_dir).weights.tobytes()


@pytest.fixture
def bars(heat: str, tmp_path: Path) -> Iterator[Bars]:
    folder = Path(heat).parent
    with cluster(tmp_path, 3, 3, 2) as hosts:
        yield Bars(hosts, folder)
    shutil.rmtree(folder / "run")


@pytest.mark.parametrize(
    ("number", "actors"), [(signal.SIGKILL, 2), (signal.SIGKILL, 8), (signal.SIGSTOP, 8)]
)
def test_ranks_that_are_killed_or_hang_on_any_host_change_no_weight(
    number: int, actors: int, bars: Bars, alone: bytes
) -> None:
    run = bars.train(bars.hosts[0], actors, iterations=3)
    used = [host for host in bars.hosts if bars.ranks(host)]
    assert sum(len(bars.ranks(host)) for host in used) == INSTANCES * RANKS
    assert len(used) >= min(actors, 3) - 1
    for host in used:
        run.goes_on()
        os.kill(bars.ranks(host)[-1], number)
    bars.wait_for_end()
    assert run.weights == alone


@pytest.mark.proves("the host of an actor with MPI solvers: collecting, 90 s")
def test_a_host_that_is_cut_off_for_90_s_changes_no_weight_and_keeps_no_rank(
    bars: Bars, alone: bytes
) -> None:
    """Its ranks end while it is cut off: nobody else could end them, and their actors have been replaced."""
    run = bars.train(bars.hosts[0], 8, iterations=3)
    host = bars.hosts[2]
    assert bars.ranks(host)
    host.cut()
    time.sleep(CUT_S)
    wait_until(lambda: not host.processes(bars.heat), 10)
    host.heal()
    bars.wait_for_end()
    assert run.weights == alone


def test_a_run_goes_on_on_other_hosts_than_it_began(bars: Bars, alone: bytes) -> None:
    _, second, third = bars.hosts
    bars.train(second, 8, iterations=5).send(signal.SIGTERM)
    bars.wait_for_end(143)
    second.cut()
    run = bars.train(third, 2)
    bars.wait_for_end()
    assert "Resuming from iter_" in run.out
    assert run.weights == alone
