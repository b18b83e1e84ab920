"""An actor on Ray that cannot be replaced: its samplers move to the other, and return when there is room."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from builders import tiny_run
from processes import actors_of_this_process, wait_until
from recorder import Notes

import dppo
from dppo.engine.actor_collector import ActorCollector
from dppo.engine.collector import Collected
from dppo.engine.messages import Limits
from dppo.signals import StopSignals
from dppo.transports.ray import collecting

pytestmark = pytest.mark.usefixtures("ray_session")


class Hogs:
    """Actors of others, which take all free CPUs, and the next one that becomes free before later requests."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def start(self) -> None:
        class Hog: ...  # local, so that Ray pickles it by value

        hog = ray.remote(num_cpus=1)(Hog)
        for _ in range(int(ray.available_resources()["CPU"])):
            self._handles.append(hog.remote())
        ray.get([handle.__ray_ready__.remote() for handle in self._handles], timeout=60)
        self._handles.append(hog.remote())

    def wait_for_the_next(self) -> None:
        ray.get(self._handles[-1].__ray_ready__.remote(), timeout=60)

    def end(self) -> None:
        while self._handles:
            ray.kill(self._handles.pop())


@pytest.fixture
def hogs() -> Iterator[Hogs]:
    started = Hogs()
    yield started
    started.end()


def wait_for_cpus(used: int) -> None:
    free = ray.cluster_resources()["CPU"] - used
    wait_until(lambda: ray.available_resources().get("CPU") == free)


@pytest.mark.slow
def test_samplers_move_from_a_lost_actor_and_return_when_there_is_room(
    hogs: Hogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "Limits", partial(Limits, move_after_s=1.0))
    hosts = list[int]()
    receive = ActorCollector.receive

    def received(collector: ActorCollector, stop: StopSignals) -> Collected:
        collected = receive(collector, stop)
        hosts.append(len(collected.timings))
        return collected

    monkeypatch.setattr(ActorCollector, "receive", received)

    def was_logged(text: str) -> bool:
        return any(text in line for line in notes.texts)

    class Disturb(dppo.Observer):
        """Kills an actor; makes room for it once its samplers have moved; ends the run when they are back."""

        has_room = False

        def on_iteration(self, row: dict[str, float]) -> bool:
            if row["iteration"] == 1:
                wait_for_cpus(2)
                hogs.start()
                os.kill(min(actors_of_this_process()), signal.SIGKILL)
                hogs.wait_for_the_next()
            if not self.has_room and was_logged("until it is back, its samplers"):
                assert hosts[-1] == 1
                hogs.end()
                wait_until(lambda: len(actors_of_this_process()) == 2)
                self.has_room = True
            time.sleep(0.05)
            return was_logged("is back") and hosts[-1] == 2

    wait_until(lambda: not actors_of_this_process())
    wait_for_cpus(0)
    settings: dict[str, Any] = {"hidden_sizes": (8,), "anneal_lr": False}
    sizes: dict[str, Any] = {"samplers": 4, "steps": 40}
    long = tiny_run(tmp_path / "moved", **sizes, iterations=10_000, num_actors=2, **settings)
    with Notes() as notes:
        moved = dppo.train(long, observers=[Disturb()])
    assert moved.incidents == {"actor_lost": 1, "samplers_moved": 1}
    assert hosts[0] == 2

    alone = tiny_run(tmp_path / "alone", **sizes, iterations=moved.iterations, **settings)
    assert dppo.train(alone).weights_sha256 == moved.weights_sha256
