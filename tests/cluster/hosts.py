"""Hosts on one machine, to test what crosses a network. Each has its own address, host name, processes and files.

Needs root, iproute2 and util-linux. A host is a network namespace with a cable to a switch, which is another namespace,
and a tree of processes in namespaces of their own. All ends with `close`. `python tests/cluster/hosts.py` tries it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from commandline import fresh_environment
from processes import command_line, descendants

import dppo

PROGRAMS = ("ip", "tc", "nsenter", "unshare")
START_S = 90.0  # for a node of Ray to start
STARTS = 4  # Ray itself gives a node 30 s to register, which may be too little on a busy machine
FOLDER = "/tmp/work"  # of commands, on each host
GCS_PORT = 6379
PROGRAM = ("-m", "dppo")  # of Python


def possible() -> bool:
    """Return whether this machine can have such hosts."""
    return (
        os.geteuid() == 0
        and all(map(shutil.which, PROGRAMS))
        and Path("/var/run/netns").parent.is_dir()
    )


def iterations_of(run: Path) -> int:
    """Return the number of iterations of a run so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)


class Host:
    """A host: its cable can be pulled, its processes found and signalled from outside."""

    def __init__(self, number: int, prefix: str, names: Path) -> None:
        self.number = number
        self.name = f"h{number}"
        self.address = f"10.78.0.{number}"
        self._space = f"{prefix}h{number}"
        self._switch = f"{prefix}switch"
        self._cable = f"p{number}"
        self._plug_in_a_new_cable()
        self._first = self._first_process(names)

    def _plug_in_a_new_cable(self) -> None:
        inner = f"e{self.number}"
        peer = f"type veth peer name {self._cable} netns {self._switch}"
        _do(f"ip netns add {self._space}")
        _do(f"ip link add {inner} netns {self._space} {peer}")
        _do(f"ip -n {self._switch} link set {self._cable} master br0")
        _do(f"ip -n {self._switch} link set {self._cable} up")
        _do(f"ip -n {self._space} addr add {self.address}/24 dev {inner}")
        _do(f"ip -n {self._space} link set {inner} up")
        _do(f"ip -n {self._space} link set lo up")

    def _first_process(self, names: Path) -> subprocess.Popen[bytes]:
        script = f"""
            hostname {self.name}
            mount --make-rprivate /
            mount -t proc proc /proc
            mount --bind '{names}' /etc/hosts
            mount -t tmpfs -o size=2g none /dev/shm
            mount -t tmpfs -o size=4g none /tmp
            mkdir -p {FOLDER} /tmp/home /tmp/cgroups
            mount --rbind /sys/fs/cgroup /tmp/cgroups
            mount -t sysfs none /sys
            mount --move /tmp/cgroups /sys/fs/cgroup
            exec sleep infinity"""
        namespaces = ("unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child")
        words = (
            "nsenter",
            f"--net=/var/run/netns/{self._space}",
            *namespaces,
            "bash",
            "-c",
            script,
        )
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 20
        while not self._sleeper_of(process.pid):
            assert time.monotonic() < deadline, f"{self.name} did not start"
            time.sleep(0.05)
        return process

    @staticmethod
    def _sleeper_of(pid: int) -> int:
        for child in descendants(pid):
            with suppress(OSError):
                if command_line(child) == "sleep infinity":
                    return child
        return 0

    @property
    def folder(self) -> Path:
        """Return the folder in which commands run there, as this process sees it."""
        return Path(f"/proc/{self._sleeper_of(self._first.pid)}/root{FOLDER}")

    def start(self, words: Sequence[str], log: str, **env: str) -> subprocess.Popen[bytes]:
        """Start `python WORDS` on the host; its output goes to the file `log` in its folder."""
        inner = str(self._sleeper_of(self._first.pid))
        enter = ["nsenter", "--target", inner, *["--mount", "--uts", "--pid", "--ipc", "--net"]]
        enter.append(f"--wd={self.folder}")
        host_variables = {
            "HOME": "/tmp/home",
            "TMPDIR": "/tmp",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                [*enter, sys.executable, *words],
                env=fresh_environment(**(host_variables | env)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def join(self, head: Host, cpus: int, **env: str) -> None:
        """Start a node of Ray here, the head if this is `head`; return when it runs."""
        role = f"--address={head.address}:{GCS_PORT}"
        if head is self:
            role = f"--head --port={GCS_PORT} --include-dashboard=false"
        sizes = f"--num-cpus={cpus} --object-store-memory=100000000"
        place = f"--node-ip-address={self.address} --disable-usage-stats"
        words = f"-m ray.scripts.scripts start {role} {sizes} {place}".split()
        for _ in range(STARTS):
            process = self.start(words, "ray.log", **env)
            with suppress(subprocess.TimeoutExpired):
                if process.wait(START_S) == 0:
                    return
            process.kill()
            process.wait()
            self.send(signal.SIGKILL, "ray")
            time.sleep(1)
        raise AssertionError((self.folder / "ray.log").read_text())

    def processes(self, title: str, *, whole: bool = False) -> list[int]:
        """Return the ids, on this machine, of the processes of the host whose command line contains, or is, `title`."""
        found = []
        here = self._processes_of(self._sleeper_of(self._first.pid))
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            with suppress(OSError):
                line = command_line(pid)
                is_titled = line == title if whole else title in line
                if is_titled and self._processes_of(pid) == here:
                    found.append(pid)
        return sorted(found)

    @staticmethod
    def _processes_of(pid: int) -> str:
        """Return the namespace of a process that others of its host share."""
        return os.readlink(f"/proc/{pid}/ns/pid")

    def send(self, number: int, title: str) -> None:
        """Send a signal to these processes."""
        for pid in self.processes(title):
            os.kill(pid, number)

    def cut(self) -> None:
        """Pull the cable: packets are lost in silence."""
        _do(f"ip -n {self._switch} link set {self._cable} down")

    def heal(self) -> None:
        """Plug it in again."""
        _do(f"ip -n {self._switch} link set {self._cable} up")

    def slow(self, rate: str) -> None:
        """Limit what the host sends, such as `1mbit`; packets beyond that wait or are lost."""
        limit = f"tc qdisc replace dev e{self.number} root tbf rate {rate} burst 16kb latency 400ms"
        _do(f"nsenter --net=/var/run/netns/{self._space} {limit}")

    def close(self) -> None:
        """End all processes of the host; pull its cable."""
        for pid in descendants(self._first.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._first.kill()
        self._first.wait()
        _do(f"ip netns del {self._space}")


class Hosts:
    """Some hosts at one switch: `with Hosts(3) as (head, driver, other)`."""

    def __init__(self, number: int, folder: Path) -> None:
        self._prefix = f"dppo{os.getpid()}-"
        self._number = number
        self._names = folder / "hosts"
        self._hosts: list[Host] = []

    def __enter__(self) -> list[Host]:
        lines = ["127.0.0.1 localhost", *(f"10.78.0.{k} h{k}" for k in range(1, self._number + 1))]
        self._names.write_text("\n".join(lines) + "\n")
        _do(f"ip netns add {self._prefix}switch")
        _do(f"ip -n {self._prefix}switch link add br0 type bridge")
        _do(f"ip -n {self._prefix}switch link set br0 up")
        try:
            for number in range(1, self._number + 1):
                self._hosts.append(Host(number, self._prefix, self._names))
        except BaseException:
            self.__exit__()
            raise
        return self._hosts

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()
        _do(f"ip netns del {self._prefix}switch")


@contextmanager
def cluster(folder: Path, *cpus: int) -> Iterator[list[Host]]:
    """Yield hosts with a node of Ray each, with so many CPUs; the first is the head."""
    with Hosts(len(cpus), folder) as hosts:
        for host, count in zip(hosts, cpus, strict=True):
            host.join(hosts[0], count)
        yield hosts


class Run:
    """`dppo train WORDS` on the cluster of a head; its driver is on a host, in whose folder the run is by default."""

    def __init__(
        self,
        driver: Host,
        head: Host,
        words: str,
        run_dir: Path | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.driver = driver
        self.folder = run_dir or driver.folder / "run"
        command = [*program, "train", *words.split(), f"--address={head.address}:{GCS_PORT}"]
        place = ["--progress=plain", f"--run-dir={run_dir or 'run'}"]
        self.process = driver.start([*command, *place], "out")

    @property
    def out(self) -> str:
        return (self.driver.folder / "out").read_text(errors="replace")

    @property
    def iterations(self) -> int:
        return iterations_of(self.folder)

    @property
    def weights(self) -> bytes:
        return dppo.load_policy(self.folder).weights.tobytes()

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None or happened(), self.out
            assert time.monotonic() < deadline, self.out
            time.sleep(0.02)

    def goes_on(self, number: int = 2) -> None:
        """Wait for so many more iterations."""
        reached = self.iterations + number
        self.wait_until(lambda: self.iterations >= reached)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s:g} s:\n{self.out}") from None

    def send(self, number: int) -> None:
        self.driver.send(number, "--progress")
        # nsenter stops as well where the process that it waits for is stopped
        if number == signal.SIGCONT:
            self.process.send_signal(number)
