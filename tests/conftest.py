"""What tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
