"""Slots on two hosts without Ray: each rank is bound on its host, and all end together, also when a cable is cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hosts import Host, Hosts, possible
from mpi import FAMILIES, use_mpi
from processes import wait_until

from dppo.machine import usable_cores

pytestmark = pytest.mark.skipif(
    not possible() or shutil.which("mpirun") is None or usable_cores() < 2,
    reason="needs root, iproute2, util-linux, an MPI and two cores",
)
OWNER = """
import json, os, subprocess, sys, time
first = json.dumps({"address": sys.argv[1], "secret": "a secret", "owner": os.getpid()})
words = [sys.executable, "-m", "dppo.slots.node"]
print(subprocess.run(words, input=first, stdout=-1, text=True).stdout, flush=True)
time.sleep(1000)
"""
DRIVER = """
import json, os, sys
from dppo.slots.layout import Layout, Node
from dppo.slots.slots import Slots
port = int(sys.argv[1])
os.environ["DPPO_NODES"] = json.dumps({"10.78.0.2": [port, "a secret"]})
nodes = (Node("h1", "10.78.0.1"), Node("h2", "10.78.0.2", "", port, "a secret"))
slots = Slots(Layout(4, 1, nodes))
program = slots.launch(sys.argv[2:], os.getcwd())
program.terminate(wait_s=60)
print(json.dumps([slots.hosts, slots.cores, program.last_lines(), program.end()]), flush=True)
slots.close()
"""
# into a file: Open MPI may print a part of a line between those of another rank
CORES = """
import os, socket, sys
host = socket.gethostname()
line = " ".join(map(str, [host, *os.sched_getaffinity(0), os.getcwd()]))
open(f"{sys.argv[1]}/{host}-{os.getpid()}", "w").write(line)
"""
SLEEPS = ("sleep", "1000")


class Pair:
    """Two hosts; a driver on the first one has two ranks on each."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.first, self.second = hosts
        self.folder = folder
        """A folder that both hosts see."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> None:
        """Start a program on four ranks."""
        log = self.second.folder / "server"
        server = self.second.start(["-c", OWNER, self.second.address], log.name)
        self._processes.append(server)
        wait_until(lambda: log.exists() and log.read_text().strip())
        port = log.read_text().strip()
        self._processes.append(self.first.start(["-c", DRIVER, port, *words], "driver"))

    def start_sleeping(self) -> None:
        """Start ranks that do nothing; wait for all of them."""
        self.start(*SLEEPS)
        wait_until(lambda: len(ranks(self.first)) == len(ranks(self.second)) == 2)

    def end(self) -> list[Any]:
        """Wait for the end of the driver; return what it prints."""
        assert self._processes[-1].wait(60) == 0
        printed: list[Any] = json.loads((self.first.folder / "driver").read_text())
        return printed

    def left(self) -> list[int]:
        """Return ranks, guards and daemons of launchers on both hosts."""
        titles = ("sleep 1000", "guard.py", "orted", "prted", "hydra_pmi_proxy", "mpiexec")
        hosts = self.first, self.second
        return [pid for host in hosts for title in titles for pid in host.processes(title)]

    def close(self) -> None:
        for process in self._processes:
            process.wait()


def ranks(host: Host) -> list[int]:
    """Return the ranks that sleep on a host, without guards and launchers."""
    title = " ".join(SLEEPS)
    return host.processes(title, whole=True)


@pytest.fixture(params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    folder = Path(mkdtemp(dir="/var/tmp"))
    use_mpi(request.param, folder, monkeypatch)
    with Hosts(2, tmp_path) as hosts:
        pair = Pair(hosts, folder)
        yield pair
    pair.close()
    shutil.rmtree(folder)


def test_each_rank_is_bound_on_its_host(pair: Pair) -> None:
    written = pair.folder / "written"
    written.mkdir()
    pair.start(sys.executable, "-c", CORES, str(written))
    names, cores, _, _ = pair.end()
    lines = [file.read_text() for file in written.iterdir()]
    assert names == ["h1", "h1", "h2", "h2"]
    assert cores[:2] == cores[2:]
    pairs = zip(names, cores, strict=True)
    assert sorted(lines) == sorted(f"{name} {core[0]} /tmp/work" for name, core in pairs)


@pytest.mark.slow
def test_a_rank_that_dies_on_another_host_is_named_and_all_end(pair: Pair) -> None:
    pair.start_sleeping()
    os.kill(ranks(pair.second)[0], signal.SIGKILL)
    assert " on h2 by SIGKILL)" in pair.end()[-1]
    wait_until(lambda: not pair.left(), 10)


@pytest.mark.slow
def test_all_ranks_end_on_both_sides_of_a_cut(pair: Pair) -> None:
    pair.start_sleeping()
    pair.second.cut()
    wait_until(lambda: not pair.left(), 10)
    assert ", h2, does not answer)" in pair.end()[-1]
