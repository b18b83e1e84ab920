"""The server of a further node: folders and commands for those who know its secret, ended with their connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import alive, wait_until

from dppo.hosts import keeper
from dppo.slots import guard
from dppo.slots import node as slots_node
from dppo.slots.guard import HELLO_S, NODES, marked_processes
from dppo.slots.layout import Layout, Node
from dppo.slots.node import NodeLease
from dppo.slots.program import GUARD, SolverError
from dppo.slots.slots import Slots
from dppo.transports.ray.nodes import NodeKeeper

MARK = "a mark of these tests alone"
SECRET = "a secret of these tests"


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """Return the process with which the server ends."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def node(owner: subprocess.Popen[bytes]) -> Node:
    """Return this machine as a node with a server."""
    first = {"address": "127.0.0.1", "secret": SECRET, "owner": owner.pid}
    answer = subprocess.run(
        [sys.executable, "-m", "dppo.slots.node"],
        input=json.dumps(first).encode(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return Node("other", "127.0.0.1", "", int(answer.stdout), SECRET)


def agent(node: Node, folder: Path, command: str, **variables: str) -> subprocess.Popen[str]:
    """Start what a launcher starts in place of ssh."""
    access = json.dumps({node.address: (node.port, node.secret)})
    words = ["agent", node.address, "exec", command]
    environment = {**os.environ, NODES: access, **variables}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", GUARD, *words],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_agent_prints_and_exits_as_its_command_does(node: Node, tmp_path: Path) -> None:
    command = agent(node, tmp_path, "sh -c 'pwd; echo $COLOR; exit 7'", COLOR="blue")
    _, printed = command.communicate(timeout=30)
    assert printed.split() == [str(tmp_path), "blue"]
    assert command.returncode == 7


def test_an_agent_runs_commands_for_its_own_node_itself(node: Node, tmp_path: Path) -> None:
    agent = [sys.executable, "-I", "-S", GUARD, "agent"]
    words = [*agent, "localhost", "echo", "here"]
    no_nodes = {NODES: "{}"}
    answer = subprocess.run(words, env=no_nodes, capture_output=True, check=True, timeout=30)
    assert answer.stdout == b"here\n"


def test_a_command_ends_with_its_agent_and_with_the_owner_of_the_server(
    node: Node, tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    detached = "sh -c 'setsid sleep 1000 & echo $! >pid; wait'"
    for end in ("agent", "owner"):
        command = agent(node, tmp_path, detached)
        file = tmp_path / "pid"
        wait_until(lambda file=file: file.exists() and file.read_text())  # type: ignore[misc]
        pid = int(file.read_text())
        assert alive(pid)
        ended = command if end == "agent" else owner
        ended.kill()
        wait_until(lambda pid=pid: not alive(pid), 10)  # type: ignore[misc]
        command.communicate(timeout=10)
        file.unlink()


def test_what_a_command_has_left_ends_if_its_agent_is_gone_before_it(
    node: Node, tmp_path: Path
) -> None:
    detached = "sh -c 'setsid sleep 1000 & echo $! >pid; read line <go; echo; echo; exit 0'"
    os.mkfifo(tmp_path / "go")
    command = agent(node, tmp_path, detached)
    file = tmp_path / "pid"
    wait_until(lambda: file.exists() and file.read_text())
    pid = int(file.read_text())
    shell = psutil.Process(pid).parent()
    assert shell is not None

    attending = shell.parent()
    assert attending is not None
    attending.suspend()  # so that it notices both ends at once
    command.kill()
    command.communicate(timeout=10)
    (tmp_path / "go").write_text("\n")
    wait_until(lambda: not alive(shell.pid))
    attending.resume()
    wait_until(lambda: not alive(pid), 10)


def test_an_agent_names_a_node_that_does_not_answer(
    node: Node, owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    owner.kill()
    wait_until(lambda: not _answers(node), 10)
    command = agent(node, tmp_path, "true")
    _, printed = command.communicate(timeout=30)
    assert printed.startswith(f"node {node.address} does not answer: ")
    assert command.returncode == 255


def test_a_program_that_is_started_again_leases_its_folder_once(node: Node, tmp_path: Path) -> None:
    slots = Slots(Layout(2, 0, (Node("here", "127.0.0.1"), node)))
    counts = []
    for _ in range(3):
        slots.launch(["true"], tmp_path, as_it_is=True).terminate(wait_s=30)
        counts.append(_connections(node))
    slots.close()
    assert counts == [2, 2, 2]
    assert _connections(node) == 0


def _connections(node: Node) -> int:
    """Return how many connections this process has with the server of a node."""
    ports = [
        connection.raddr.port
        for connection in psutil.Process().net_connections("tcp4")
        if connection.raddr
    ]
    return ports.count(node.port)


def test_a_lease_makes_folders_and_ends_what_has_its_mark(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    lease = NodeLease(node, 0, MARK, str(folder))
    assert lease.cores == []
    assert folder.is_dir()

    NodeLease(node, 0, "the mark of another lease", str(tmp_path)).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SolverError, match=r"node other: .*Not a directory"):
        NodeLease(node, 0, MARK, str(tmp_path / "file" / "folder"))

    marked = subprocess.Popen(["sleep", "1000"], env={slots_node.MARK: MARK})
    lease.close()
    assert marked.wait(20) == -signal.SIGTERM

    wait_until(lambda: not folder.exists(), 10)
    assert tmp_path.is_dir()


def test_a_process_that_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is empty for some milliseconds, so that a look at it would miss it."""
    looks = iter([([], True), ([7], False)])
    monkeypatch.setattr(guard, "look_for", lambda mark: next(looks))
    assert guard.marked_processes(MARK) == [7]


def test_the_keeper_waits_for_a_process_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    real_look = keeper.look_for
    looks = 0

    def look_for(marker: bytes) -> tuple[set[int], bool]:
        nonlocal looks
        looks += 1
        return (set(), True) if looks == 1 else real_look(marker)

    monkeypatch.setattr(keeper, "look_for", look_for)
    marked = subprocess.Popen(["sleep", "1000"], env={keeper.MARKER: MARK})
    keeper._end_marked(MARK.encode(), signal.SIGTERM)
    assert marked.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("look_for", [guard.look_for, keeper.look_for], ids=["guard", "keeper"])
def test_a_process_without_an_environment_is_none_that_begins(look_for: Callable[..., Any]) -> None:
    """A program may be started without one, and nobody must wait for it."""
    mark: Any = MARK if look_for is guard.look_for else MARK.encode()
    empty = subprocess.Popen(["sleep", "1000"], env={})
    wait_until(lambda: Path(f"/proc/{empty.pid}/cmdline").read_bytes() != b"", 20)
    assert Path(f"/proc/{empty.pid}/environ").read_bytes() == b""
    wait_until(lambda: not look_for(mark)[1], 20)  # a process of somebody else may begin
    empty.kill()
    empty.wait()


def test_a_lost_node_is_named(
    node: Node, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_node, "ENDING_S", 0.0)
    lease = NodeLease(node, 0, MARK)
    owner.kill()
    lease.wait()
    lease.close()
    wait_until(lambda: not _answers(node), 10)
    with pytest.raises(SolverError, match="node other does not answer"):
        Slots(Layout(2, 0, (Node("here", "127.0.0.1"), node)))


def _answers(node: Node) -> bool:
    with socket.socket() as connection:
        return not connection.connect_ex((node.address, node.port))


def test_a_stranger_is_not_served(node: Node, tmp_path: Path) -> None:
    command = f"touch {tmp_path}/made"
    request = {"cores": 0, "mark": MARK, "folder": "/", "command": command, "variables": {}}
    request["secret"] = "another"
    for line in (json.dumps(request), "[]", "nonsense"):
        with socket.create_connection((node.address, node.port), HELLO_S) as connection:
            connection.sendall(line.encode() + b"\n")
            assert connection.recv(1) == b""
    assert not (tmp_path / "made").exists()
    NodeLease(node, 0, MARK).close()


def test_a_node_without_the_same_python_or_dppo_is_named() -> None:
    missing = "/no/such/python"
    host = socket.gethostname()
    assert NodeKeeper().start([GUARD, missing]) == f"{missing} is missing on node {host}"


def test_a_mark_that_any_process_may_have_ends_nothing() -> None:
    with pytest.raises(AssertionError, match="may be in the environment of any process"):
        marked_processes("")
