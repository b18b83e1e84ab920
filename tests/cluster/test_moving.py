"""An actor on Ray that cannot be replaced: its samplers move to the others, and return when there is room."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from builders import make_config
from processes import actors_of_this_process, wait_until

from dppo.cluster.collecting.actor_collector import ActorCollector
from dppo.cluster.collecting.collector import Collector
from dppo.cluster.collecting.engine import Collecting
from dppo.cluster.collecting.in_process import InProcessCollector
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Limits
from dppo.cluster.collecting.ray_transport import RayTransport
from dppo.cluster.collecting.roster import shares
from dppo.cluster.learning.trainers import LocalTrainer
from dppo.cluster.plans import sampler_plan, trainer_plan
from dppo.ppo.exchange.normalizer import Statistics
from dppo.run.learner import Iteration, PPOLearner
from dppo.signals import StopSignals

pytestmark = pytest.mark.usefixtures("ray_session")
ENOUGH = 10_000  # iterations; the test stops earlier
LIMITS = Limits(segment_timeout_s=60, max_actor_restarts=3, move_after_s=1.0)


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


def train(num_actors: int, is_last: Callable[[Iteration], bool]) -> tuple[str, Any]:
    """Train as the runner does, but move samplers early; return the hash of the weights, and the incidents.

    Args:
        is_last: called after each iteration; True ends the training.
    """
    sizes = {"num_samplers": 4, "num_steps": 40, "update_epochs": 1, "hidden_sizes": (8,)}
    config = make_config({"env_id": "CartPole-v1", "num_actors": num_actors, **sizes})
    ledger, stop, plan = ReplayLedger(4, replay=True), StopSignals(), sampler_plan(config)
    collector: Collector
    if num_actors:
        engine = Collecting(shares(4, num_actors), ledger, LIMITS)
        collector = ActorCollector(engine, RayTransport(plan, config.actors))
    else:
        collector = InProcessCollector(plan, ledger)
    try:
        trainers = LocalTrainer(trainer_plan(config), collector.describe(stop))
        learner = PPOLearner(collector, trainers, ledger, Statistics(None, None))
        for iteration in learner.run(ENOUGH, stop):
            if is_last(iteration):
                break
        trainers.close()
        return learner.weights_sha256(), dict(learner.incidents)
    finally:
        collector.close()


@pytest.fixture
def hogs() -> Iterator[list[Hogs]]:
    made: list[Hogs] = []
    yield made
    for one in made:
        one.leave()


def test_samplers_move_from_an_actor_that_cannot_be_replaced_and_return_when_there_is_room(
    hogs: list[Hogs], caplog: pytest.LogCaptureFixture
) -> None:
    def wait_for_cpus(taken: int) -> None:
        wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"] - taken)

    wait_until(lambda: not actors_of_this_process())
    wait_for_cpus(0)
    hosts: list[int] = []

    def was_logged(text: str) -> bool:
        return any(text in line for line in caplog.messages)

    def disturb(iteration: Iteration) -> bool:
        """Kill an actor; make room for it once its samplers have moved; end when it collects again."""
        hosts.append(len(iteration.collected.timings))
        if iteration.number == 1:
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

    weights, incidents = train(2, disturb)
    assert incidents == {"actor_lost": 1, "samplers_moved": 1}
    assert hosts[0] == 2
    expected, _ = train(0, lambda iteration: iteration.number == len(hosts))
    assert weights == expected
