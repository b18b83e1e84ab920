"""An actor on Ray that cannot be replaced: its samplers move to the others, and return when there is room."""

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
from builders import make_config
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
    """Takes all free CPUs and the next one that becomes free, before later requests."""

    def __init__(self) -> None:
        class Hog:  # local, so that Ray pickles it by value
            def here(self) -> None: ...

        hog = ray.remote(num_cpus=1)(Hog)
        free = int(ray.available_resources()["CPU"])
        self._handles: list[Any] = [hog.remote() for _ in range(free)]
        ray.get([handle.here.remote() for handle in self._handles], timeout=60)
        self._handles.append(hog.remote())
        self._next = self._handles[-1].here.remote()

    def has_the_next_one(self) -> None:
        ray.get(self._next, timeout=60)

    def leave(self) -> None:
        while self._handles:
            ray.kill(self._handles.pop())


@pytest.fixture
def hogs() -> Iterator[list[Hogs]]:
    made: list[Hogs] = []
    yield made
    for hog in made:
        hog.leave()


def settings(run_dir: Path, num_actors: int, iterations: int) -> dppo.Config:
    sizes = {
        "num_samplers": 4,
        "num_steps": 40,
        "update_epochs": 1,
        "hidden_sizes": (8,),
        "anneal_lr": False,
    }
    base = {
        "env_id": "CartPole-v1",
        "total_timesteps": 4 * 40 * iterations,
        "progress": "off",
        "run_dir": run_dir,
    }
    return make_config(base | sizes | {"num_actors": num_actors})


def wait_for_cpus(used: int) -> None:
    wait_until(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"] - used
    )


@pytest.mark.slow
def test_samplers_move_from_a_lost_actor_and_return_when_there_is_room(
    hogs: list[Hogs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        """Kills an actor; makes room for it once its samplers have moved; ends the run when it is back."""

        def on_iteration(self, row: dict[str, float]) -> bool:
            if row["iteration"] == 1:
                wait_for_cpus(2)
                hogs.append(Hogs())
                os.kill(min(actors_of_this_process()), signal.SIGKILL)
                hogs[0].has_the_next_one()
            if hogs and was_logged("until it is back, its samplers"):
                assert hosts[-1] == 1
                hogs.pop().leave()
                wait_until(lambda: len(actors_of_this_process()) == 2)
            time.sleep(0.05)
            return was_logged("is back") and hosts[-1] == 2

    wait_until(lambda: not actors_of_this_process())
    wait_for_cpus(0)
    with Notes() as notes:
        moved = dppo.train(settings(tmp_path / "moved", 2, 10_000), observers=[Disturb()])
    assert moved.incidents == {"actor_lost": 1, "samplers_moved": 1}
    assert hosts[0] == 2
    expected = dppo.train(settings(tmp_path / "expected", 0, moved.iterations))
    assert moved.weights_sha256 == expected.weights_sha256
