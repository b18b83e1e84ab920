"""A host on which no actor can start, as if its disk were full: others start elsewhere.

Hosts are network namespaces of this machine (`hosts.py`), so these tests need root. All are slow.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commandline import SOURCE, TESTS
from hosts import Hosts, possible
from test_network import LONG, collecting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="needs root, iproute2 and util-linux"),
]

DIES = """
import os, sys

class Dies:
    def find_spec(self, name, path=None, target=None):
        if name == "dppo.transports.ray.actor" and os.path.exists("/tmp/broken"):
            os._exit(1)

sys.meta_path.insert(0, Dies())
"""
"""A module that Python imports first: once its host is broken, processes end when Ray loads an actor into them."""


def test_an_actor_whose_host_starts_no_other_is_replaced_elsewhere(tmp_path: Path) -> None:
    """The host is the only one with a free CPU until another joins."""
    with Hosts(3, tmp_path) as (head, host, other):
        (host.folder / "sitecustomize.py").write_text(DIES)
        head.join(head, 1)
        host.join(head, 3, PYTHONPATH=os.pathsep.join(("/tmp/work", str(SOURCE), str(TESTS))))
        driver = collecting(head, head, "--max-actor-restarts 100", steps=LONG)
        (host.folder.parent / "broken").touch()
        host.send(signal.SIGKILL, "ray::PPOActor")
        driver.wait_until(lambda: "died on h2 before it had started" in driver.out, 60)
        other.join(head, 3)
        driver.wait_until(lambda: other.processes("ray::PPOActor"))
        driver.goes_on(3)
        driver.send(signal.SIGTERM)
        assert driver.wait(60) == 128 + signal.SIGTERM
