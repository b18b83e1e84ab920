"""What tests share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

os.environ["DPPO_TEST_RUN"] = uuid.uuid4().hex  # inherited by all we start: tells our processes from others'


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray for all tests that need actors: starting it takes seconds. Runs leave it as they find it."""
    from dppo.cluster.session import RaySession

    session = RaySession(
        address=None,
        num_actors=8,
        cpus_per_actor=1.0,
        resources={},
        store_bytes=256 * 2**20,
        dashboard=False,
        notify=lambda text: None,
    )
    yield
    session.close()
