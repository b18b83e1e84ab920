"""As many actors as there is room for: on this machine, and on a cluster whose nodes come and go."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import QUICK_CHECKS, Command

from dppo.cluster.ray import capacity
from dppo.cluster.ray.capacity import PER_NODE, Demand, room_for
from dppo.cluster.ray.session import demand_of
from dppo.cluster.ray.watch import Room
from dppo.config import Actors, Learners
from dppo.errors import ConfigError

TWO_NODES = [{"CPU": 32.0, "node:big": 1.0}, {"CPU": 32.0, "node:small": 1.0}]


class Nodes:
    """Nodes that a test changes, and the room on them for actors of one CPU."""

    def __init__(self, fewest: int, most: int, *sizes: int, grows: bool = False) -> None:
        self.found = {str(number): {"CPU": float(size)} for number, size in enumerate(sizes)}
        self.notes: list[str] = []
        demand = Demand(fewest, {"CPU": 1.0}, 0, {}, most)
        self.room = Room(demand, lambda: dict(self.found), self.notes.append, free=sum(sizes), grows=grows)

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
    assert nodes.changes(**at) == ([4, 5, 6], [0, 1]), "at most five, with new ids, while the old processes live"
    assert nodes.changes(a2="1", a3="1", a4="2", a5="2") == ([], [])
    nodes.found.pop("2")
    assert nodes.changes(a2="1", a3="1", a4="2", a5="2") == ([], [6, 4, 5]), "actor 6 has not started yet"


def test_there_are_never_fewer_than_the_lower_bound_and_pending_actors_make_a_cluster_grow() -> None:
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
        ({"actor_resources": [{"a": 1}, {"b": 1}], "actors_per_node": 3}, [{"CPU": 8, "a": 2, "b": 2}], [2, 1]),
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
        ({"num_actors": 4, "actors_per_node": 3}, "actors_per_node=3: .* 4 actors .* Use at most `num_actors=3`"),
        ({"num_actors": 3, "actors_per_node": 4, "eval_actors": 1}, ""),
        (
            {"num_actors": 4, "actors_per_node": 4, "eval_actors": 1},
            "actors_per_node=4: .* 4 actors beside 1 of evaluations are .* Use at most `num_actors=3`, raise",
        ),
        ({"num_actors": 1, "actors_per_node": 2, "eval_actors": 2}, "actors_per_node=2: .* Raise `actors_per_node`"),
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


def test_learners_fit_beside_actors_that_hold_one_of_two_licences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each actor holds one of the alternatives, and not the first of them."""
    nodes = [{"CPU": 16.0, "licence_a": 4.0}, {"CPU": 16.0, "licence_b": 4.0}]
    cluster = SimpleNamespace(nodes=lambda: [{"Resources": one, "Alive": True} for one in nodes])
    monkeypatch.setattr(capacity, "free_room", lambda demand: 8)
    monkeypatch.setattr(capacity, "has_autoscaler", lambda ray: False)
    actors = Actors(num_actors=8, actor_resources=[{"licence_a": 1}, {"licence_b": 1}])
    capacity.check_cluster(cluster, demand_of(actors, Learners(num_learners=2)), print)
    with pytest.raises(ConfigError, match="num_learners=30: 8 actors and 30 learners need 38 CPU, the cluster's 2 nod"):
        capacity.check_cluster(cluster, demand_of(actors, Learners(num_learners=30)), print)


@pytest.mark.parametrize(
    ("num_actors", "cores", "more", "used"),
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
    num_actors: str, cores: int, more: dict[str, object], used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_of(Actors(num_actors=num_actors, **more), Learners())  # type: ignore[arg-type]
    notes: list[str] = []
    monkeypatch.setattr(capacity, "usable_cores", lambda: cores)
    assert capacity.fitted_here(demand, 0, notes.append).num_actors == used
    assert notes == [f"using {used} actors: this machine has {cores} cores"]


@pytest.mark.slow
def test_pending_actors_make_a_cluster_grow_while_training_goes_on(tmp_path: Path) -> None:
    """With Ray's own autoscaler."""
    env = QUICK_CHECKS | {"RAY_AUTH_MODE": "disabled"}
    with Command(
        [], tmp_path, program=(str(Path(__file__).with_name("growing_cluster.py")), str(tmp_path)), **env
    ) as run:
        assert run.wait(200) == 0
        [line] = [line for line in run.out.splitlines() if line.startswith("report ")]
    report = json.loads(line.removeprefix("report "))
    assert report["same"] is True
    assert (report["first"], report["last"]) == (1, 4)
    assert report["notes"][0].endswith("room for 1 actor of 1 CPU on 1 node; its autoscaler is asked for more nodes")
    assert any(note.startswith("the cluster has room for 5 actors now") for note in report["notes"])


@pytest.mark.slow
def test_a_run_follows_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    program = (str(Path(__file__).with_name("changing_nodes.py")), str(tmp_path))
    with Command([], tmp_path, program=program, RAY_AUTH_MODE="disabled", **QUICK_CHECKS) as command:
        assert command.wait(400) == 0
        lines = [line for line in command.out.splitlines() if line.startswith("report ")]
    report = json.loads(lines[0].removeprefix("report "))
    assert report["same"] is True
    assert len(report["seen"]) == 10
    assert report["left after"] < 45, "Ray ends a node once nothing is left on it, or after a minute"
    assert "actor_hung" not in report["incidents"]
    assert "the cluster has room for 4 actors now, 2 before" in report["notes"]
    [waits] = [note for note in report["notes"] if "training waits" in note]
    assert waits.startswith("training waits for actors: 0 running, at least 1 wanted")
    assert any(note.startswith("training goes on with") for note in report["notes"])
