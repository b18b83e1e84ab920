"""A run on a cluster that scales itself, in a separate process; prints a report as a line of JSON.

Ray's autoscaler adds nodes on this machine, with its provider for tests (`fake_multinode`): first there is the head
alone, with room for one actor. `ray.cluster_utils.AutoscalingCluster` would stop all clusters of the machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nodes import STORE, followed, print_report
from recorder import Notes

import dppo

NODES = {
    "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
    "simulators": {
        "resources": {"CPU": 2, "object_store_memory": STORE},
        "node_config": {},
        "max_workers": 2,
    },
}


def autoscaling(port: int) -> dict[str, Any]:
    """Return the configuration of a cluster that grows by up to two nodes of two CPUs."""
    provider: dict[str, Any] = {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}"}
    for name in ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check"):
        provider[name] = True
    config: dict[str, Any] = {
        "cluster_name": "grows",
        "head_node_type": "ray.head.default",
        "available_node_types": NODES,
        "max_workers": 2,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 10,
        "file_mounts": {},
        "auth": {},
        "provider": provider,
        "cluster_synced_files": [],
    }
    for name in ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray"):
        config[f"{name}_commands"] = []
    return config | {"worker_start_ray_commands": []}


def start_head(folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start the head of the cluster; return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "cluster.json"
    config.write_text(json.dumps(autoscaling(port)))
    flags = f"--head --block --num-cpus 1 --object-store-memory {STORE} --include-dashboard false --port {port}"
    flags += f" --node-ip-address 127.0.0.1 --disable-usage-stats --autoscaling-config {config}"
    head = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", *flags.split()],
        env=os.environ | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"},
        stdout=sys.stderr,
    )
    for _ in range(300):
        time.sleep(0.2)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"127.0.0.1:{port}", head
    raise TimeoutError("the head has not started")


class Growth(dppo.Observer):
    """Ends the run when all actors are running and the room for them has been noticed, which may be later."""

    def __init__(self, notes: list[str]) -> None:
        self.seen: list[int] = []
        self._notes = notes

    def on_iteration(self, row: dict[str, float]) -> bool:
        time.sleep(0.1)
        self.seen.append(int(row["actors/alive"]))
        return self.seen[-1] == 4 and any(
            "has room for 5 actors now" in note for note in self._notes
        )


def main(folder: Path) -> None:
    address, head = start_head(folder)
    notes = Notes()
    growth = Growth(notes.texts)
    report = followed(folder, address, growth, notes)
    print_report(report | {"last": growth.seen[-1]})
    head.terminate()
    head.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
