"""Environments with ranks on several hosts of a cluster: equal weights, and no rank is left on any host after a loss.

Hosts are network namespaces of this machine (`hosts.py`), so these tests need root.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hosts import Host, Run, cluster, possible
from mpi import FAMILIES, compiled_heat, use_mpi
from processes import wait_until
from test_remote import settings

import dppo
from dppo.machine import usable_cores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not possible() or shutil.which("mpicc") is None or usable_cores() < 2,
        reason="needs root, iproute2, util-linux, an MPI and two cores",
    ),
]
SIZES = {"num_samplers": 1, "num_steps": 4, "total_timesteps": 4 * 40, "ranks_per_env": 4}
STARTED = ("orted", "prted", "hydra_pmi_proxy", "guard.py")  # beside ranks


class Spread:
    """Runs on hosts of a cluster. The driver is on the first one, which has no cores for actors."""

    run: Run

    def __init__(self, hosts: list[Host], folder: Path, heat: str) -> None:
        self.hosts = hosts
        self._heat = heat
        self._folder = folder

    def start(self, flags: str = "") -> Run:
        """Start a run of one actor whose environment has two ranks on each of two hosts; let it make iterations."""
        sizes = " ".join(f"--{name} {value}" for name, value in SIZES.items())
        where = "--num-actors 1 --nodes-per-env 2 --preset none --update-epochs 1"
        kwargs = f"""--env-kwargs {{"command":["{self._heat}"]}}"""
        words = f"dppo.remote:make {sizes} {where} {kwargs} {flags}"
        self.run = Run(self.hosts[0], self.hosts[0], words, self._folder / "run")
        self.run.goes_on(3)
        return self.run

    def weights(self) -> bytes:
        """Wait for the end of the run; return its weights."""
        assert self.run.wait(240) == 0, self.run.out[-8000:]
        return self.run.weights

    def ranks(self, host: Host) -> list[int]:
        """Return the ranks of a host, without their guards."""
        return host.processes(self._heat, whole=True)

    def left(self, hosts: Sequence[Host]) -> list[int]:
        """Return the ranks, guards and daemons of launchers on these hosts."""
        titles = (*STARTED, self._heat)
        return [pid for host in hosts for title in titles for pid in host.processes(title)]

    def further_host(self) -> Host:
        """Return the host of ranks on which there is no actor."""
        [host] = [
            host for host in self.hosts if self.ranks(host) and not host.processes("ray::PPOActor")
        ]
        return host


@contextmanager
def spread(folder: Path, heat: str, *cpus: int) -> Iterator[Spread]:
    with cluster(folder, *cpus) as hosts:
        runs = Spread(hosts, folder, heat)
        yield runs
    runs.run.process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that all hosts see."""
    path = Path(mkdtemp(dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=FAMILIES)
def heat(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the heated bar of Open MPI, then of MPICH."""
    use_mpi(request.param, folder, monkeypatch)
    # the hosts have the same two cores
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    monkeypatch.setenv("DPPO_NAP", "1")
    return compiled_heat(folder, substeps=1)


def weights_on_one_host(folder: Path, heat: str) -> bytes:
    whole = settings(folder / "whole", [heat], cores_per_rank=0, update_epochs=1, **SIZES)
    return dppo.load_policy(dppo.train(whole).run_dir).weights.tobytes()


def test_ranks_on_two_hosts_lead_to_the_weights_of_one_when_one_is_killed_or_hangs(
    folder: Path, heat: str
) -> None:
    with spread(folder, heat, 0, 2, 2) as bars:
        run = bars.start("--step-timeout-s 15")
        assert [len(bars.ranks(host)) for host in bars.hosts] == [0, 2, 2]
        first, _ = bars.ranks(bars.further_host())
        os.kill(first, signal.SIGKILL)
        run.goes_on()
        _, second = bars.ranks(bars.further_host())
        os.kill(second, signal.SIGSTOP)
        run.goes_on()
        weights = bars.weights()
        assert "is not bound" not in run.out
        wait_until(lambda: not bars.left(bars.hosts), 10)
    assert weights == weights_on_one_host(folder, heat)


@pytest.mark.proves("has ranks on several nodes, and one node is cut off")
@pytest.mark.parametrize("place", ["beside its actor", "apart from its actor"])
def test_no_rank_is_left_on_either_side_of_a_cut_and_the_actor_is_replaced(
    place: str, folder: Path, heat: str
) -> None:
    with spread(folder, heat, 0, 2, 2, 2) as bars:
        bars.start()
        before = [host for host in bars.hosts if bars.ranks(host)]
        further = bars.further_host()
        cut_off = further
        if place == "beside its actor":
            [cut_off] = [host for host in before if host is not further]
        cut_off.cut()
        first_ranks = {pid for host in before for pid in bars.ranks(host)}

        def first_ranks_are_gone() -> bool:
            return not any(first_ranks & set(bars.ranks(host)) for host in before)

        wait_until(first_ranks_are_gone, 10)
        wait_until(lambda: not bars.left([cut_off]), 5)
        weights = bars.weights()
        logs = []
        for host in before:
            paths = host.folder.parent.glob("dppo-log-*")
            logs += [path.read_text() for path in paths]
        reason = f"node {further.name}, which has ranks of this actor's environments, is lost"
        assert any(reason in log for log in logs), bars.run.out
        wait_until(lambda: not bars.left(bars.hosts), 10)
    assert weights == weights_on_one_host(folder, heat)


def test_no_rank_is_left_on_any_host_after_the_driver_is_killed(folder: Path, heat: str) -> None:
    """The next run finds all cores free."""
    with spread(folder, heat, 0, 2, 2) as bars:
        run = bars.start()
        run.send(signal.SIGKILL)
        run.process.wait()
        wait_until(lambda: not bars.left(bars.hosts), 10)
        wait_until(lambda: not any(host.processes("dppo.slots.node") for host in bars.hosts), 30)
        bars.start("--resume auto")
