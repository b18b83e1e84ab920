"""Shared by all tests: checked shapes, one Ray."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from shapes import check_shapes

check_shapes()
# Ray lowers the priority of its workers, which would starve actors on a busy machine. Its processes inherit this.
os.environ |= {"RAY_worker_niceness": "0"}
# Several processes of tests share the cores, and torch's threads of all of them would wait for each other: the tests in
# process took four times as long. A run of dppo sets its own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DPPO_TEST_RUN"] = uuid.uuid4().hex  # child processes inherit it, so that tests recognise their own


@pytest.fixture(autouse=True)
def signals_are_not_ignored() -> Iterator[None]:
    """Let commands under test receive SIGINT and SIGHUP; after `&` and nohup, processes ignore them."""
    ignored = [one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_IGN]
    for one in ignored:
        signal.signal(one, signal.default_int_handler if one is signal.SIGINT else signal.SIG_DFL)
    yield
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start one Ray for all tests that need actors, because starting it takes seconds. Runs leave it unchanged."""
    from dppo.cluster.session import RaySession
    from dppo.config import Actors, Learners

    session = RaySession(Actors(num_actors=8), Learners(), store_bytes=256 * 2**20, notify=lambda text: None)
    yield
    session.close()
