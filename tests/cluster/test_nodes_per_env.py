"""Environments with ranks on several hosts of a cluster: equal weights, and no rank is left on any host after a loss.

Hosts are network namespaces of this machine (`hosts.py`), so these tests need root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hosts import Host, Hosts, iterations_of, possible
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
SIZES: dict[str, Any] = {
    "num_samplers": 1,
    "num_steps": 4,
    "total_timesteps": 4 * 14,
    "update_epochs": 1,
    "ranks_per_env": 4,
}
STARTED = ("orted", "prted", "hydra_pmi_proxy", "guard.py")  # beside ranks


class Spread:
    """Hosts of a cluster, and a driver on the first one, which has no cores for actors."""

    def __init__(self, hosts: list[Host], folder: Path, heat: str) -> None:
        self.hosts = hosts
        self._heat = heat
        self._run = folder / "run"
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self, **changes: Any) -> None:
        """Start a run of one actor whose environment has two ranks on each of two hosts."""
        flags = SIZES | {
            "num_actors": 1,
            "nodes_per_env": 2,
            "address": f"{self.hosts[0].address}:6379",
            "run_dir": self._run,
            "progress": "plain",
            "preset": "none",
            "env_kwargs": json.dumps({"command": [self._heat]}),
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in (flags | changes).items()]
        self._driver = self.hosts[0].start(
            ["-m", "dppo", "train", "dppo.remote:make", *words], "out"
        )

    @property
    def out(self) -> str:
        return (self.hosts[0].folder / "out").read_text(errors="replace")

    @property
    def rows(self) -> int:
        return iterations_of(self._run)

    def goes_on(self, number: int = 2) -> None:
        """Wait for more iterations."""
        reached = self.rows + number
        self.wait_until(lambda: self.rows >= reached)

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 240) -> None:
        assert self._driver is not None
        driver = self._driver
        try:
            wait_until(lambda: happened() or driver.poll() is not None, timeout_s)
            assert happened()
        except AssertionError as error:
            raise AssertionError(self.out[-8000:]) from error

    def weights(self) -> bytes:
        """Wait for the end of the run; return its weights."""
        assert self._driver is not None
        driver = self._driver
        self.wait_until(lambda: driver.poll() == 0)
        return dppo.load_policy(self._run).weights.tobytes()

    def ranks(self, host: Host) -> list[int]:
        """Return the ranks of a host, without their guards."""
        return host.processes(self._heat, whole=True)

    def left(self, hosts: Sequence[Host]) -> list[int]:
        """Return the ranks, guards and daemons of launchers on these hosts."""
        titles = (*STARTED, self._heat)
        return [pid for host in hosts for title in titles for pid in host.processes(title)]

    def kill(self) -> None:
        """Kill the driver."""
        self.hosts[0].send(signal.SIGKILL, "--progress")
        self.close()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.wait()

    def further_host(self) -> Host:
        """Return the host of ranks on which there is no actor."""
        [host] = [
            host for host in self.hosts if self.ranks(host) and not host.processes("ray::PPOActor")
        ]
        return host


@contextmanager
def spread(folder: Path, heat: str, *cpus: int) -> Iterator[Spread]:
    with Hosts(len(cpus), folder) as hosts:
        for host, count in zip(hosts, cpus, strict=True):
            host.join(hosts[0], count)
        run = Spread(hosts, folder, heat)
        yield run
    run.close()


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
    whole = settings(folder / "whole", [heat], cores_per_rank=0, **SIZES)
    return dppo.load_policy(dppo.train(whole).run_dir).weights.tobytes()


def test_ranks_on_two_hosts_lead_to_the_weights_of_one_when_one_is_killed_or_hangs(
    folder: Path, heat: str
) -> None:
    with spread(folder, heat, 0, 2, 2) as run:
        run.start(step_timeout_s=15)
        run.goes_on(3)
        assert [len(run.ranks(host)) for host in run.hosts] == [0, 2, 2]
        os.kill(run.ranks(run.further_host())[0], signal.SIGKILL)
        run.goes_on()
        os.kill(run.ranks(run.further_host())[1], signal.SIGSTOP)
        run.goes_on()
        weights = run.weights()
        assert "is not bound" not in run.out
        wait_until(lambda: not run.left(run.hosts), 10)
    assert weights == weights_on_one_host(folder, heat)


@pytest.mark.proves("has ranks on several nodes, and one node is cut off")
@pytest.mark.parametrize("place", ["beside its actor", "apart from its actor"])
def test_no_rank_is_left_on_either_side_of_a_cut_and_the_actor_is_replaced(
    place: str, folder: Path, heat: str
) -> None:
    with spread(folder, heat, 0, 2, 2, 2) as run:
        run.start()
        run.goes_on(3)
        before = [host for host in run.hosts if run.ranks(host)]
        further = run.further_host()
        cut_off = further
        if place == "beside its actor":
            [cut_off] = [host for host in before if host is not further]
        cut_off.cut()
        first_ranks = {pid for host in before for pid in run.ranks(host)}
        wait_until(lambda: not any(first_ranks & set(run.ranks(host)) for host in before), 10)
        wait_until(lambda: not run.left([cut_off]), 5)
        weights = run.weights()
        logs = [path for host in before for path in host.folder.parent.glob("dppo-log-*")]
        reason = f"node {further.name}, which has ranks of this actor's environments, is lost"
        assert any(reason in log.read_text() for log in logs), run.out
        wait_until(lambda: not run.left(run.hosts), 10)
    assert weights == weights_on_one_host(folder, heat)


def test_no_rank_is_left_on_any_host_after_the_driver_is_killed(folder: Path, heat: str) -> None:
    """The next run finds all cores free."""
    with spread(folder, heat, 0, 2, 2) as run:
        run.start()
        run.goes_on(3)
        run.kill()
        wait_until(lambda: not run.left(run.hosts), 10)
        wait_until(lambda: not any(host.processes("dppo.slots.node") for host in run.hosts), 30)
        run.start(resume="auto")
        run.goes_on()
