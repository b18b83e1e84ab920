"""As many actors as there is room for: on this machine, and on a cluster whose nodes come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import Driver
from nodes import report_of

from dppo.engine.messages import Joined, Kill, Left, Limits, Process, Start
from dppo.transports.ray.capacity import Demand
from dppo.transports.ray.elastic_pool import ElasticPool


class Nodes:
    """Nodes that a test changes, and the room on them for actors of one CPU."""

    def __init__(self, fewest: int, most: int, *sizes: int, grows: bool = False) -> None:
        self.found = {str(number): {"CPU": float(size)} for number, size in enumerate(sizes)}
        self.notes: list[str] = []
        self.room = ElasticPool(
            Demand(fewest, {"CPU": 1.0}, 0, {}, most),
            lambda: dict(self.found),
            self.notes.append,
            num_free=sum(sizes),
            grows=grows,
        )

    def changes(self, **homes: str) -> tuple[list[int], list[int]]:
        """Return what follows from a look; `homes` are the nodes of actors 0, 1, ... by the names a0, a1, ..."""
        self.room.look()
        return self.room.changes(lambda: {int(name[1:]): node for name, node in homes.items()})


def test_actors_join_and_leave_with_the_nodes() -> None:
    nodes = Nodes(1, 5, 2)
    at = {"a0": "0", "a1": "0"}
    assert nodes.room.num_at_start == 2
    assert nodes.notes == ["the cluster has room for 2 actors of 1 CPU on 1 node"]
    assert nodes.changes(**at) == ([], [])

    nodes.found["1"] = {"CPU": 2.0}
    assert nodes.changes(**at) == ([2, 3], [])
    assert nodes.notes[-1] == "the cluster has room for 4 actors now, 2 before"

    at |= {"a2": "1", "a3": "1"}
    del nodes.found["0"]
    assert nodes.changes(**at) == ([], [0, 1])

    # at most five, with new ids, while the old processes live
    nodes.found["2"] = {"CPU": 9.0}
    assert nodes.changes(**at) == ([4, 5, 6], [0, 1])

    # actor 6 has not started yet
    at = {"a2": "1", "a3": "1", "a4": "2", "a5": "2"}
    assert nodes.changes(**at) == ([], [])
    del nodes.found["2"]
    assert nodes.changes(**at) == ([], [6, 4, 5])


def test_an_actor_that_has_not_started_leaves_before_one_that_runs() -> None:
    nodes = Nodes(1, 5, 2)
    nodes.found["0"] = {"CPU": 1.0}
    assert nodes.changes(a1="0") == ([], [0])


def test_there_are_never_fewer_than_the_lower_bound_and_pending_actors_make_a_cluster_grow() -> (
    None
):
    few = Nodes(3, 8, 1)
    assert few.room.num_at_start == 3
    assert few.notes == [
        "the cluster has room for 1 actor of 1 CPU on 1 node; training waits for the 3 that num_actors asks for"
    ]
    few.found.clear()
    assert few.changes(a0="0") == ([3], [0])
    grows = Nodes(1, 4, 2, grows=True)
    assert grows.room.num_at_start == 2
    assert grows.notes[0].endswith("; its autoscaler is asked for more nodes")
    assert grows.changes() == ([2, 3], [])


def test_a_head_without_cpus_is_not_among_the_nodes_with_room() -> None:
    assert Nodes(1, 8, 0, 2, 2).notes == ["the cluster has room for 4 actors of 1 CPU on 2 nodes"]


def started(driver: Driver) -> list[Process]:
    """Return the processes that were started since the last call."""
    starts = [command.process for command in driver.all(Start)]
    driver.forget()
    return starts


def one_that_loses_its_node() -> Driver:
    """Return a driver whose two actors are on a node that is lost, while another node comes."""
    driver = Driver(
        [[0, 1], [2, 3]], Limits(segment_timeout_s=100, max_actor_restarts=3, elastic=True)
    )
    driver.request(0)
    driver.forget()
    for event in (Joined(2), Joined(3), Left(0), Left(1)):
        driver.on(event)
    assert started(driver) == [Process(2, 1), Process(3, 1)]
    return driver


def test_the_last_actor_of_a_lost_node_does_not_come_back() -> None:
    """It goes on when it should leave, because no other is running yet; the others have its place."""
    driver = one_that_loses_its_node()
    for actor in (0, 1):
        driver.die(actor)
    driver.wait(200)
    assert started(driver) == []
    driver.asked()
    for actor in (2, 3):
        driver.start(actor)
    assert sorted(sampler for sampler, *_ in driver.asked()) == [0, 1, 2, 3]


def test_the_last_actor_comes_back_if_there_is_room_for_it_again() -> None:
    driver = one_that_loses_its_node()
    driver.on(Joined(1))
    assert driver.all(Kill) == []
    driver.die(1)
    driver.wait(1)
    assert started(driver) == [Process(1, 2)]


def test_an_actor_that_joins_again_while_it_finishes_its_question_gets_another_process() -> None:
    driver = Driver([[0], [1]])
    driver.request(0)
    driver.forget()
    driver.on(Left(0))
    driver.on(Joined(0))
    assert driver.all(Kill) == []
    driver.answer()
    assert driver.all(Kill) == [Kill(Process(0, 1))]
    assert started(driver) == [Process(0, 2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pending_actors_make_a_cluster_grow_while_training_goes_on(tmp_path: Path) -> None:
    """With Ray's own autoscaler."""
    report = report_of("growing_cluster.py", tmp_path, RAY_AUTH_MODE="disabled")
    assert report["same"] is True
    assert report["last"] == 4
    assert report["notes"][0].endswith(
        "room for 1 actor of 1 CPU on 1 node; its autoscaler is asked for more nodes"
    )
    assert any(
        note.startswith("the cluster has room for 5 actors now") for note in report["notes"]
    ), report["notes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_follows_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    report = report_of("changing_nodes.py", tmp_path, RAY_AUTH_MODE="disabled")
    assert report["same"] is True
    assert len(report["seen"]) == 10
    assert report["left after"] < 45, (
        "Ray ends a node once nothing is left on it, or after a minute"
    )
    assert "actor_hung" not in report["incidents"]
    assert "the cluster has room for 4 actors now, 2 before" in report["notes"]
    [waits] = [note for note in report["notes"] if "training waits" in note]
    assert waits.startswith("training waits for actors: 0 running, at least 1 wanted")
    assert any(note.startswith("training goes on with") for note in report["notes"])
