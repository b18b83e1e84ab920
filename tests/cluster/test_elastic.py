"""As many actors as there is room for: on this machine, and on a cluster whose nodes come and go."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import QUICK_CHECKS, Command
from driver import Driver
from processes import in_ray_thread

from dppo import machine
from dppo.config import Actors, Learners
from dppo.engine.messages import Died, Joined, Kill, Left, Limits, Process, Start, Started
from dppo.errors import ConfigError
from dppo.transports.ray import capacity
from dppo.transports.ray.capacity import PER_NODE, Demand, room_for
from dppo.transports.ray.elastic_pool import ElasticPool
from dppo.transports.ray.session import demand_of

TWO_NODES = [{"CPU": 32.0, "node:big": 1.0}, {"CPU": 32.0, "node:small": 1.0}]


class Nodes:
    """Nodes that a test changes, and the room on them for actors of one CPU."""

    def __init__(self, fewest: int, most: int, *sizes: int, grows: bool = False) -> None:
        self.found = {str(number): {"CPU": float(size)} for number, size in enumerate(sizes)}
        self.notes: list[str] = []
        demand = Demand(fewest, {"CPU": 1.0}, 0, {}, most)
        self.room = ElasticPool(
            demand, lambda: dict(self.found), self.notes.append, free=sum(sizes), grows=grows
        )

    def changes(self, **homes: str) -> tuple[list[int], list[int]]:
        """Return what follows from a look; `homes` are the nodes of actors 0, 1, ... by the names a0, a1, ..."""
        self.room.look()
        return self.room.changes(lambda: {int(name[1:]): node for name, node in homes.items()})


def test_actors_join_and_leave_with_the_nodes() -> None:
    nodes = Nodes(1, 5, 2)
    at = {"a0": "0", "a1": "0"}
    assert nodes.room.at_first == 2
    assert nodes.notes == ["the cluster has room for 2 actors of 1 CPU on 1 node"]
    assert nodes.changes(**at) == ([], [])
    nodes.found["1"] = {"CPU": 2.0}
    assert nodes.changes(**at) == ([2, 3], [])
    assert nodes.notes[-1] == "the cluster has room for 4 actors now, 2 before"
    at |= {"a2": "1", "a3": "1"}
    del nodes.found["0"]
    assert nodes.changes(**at) == ([], [0, 1])
    nodes.found["2"] = {"CPU": 9.0}
    assert nodes.changes(**at) == ([4, 5, 6], [0, 1]), (
        "at most five, with new ids, while the old processes live"
    )
    assert nodes.changes(a2="1", a3="1", a4="2", a5="2") == ([], [])
    nodes.found.pop("2")
    assert nodes.changes(a2="1", a3="1", a4="2", a5="2") == ([], [6, 4, 5]), (
        "actor 6 has not started yet"
    )


def test_there_are_never_fewer_than_the_lower_bound_and_pending_actors_make_a_cluster_grow() -> (
    None
):
    few = Nodes(3, 8, 1)
    assert few.room.at_first == 3
    assert few.notes == [
        "the cluster has room for 1 actor of 1 CPU on 1 node; training waits for the 3 that num_actors asks for"
    ]
    few.found.clear()
    assert few.changes(a0="0") == ([3], [0])
    grows = Nodes(1, 4, 2, grows=True)
    assert grows.room.at_first == 2
    assert grows.notes[0].endswith("; its autoscaler is asked for more nodes")
    assert grows.changes() == ([2, 3], [])


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
        driver.on(Died(Process(actor, 1), "died: its node is lost"))
    driver.wait(200)
    assert started(driver) == []
    driver.asked()
    for actor in (2, 3):
        driver.on(Started(Process(actor, 1)))
    assert sorted(sampler for sampler, *_ in driver.asked()) == [0, 1, 2, 3]


def test_the_last_actor_comes_back_if_there_is_room_for_it_again() -> None:
    driver = one_that_loses_its_node()
    driver.on(Joined(1))
    assert driver.all(Kill) == []
    driver.on(Died(Process(1, 1), "died"))
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


@pytest.mark.parametrize(
    ("nodes", "learners", "room"),
    [([2, 2], 0, 4), ([2, 2], 1, 2), ([2, 3], 2, 2), ([1], 2, 1), ([], 0, 0)],
)
def test_learners_take_the_largest_nodes(nodes: list[int], learners: int, room: int) -> None:
    demand = Demand(1, {"CPU": 1.0}, learners, {"CPU": 1.5, "GPU": 0.0}, 9)
    assert room_for([{"CPU": float(size)} for size in nodes], demand) == room


@pytest.mark.parametrize(
    ("settings", "nodes", "rooms"),
    [
        ({"actors_per_node": 2}, [{"CPU": 8}, {"CPU": 1}, {"CPU": 3}], [5]),
        ({"actors_per_node": 3}, [{"CPU": 8, PER_NODE: 0.3334}], [1]),  # another run has two there
        ({"actors_per_node": 100, "cpus_per_actor": 0.01}, [{"CPU": 8}], [100]),
        (
            {"actor_resources": [{"a": 1}, {"b": 2}]},
            [{"CPU": 8, "a": 4}, {"CPU": 2, "a": 1, "b": 9}, {"CPU": 9}],
            [5, 1],
        ),
        (
            {"actor_resources": [{"a": 1}, {"b": 1}], "actors_per_node": 3},
            [{"CPU": 8, "a": 2, "b": 2}],
            [2, 1],
        ),
        ({"actor_resources": [{"node:big": 1 / 16}, {"node:small": 0.25}]}, TWO_NODES, [16, 4]),
    ],
)
def test_the_room_for_actors_that_may_not_be_everywhere(
    settings: dict[str, Any], nodes: list[dict[str, float]], rooms: list[int]
) -> None:
    demand = demand_of(Actors(num_actors=1, **settings), Learners())
    assert capacity.rooms_for(nodes, demand) == rooms
    assert room_for(nodes, demand) == sum(rooms)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"num_actors": 3, "actors_per_node": 3}, ""),
        (
            {"num_actors": 4, "actors_per_node": 3},
            "actors_per_node=3: .* 4 actors .* Use at most `num_actors=3`",
        ),
        ({"num_actors": 3, "actors_per_node": 4, "eval_actors": 1}, ""),
        (
            {"num_actors": 4, "actors_per_node": 4, "eval_actors": 1},
            "actors_per_node=4: .* 4 actors beside 1 of evaluations are .* Use at most `num_actors=3`, raise",
        ),
        (
            {"num_actors": 1, "actors_per_node": 2, "eval_actors": 2},
            "actors_per_node=2: .* Raise `actors_per_node`",
        ),
        ({"num_actors": 4, "actor_resources": [{"a": 1}]}, ""),
        (
            {"num_actors": 4, "actor_resources": [{"a": 1}, {"b": 1}]},
            "actor_resources: the 2 alternatives .* `address`",
        ),
    ],
)
def test_what_a_ray_of_one_node_cannot_place_is_refused_before_it_starts(
    settings: dict[str, Any], refused: str
) -> None:
    evaluators = settings.get("eval_actors", 0)
    of_actors = Actors(**{name: value for name, value in settings.items() if name != "eval_actors"})
    demand = demand_of(of_actors, Learners(num_learners=2), evaluators)
    if not refused:
        return capacity.check_here(demand, 0)
    with pytest.raises(ConfigError, match=refused):
        capacity.check_here(demand, 0)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_the_actors_that_fit_the_gpus_of_this_machine_are_not_refused(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would one more be allowed."""
    monkeypatch.setattr(capacity, "usable_cores", lambda: 400)
    for each, (learners, of_learner), evaluators in itertools.product(
        [0.07, 0.15, 0.25, 0.3, 1 / 3, 0.4, 0.6, 1.0, 2.0],
        [(0, 0.0), (1, 1.0), (2, 0.4), (3, 0.3)],
        [0, 2],
    ):
        of_actors = Actors(num_actors="1..400", actor_gpus=each)
        demand = demand_of(
            of_actors, Learners(num_learners=learners, learner_gpus=of_learner), evaluators
        )
        fitted = capacity.fitted_here(demand, gpus, lambda _: None)
        if fitted.num_actors > 1:
            capacity.check_here(fitted, gpus)
        with pytest.raises(ConfigError, match="actor_gpus="):
            capacity.check_here(replace(fitted, num_actors=fitted.num_actors + 1), gpus)


def cluster_of(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float]) -> SimpleNamespace:
    """Return a connected Ray with idle nodes, and without an autoscaler."""
    monkeypatch.setattr(capacity, "free_room", lambda demand: demand.num_actors)
    monkeypatch.setattr(capacity, "has_autoscaler", lambda ray: False)
    return SimpleNamespace(
        nodes=lambda: [{"Resources": resources, "Alive": True} for resources in nodes]
    )


@pytest.mark.parametrize(
    ("settings", "node", "refused"),
    [
        ({"num_actors": 4, "actor_gpus": 0.4}, {"CPU": 16, "GPU": 2}, ""),
        (
            {"num_actors": 5, "actor_gpus": 0.4},
            {"CPU": 16, "GPU": 2},
            "CPU . 0.4 GPU each do not fit .* hold 4. Use at",
        ),
        # 0.2 + 3 * 1.6 > 5
        ({"num_actors": 1, "cpus_per_actor": 0.2, "learner_cpus": 1.6}, {"CPU": 5}, ""),
        ({"num_actors": 1, "evaluators": 1}, {"CPU": 2}, ""),
        (
            {"num_actors": 2, "evaluators": 1},
            {"CPU": 2},
            "num_actors=2 actors of 1 CPU each beside 1 of evaluations do not fit .* have 2 CPU and hold 1. Use at",
        ),
        (
            {"num_actors": 1, "evaluators": 3},
            {"CPU": 2},
            "beside 3 of evaluations do .* hold 0. Lower `cpus_per_actor`",
        ),
        (
            {"num_actors": 2, "evaluators": 1, "learner_cpus": 1},
            {"CPU": 5},
            "num_learners=3: 2 actors beside 1 of evaluations and 3 learners need 6 CPU, .* have 5 CPU. Use fewer",
        ),
    ],
)
def test_a_cluster_that_fits_exactly_is_not_refused_and_a_smaller_one_is(
    settings: dict[str, Any], node: dict[str, float], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process stays on one GPU; evaluations need actors, too; sums of floats have errors in the last bit."""
    of_actors = Actors(**{name: settings[name] for name in settings if "actor" in name})
    learners = (
        Learners(num_learners=3, learner_cpus=settings["learner_cpus"])
        if "learner_cpus" in settings
        else None
    )
    demand = demand_of(of_actors, learners or Learners(), settings.get("evaluators", 0))
    cluster = cluster_of(monkeypatch, node)
    if not refused:
        return in_ray_thread(partial(capacity.check_cluster, cluster, demand, print))
    with pytest.raises(ConfigError, match=refused):
        in_ray_thread(partial(capacity.check_cluster, cluster, demand, print))


def test_learners_fit_beside_actors_that_hold_one_of_two_licences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each actor holds one of the alternatives, and not the first of them."""
    cluster = cluster_of(
        monkeypatch, {"CPU": 16.0, "licence_a": 4.0}, {"CPU": 16.0, "licence_b": 4.0}
    )
    actors = Actors(num_actors=8, actor_resources=[{"licence_a": 1}, {"licence_b": 1}])
    in_ray_thread(
        partial(capacity.check_cluster, cluster, demand_of(actors, Learners(num_learners=2)), print)
    )
    with pytest.raises(
        ConfigError,
        match="num_learners=30: 8 actors and 30 learners need 38 CPU, the cluster's 2 nod",
    ):
        in_ray_thread(
            partial(
                capacity.check_cluster, cluster, demand_of(actors, Learners(num_learners=30)), print
            )
        )


@pytest.mark.parametrize(
    ("num_actors", "cores", "changes", "used"),
    [
        ("1..8", 3, {}, 3),
        ("1..2", 3, {}, 2),
        ("4..8", 3, {}, 4),
        ("1..8", 3, {"cpus_per_actor": 0.5}, 6),
        ("1..8", 3, {"actor_resources": {"licence": 2}}, 3),
        ("1..8", 3, {"actors_per_node": 2}, 2),
    ],
)
def test_a_ray_started_here_gets_as_many_actors_as_there_are_cores(
    num_actors: str,
    cores: int,
    changes: dict[str, object],
    used: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demand = demand_of(Actors(num_actors=num_actors, **changes), Learners())  # type: ignore[arg-type]
    notes: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    assert capacity.fitted_here(demand, 0, notes.append).num_actors == used
    assert notes == [f"using {used} actors: this machine has {cores} cores"]


@pytest.mark.slow
def test_pending_actors_make_a_cluster_grow_while_training_goes_on(tmp_path: Path) -> None:
    """With Ray's own autoscaler."""
    env = QUICK_CHECKS | {"RAY_AUTH_MODE": "disabled"}
    with Command(
        [],
        tmp_path,
        program=(str(Path(__file__).with_name("growing_cluster.py")), str(tmp_path)),
        **env,
    ) as run:
        assert run.wait(200) == 0
        [line] = [line for line in run.out.splitlines() if line.startswith("report ")]
    report = json.loads(line.removeprefix("report "))
    assert report["same"] is True
    assert report["last"] == 4
    assert report["notes"][0].endswith(
        "room for 1 actor of 1 CPU on 1 node; its autoscaler is asked for more nodes"
    )
    assert any(
        note.startswith("the cluster has room for 5 actors now") for note in report["notes"]
    ), report["notes"]


@pytest.mark.slow
def test_a_run_follows_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    program = (str(Path(__file__).with_name("changing_nodes.py")), str(tmp_path))
    with Command(
        [], tmp_path, program=program, RAY_AUTH_MODE="disabled", **QUICK_CHECKS
    ) as command:
        assert command.wait(400) == 0
        lines = [line for line in command.out.splitlines() if line.startswith("report ")]
    report = json.loads(lines[0].removeprefix("report "))
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
