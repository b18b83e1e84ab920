"""The nodes of an actor whose environments have ranks on several: a server on each further one, and its loss."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dppo.errors import ConfigError
from dppo.log import logger
from dppo.slots.guard import NODES
from dppo.slots.layout import Node
from dppo.slots.node import NodeLease
from dppo.slots.program import GUARD, SolverError
from dppo.transports.ray.calls import RayCalls, calls_ray

START_S = 60.0  # longest start of the servers


class NodeKeeper:
    """Holds the cores of an actor on a further node, and owns the server there. It ends with the actor."""

    def start(self, paths: Sequence[str]) -> Node | str:
        """Start the server; return the node, or the first of the paths that is missing there."""
        for path in paths:
            if not os.path.exists(path):
                return f"{path} is missing on node {socket.gethostname()}"
        node = _this_node(secret=secrets.token_hex(16))
        server = subprocess.Popen(
            [sys.executable, "-m", "dppo.slots.node"],
            cwd="/",
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        first = {"address": node.address, "secret": node.secret, "owner": os.getpid()}
        port, _ = server.communicate(json.dumps(first).encode() + b"\n")
        return Node(node.host, node.address, node.slurm_name, int(port), node.secret)


def _this_node(secret: str = "") -> Node:
    host = socket.gethostname()
    slurm_name = os.environ.get("SLURMD_NODENAME", host)
    return Node(host, ray.util.get_node_ip_address(), slurm_name, secret=secret)


class ActorNodes:
    """The nodes of this actor, with servers on all but its own. If one of them is lost, the actor ends."""

    def __init__(self, group: PlacementGroup) -> None:
        """Start the servers; end this process if a node is lost. Raise ConfigError if one lacks dppo at this path."""
        # handles of the servers, which end when the handles are dropped
        self._keepers: list[Any] = []
        calls = RayCalls("nodes")
        start = partial(self._start, group)
        further = calls.call(start, "starting on further nodes", timeout_s=2 * START_S)
        calls.close(0)
        self.nodes = (_this_node(), *further)
        """The node of this actor, and the others."""
        # for agents of launchers, which are no children of this module
        servers = {node.address: (node.port, node.secret) for node in further}
        os.environ[NODES] = json.dumps(servers)
        for node in further:
            threading.Thread(target=_end_with, args=(node,), daemon=True).start()

    @calls_ray
    def _start(self, group: PlacementGroup) -> list[Node]:
        bundles = group.bundle_specs
        for number in range(1, len(bundles)):
            keeper: Any = ray.remote(NodeKeeper).options(
                num_cpus=bundles[number]["CPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            )
            self._keepers.append(keeper.remote())
        paths = (sys.executable, GUARD)
        started = [keeper.start.remote(paths) for keeper in self._keepers]
        try:
            nodes: list[Node | str] = ray.get(started, timeout=START_S)
        except RayError as error:
            _end(f"a further node of this actor is lost: {error}")
        for node in nodes:
            if isinstance(node, str):
                raise ConfigError(
                    f"nodes_per_env: {node}, where ranks of an environment start. Install dppo at the same path on all "
                    f"nodes, for the same Python.",
                    setting="nodes_per_env",
                )
        return [node for node in nodes if isinstance(node, Node)]


def _end_with(node: Node) -> None:
    """End this process when a node is lost: its environments need all of their ranks."""
    try:
        NodeLease(node, 0, mark=secrets.token_hex(16)).wait()
    except SolverError as error:
        logger.warning("%s", error)
    _end(f"node {node.host}, which has ranks of this actor's environments, is lost")


def _end(reason: str) -> NoReturn:
    print(reason, flush=True)
    os._exit(1)
