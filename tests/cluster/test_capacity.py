"""The room for the processes of a run on this machine and on a cluster, counted before Ray starts any."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_config
from processes import in_ray_thread
from remedies import executes

import dppo
from dppo import machine
from dppo.config.parts import Actors, Learners, Sampling
from dppo.errors import ConfigError
from dppo.tools.doctor.findings import findings
from dppo.transports.ray import capacity
from dppo.transports.ray.capacity import PER_NODE, Demand, across_nodes, check_here, room_for
from dppo.transports.ray.session import demand_of

Node = dict[str, float]
BIG_AND_SMALL = ["32 CPU, 1 node:big", "32 CPU, 1 node:small"]
TWO_LICENCES = {"actor_resources": [{"licence_a": 1}, {"licence_b": 1}]}
OF_LEARNERS = [field.name for field in fields(Learners)]


def resources(text: str) -> Node:
    """Return resources of a text: "8 CPU, 2 GPU" is {"CPU": 8.0, "GPU": 2.0}."""
    amounts = {}
    for part in text.split(", "):
        amount, name = part.split()
        amounts[name] = float(amount)
    return amounts


def demand(num_actors: int | str = 1, evaluators: int = 0, **settings: Any) -> Demand:
    """Return the demand of a run with these settings, and with so many actors of evaluations."""
    learner_settings = {name: settings.pop(name) for name in OF_LEARNERS if name in settings}
    actors = Actors(num_actors=num_actors, **settings)
    placed = actors.placed(Sampling(num_samplers=2))
    return demand_of(placed, Learners(**learner_settings), evaluators)


def across(nodes_per_env: int | str) -> dict[str, Any]:
    """Return the settings of two actors, each with an environment of eight ranks on several nodes."""
    return {"num_actors": 2, "ranks_per_env": 8, "nodes_per_env": nodes_per_env}


def machines(*cpus: float) -> list[Node]:
    return [{"CPU": float(count)} for count in cpus]


@pytest.mark.parametrize(
    ("node", "needs", "fit"),
    [
        ("8 CPU, 1e9 memory", "3 CPU", 2),
        ("2 CPU", "0.5 CPU", 4),
        ("0.3 CPU", "0.1 CPU", 3),  # 0.3 / 0.1 is less than 3
        ("0.5 CPU", "1 CPU", 0),
        ("8 CPU, 3 licence", "1 CPU, 1 licence", 3),
        ("8 CPU", "1 CPU, 1 licence", 0),
        ("8 CPU", "1 CPU, 0 licence", 8),
        ("9 CPU, 2 GPU", "1 CPU, 0.4 GPU", 4),  # an actor stays on one GPU
        ("9 CPU, 3 GPU", f"0.1 CPU, {1 / 3} GPU", 9),
        ("9 CPU, 1.9 GPU", "1 CPU, 0.4 GPU", 4),
        ("9 CPU, 5 GPU", "1 CPU, 2 GPU", 2),
    ],
)
def test_number_of_actors_that_fit_a_node(node: str, needs: str, fit: int) -> None:
    assert capacity.actors_that_fit(resources(node), resources(needs)) == fit


def with_learners(num_learners: int) -> dict[str, Any]:
    """Return the settings of a run whose learners take the largest nodes."""
    return {"num_learners": num_learners, "learner_cpus": 1.5}


def kinds_of_actors(*kinds: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of actors of several kinds, each with resources of its own."""
    return {"actor_resources": [resources(kind) for kind in kinds], **settings}


@pytest.mark.parametrize(
    ("settings", "nodes", "rooms"),
    [
        ({"actors_per_node": 2}, ["8 CPU", "1 CPU", "3 CPU"], [5]),
        # another run has two there
        ({"actors_per_node": 3}, [f"8 CPU, 0.3334 {PER_NODE}"], [1]),
        ({"actors_per_node": 100, "cpus_per_actor": 0.01}, ["8 CPU"], [100]),
        (kinds_of_actors("1 a", "2 b"), ["8 CPU, 4 a", "2 CPU, 1 a, 9 b", "9 CPU"], [5, 1]),
        (kinds_of_actors("1 a", "1 b", actors_per_node=3), ["8 CPU, 2 a, 2 b"], [2, 1]),
        (kinds_of_actors("0.0625 node:big", "0.25 node:small"), BIG_AND_SMALL, [16, 4]),
        (with_learners(0), ["2 CPU", "2 CPU"], [4]),
        (with_learners(1), ["2 CPU", "2 CPU"], [2]),
        (with_learners(2), ["2 CPU", "3 CPU"], [2]),
        (with_learners(2), ["1 CPU"], [1]),
        (with_learners(0), [], [0]),
    ],
)
def test_the_room_for_actors(settings: dict[str, Any], nodes: list[str], rooms: list[int]) -> None:
    available = [resources(node) for node in nodes]
    needed = demand(**settings)
    assert capacity.rooms_for(available, needed) == rooms
    assert room_for(available, needed) == sum(rooms)


@pytest.mark.parametrize(
    ("nodes_per_env", "cpus", "changes", "nodes", "room"),
    [
        (2, "4 4 4 4", {}, 2, 2),
        (2, "4 4 4", {}, 2, 1),  # one node is left over
        (2, "64 3", {}, 2, 0),  # a large node does not make up for a small one
        ("auto", "8 8", {}, 1, 2),  # ranks that fit on one node stay there
        ("auto", "8 4 4", {}, 2, 2),  # as many actors as are wanted fit on two nodes each
        ("auto", "2 2 2 2", {}, 4, 1),  # one actor fits, on all nodes
        ("auto", "7 7", {"num_actors": 1}, 2, 1),
        ("auto", "1", {}, 1, 0),
        (2, "8 4 4 8", {"evaluators": 1}, 2, 2),
        # a learner takes its part of the largest node
        (2, "9 4 4", {"num_learners": 1, "learner": {"CPU": 2.0}}, 2, 1),
    ],
)
def test_actors_take_equal_parts_of_several_nodes(
    nodes_per_env: int | str, cpus: str, changes: dict[str, Any], nodes: int, room: int
) -> None:
    available = machines(*map(float, cpus.split()))
    needed = replace(demand(**across(nodes_per_env)), **changes)
    chosen = across_nodes(needed, available)
    assert chosen.nodes == nodes
    assert chosen.actor["CPU"] == 8 / nodes
    assert room_for(available, chosen) == room
    processes = chosen.num_actors + chosen.evaluators
    assert chosen.total()["CPU"] == processes * 8 + chosen.num_learners * 2


# ------------------------------------------------------------------ this machine


@executes("transports/ray/capacity.py: this machine is the only node. Use `nodes_per_env=1`")
@pytest.mark.parametrize(
    ("settings", "gpus", "refused"),
    [
        (
            {"num_actors": 8, "actor_gpus": 1},
            1,
            "actor_gpus=1: 8 actors of 1 GPU each need 8 GPUs, this machine has 1. .*actor_gpus=0.25",
        ),
        (
            {"actor_gpus": 1},
            0,
            "actor_gpus=1: 1 actor of 1 GPU each need 1 GPU, this machine has 0",
        ),
        (
            {"num_actors": 9, "actor_gpus": 0.25},
            2,
            "actor_gpus=0.25: 9 actors of 0.25 GPU each need 3 GPUs, this machine has 2",
        ),
        # two of them do not share one
        ({"num_actors": 2, "actor_gpus": 0.6}, 1, "need 2 GPUs"),
        (
            {"num_actors": 4, "num_learners": 2, "learner_gpus": 1},
            1,
            "learner_gpus=1: 2 learners of 1 GPU each need 2 GPUs, this machine has 1",
        ),
        # the sum of the floats exceeds 1
        ({"num_actors": 9, "actor_gpus": 0.01, "num_learners": 13, "learner_gpus": 0.07}, 1, ""),
        (
            {"num_actors": 2, "actor_gpus": 0.5, "num_learners": 1, "learner_gpus": 1},
            1,
            "2 actors of 0.5 GPU each and 1 learner of 1 GPU each need 2 GPUs",
        ),
        ({"actor_gpus": 1, "evaluators": 1}, 2, ""),
        (
            {"actor_gpus": 1, "evaluators": 1},
            1,
            r"actor_gpus=1: 2 actors \(1 for evaluations\) of 1 GPU each need 2",
        ),
        ({"num_actors": 3, "actors_per_node": 3, "num_learners": 2}, 0, ""),
        (
            {"num_actors": 4, "actors_per_node": 3, "num_learners": 2},
            0,
            "actors_per_node=3: .* 4 actors .* Use at most `num_actors=3`",
        ),
        ({"num_actors": 3, "actors_per_node": 4, "evaluators": 1}, 0, ""),
        (
            {"num_actors": 4, "actors_per_node": 4, "evaluators": 1},
            0,
            "actors_per_node=4: .* 4 actors beside 1 of evaluations are .* Use at most `num_actors=3`, raise",
        ),
        (
            {"actors_per_node": 2, "evaluators": 2},
            0,
            "actors_per_node=2: .* Raise `actors_per_node`",
        ),
        ({"num_actors": 4, "actor_resources": [{"a": 1}]}, 0, ""),
        (TWO_LICENCES, 0, "actor_resources: the 2 alternatives .* `address`"),
        (across(2), 0, "nodes_per_env=2: this machine is the only node"),
        (across(1), 0, ""),
        (across("auto"), 0, ""),
    ],
)
def test_what_this_machine_cannot_place_is_refused_before_ray_starts(
    settings: dict[str, Any], gpus: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: 400)
    if not refused:
        return check_here(demand(**settings), gpus)
    with pytest.raises(ConfigError, match=refused):
        check_here(demand(**settings), gpus)


LEARNERS = [
    {"num_learners": 0, "learner_gpus": 0.0},
    {"num_learners": 1, "learner_gpus": 1.0},
    {"num_learners": 2, "learner_gpus": 0.4},
    {"num_learners": 3, "learner_gpus": 0.3},
]
GPUS_OF_AN_ACTOR = [0.07, 0.15, 0.25, 0.3, 1 / 3, 0.4, 0.6, 1.0, 2.0]


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_the_actors_that_fit_the_gpus_of_this_machine_are_not_refused(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would one more be allowed."""
    monkeypatch.setattr(capacity, "usable_cores", lambda: 400)
    for actor_gpus, learner_settings, evaluators in product(GPUS_OF_AN_ACTOR, LEARNERS, [0, 2]):
        needed = demand("1..400", evaluators, actor_gpus=actor_gpus, **learner_settings)
        fitted = capacity.fitted_here(needed, gpus, lambda _: None)
        if fitted.num_actors > 1:
            check_here(fitted, gpus)
        one_more = replace(fitted, num_actors=fitted.num_actors + 1)
        with pytest.raises(ConfigError, match="actor_gpus="):
            check_here(one_more, gpus)


def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"this machine has 0 \(CUDA_VISIBLE_DEVICES=\)"):
        check_here(demand(actor_gpus=1), capacity.gpus_here())


@pytest.mark.parametrize(
    ("num_actors", "changes", "used"),
    [
        ("1..8", {}, 3),
        ("1..2", {}, 2),
        ("4..8", {}, 4),
        ("1..8", {"cpus_per_actor": 0.5}, 6),
        ("1..8", {"actor_resources": {"licence": 2}}, 3),
        ("1..8", {"actors_per_node": 2}, 2),
    ],
)
def test_a_ray_started_here_gets_as_many_actors_as_there_are_cores(
    num_actors: str, changes: dict[str, Any], used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    notes: list[str] = []
    fitted = capacity.fitted_here(demand(num_actors, **changes), 0, notes.append)
    assert fitted.num_actors == used
    assert notes == [f"using {used} actors: this machine has 3 cores"]


# ------------------------------------------------------------------ a cluster

Report = Callable[[bytes], None]
BY_HAND = "node_d22930ce7ff40131afe61a09b90506f70a6beb0395de5ccf9d1ca95c"


def report(*types: str) -> bytes:
    """Return a status report of Ray's monitor."""
    return json.dumps(
        {"autoscaler_report": {"active_nodes": dict.fromkeys(types, 1), "pending_launches": {}}}
    ).encode()


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return a function that sets the report of Ray's monitor; all nodes are idle."""
    monkeypatch.setattr(capacity, "free_room", lambda demand: demand.num_actors)
    reader = "ray.experimental.internal_kv._internal_kv_get"
    return lambda content: monkeypatch.setattr(reader, lambda key: content)


def check_cluster(nodes: list[Node], needed: Demand, notify: Any = pytest.fail) -> None:
    listed = [{"Resources": node, "Alive": True} for node in nodes]
    ray = SimpleNamespace(nodes=lambda: listed)
    in_ray_thread(partial(capacity.check_cluster, ray, needed, notify))


def test_a_cluster_in_use_says_how_many_actors_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs have a CPU of each machine."""
    available = {"first": {"CPU": 1.0}, "second": {"CPU": 1.0}}
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: available)
    notes: list[str] = []
    check_cluster(machines(2, 2), demand(num_actors=4), notes.append)
    assert notes == [
        "the cluster has room for 2 of 4 actors now (1 CPU each); the others start when other jobs end."
    ]
    available["first"]["CPU"] = 2.0
    check_cluster(machines(2, 2), demand(num_actors=3))


@pytest.mark.parametrize(
    ("settings", "nodes", "refused"),
    [
        ({"num_actors": 5}, machines(2, 2), "num_actors=5 .* 1 CPU each .* 4 CPU .* Use at most 4"),
        (
            {"num_actors": 4, "cpus_per_actor": 1.5},
            machines(2, 2),
            "1.5 CPU each .* hold 2. Use at most 2, lower `cpus_per_actor`",
        ),
        (
            {"actor_resources": {"licence": 1}},
            machines(2),
            "1 licence each .* 0 licence and hold 0",
        ),
        (
            {"num_actors": 4, "actors_per_node": 1},
            machines(2, 2),
            "1 CPU .at most 1 on a node. each .* Use at most 2, raise `actors_per_node`",
        ),
        # a process stays on one GPU
        ({"num_actors": 4, "actor_gpus": 0.4}, [{"CPU": 16, "GPU": 2}], ""),
        (
            {"num_actors": 5, "actor_gpus": 0.4},
            [{"CPU": 16, "GPU": 2}],
            "CPU . 0.4 GPU each do not fit .* hold 4. Use at",
        ),
        # 0.2 + 3 * 1.6 > 5
        ({"cpus_per_actor": 0.2, "num_learners": 3, "learner_cpus": 1.6}, machines(5), ""),
        ({"evaluators": 1}, machines(2), ""),
        (
            {"num_actors": 2, "evaluators": 1},
            machines(2),
            "num_actors=2 actors of 1 CPU each beside 1 of evaluations do not fit .* have 2 CPU and hold 1. Use at",
        ),
        ({"evaluators": 3}, machines(2), "3 of evaluations do .* hold 0. Lower `cpus_per_actor`"),
        (
            {"num_actors": 2, "evaluators": 1, "num_learners": 3, "learner_cpus": 1},
            machines(5),
            "num_learners=3: 2 actors beside 1 of evaluations and 3 learners need 6 CPU, .* have 5 CPU. Use fewer",
        ),
        # each actor holds one of the alternatives, and not the first of them
        *(
            (
                {"num_actors": 8, "num_learners": learners} | TWO_LICENCES,
                [{"CPU": 16.0, "licence_a": 4.0}, {"CPU": 16.0, "licence_b": 4.0}],
                refused,
            )
            for learners, refused in (
                (2, ""),
                (30, "num_learners=30: 8 actors and 30 learners need 38 CPU, the cluster's 2 nod"),
            )
        ),
        (
            across(2),
            machines(4, 4, 4),
            r"2 x 4 CPU each .* its 3 nodes have 12 CPU and hold 1\. The ranks of 1 sampler fit",
        ),
        (
            across(1),
            machines(4, 4, 4),
            r"8 CPU each .* hold 0\. .* let ranks have several \(`nodes_per_env=auto`\)",
        ),
    ],
)
def test_a_cluster_that_fits_exactly_is_not_refused_and_a_smaller_one_is(
    settings: dict[str, Any], nodes: list[Node], refused: str, status: Report
) -> None:
    status(report(BY_HAND))
    needed = demand(**settings)
    if "nodes_per_env" in settings:
        needed = across_nodes(needed, nodes)
    if not refused:
        return check_cluster(nodes, needed)
    with pytest.raises(ConfigError, match=refused):
        check_cluster(nodes, needed)


def test_a_cluster_with_an_autoscaler_may_be_too_small(status: Report) -> None:
    logged = list[str]()
    status(report("headgroup"))
    check_cluster(machines(2), demand(8), logged.append)
    [line] = logged
    assert "hold 2. The cluster has an autoscaler" in line


@pytest.mark.parametrize(
    ("content", "there"),
    [
        (report(BY_HAND), False),
        (report("headgroup"), True),
        (report(BY_HAND, "workers"), True),
        (b"no JSON", False),
    ],
)
def test_an_autoscaler_is_detected_by_the_types_of_nodes(
    content: bytes, there: bool, status: Report
) -> None:
    status(content)
    assert in_ray_thread(partial(capacity.has_autoscaler, None)) is there


def test_a_ray_started_here_has_no_autoscaler(ray_session: None) -> None:
    import ray

    assert not in_ray_thread(partial(capacity.has_autoscaler, ray))


# ------------------------------------------------------------------ what else is said of several nodes


def config_of(nodes_per_env: int | str) -> dppo.Config:
    settings = {"env_id": "dppo.remote:make", "ranks_per_env": 4, "num_actors": 2}
    return make_config(settings | {"nodes_per_env": nodes_per_env})


@pytest.mark.parametrize("nodes", [0, "all"])
def test_another_form_of_nodes_per_env_is_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=f"nodes_per_env={nodes}: must be a number"):
        config_of(nodes)


def test_the_doctor_says_that_it_measures_one_node() -> None:
    texts = [text for _, text in findings({}, config_of(2))]
    assert "nodes_per_env=2: all ranks were started on this machine" in texts[0]
