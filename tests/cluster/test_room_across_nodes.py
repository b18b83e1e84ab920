"""Actors with cores on several nodes: how many fit, how many nodes each takes, and settings that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_config
from processes import in_ray_thread
from remedies import executes

import dppo
from dppo.config.parts import Actors, Learners, Sampling
from dppo.errors import ConfigError
from dppo.tools.doctor.findings import findings
from dppo.transports.ray import capacity
from dppo.transports.ray.capacity import Demand, across_nodes, check_here, room_for
from dppo.transports.ray.session import demand_of


def demand(ranks: int, nodes: int | str, **changes: Any) -> Demand:
    """Return the demand of two actors, each with one environment, whose ranks are on several nodes."""
    actors = Actors(num_actors=2, ranks_per_env=ranks, nodes_per_env=nodes)
    placed = actors.placed(Sampling(num_samplers=2))
    return replace(demand_of(placed, Learners()), **changes)


def machines(cpus: tuple[int, ...]) -> list[dict[str, float]]:
    return [{"CPU": float(count)} for count in cpus]


@dataclass
class Case:
    """Environments of eight ranks on nodes with so many CPUs."""

    nodes_per_env: int | str
    cpus: tuple[int, ...]
    nodes: int
    """Nodes that each actor takes."""
    room: int
    """Actors that fit."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the demand."""


CASES = [
    # four nodes are two pairs
    Case(2, (4, 4, 4, 4), nodes=2, room=2),
    # one node of three is left over
    Case(2, (4, 4, 4), nodes=2, room=1),
    # a large node does not make up for a small one
    Case(2, (64, 3), nodes=2, room=0),
    # ranks that fit on one node stay there
    Case("auto", (8, 8), nodes=1, room=2),
    # as many actors as are wanted fit on two nodes each
    Case("auto", (8, 4, 4), nodes=2, room=2),
    # one actor fits, on all nodes
    Case("auto", (2, 2, 2, 2), nodes=4, room=1),
    # a single actor may have two nodes
    Case("auto", (7, 7), nodes=2, room=1, changes={"num_actors": 1}),
    # nothing fits
    Case("auto", (1,), nodes=1, room=0),
    # an actor of evaluations takes as much as another
    Case(2, (8, 4, 4, 8), nodes=2, room=2, changes={"evaluators": 1}),
    # a learner takes its part of the largest node
    Case(2, (9, 4, 4), nodes=2, room=1, changes={"num_learners": 1, "learner": {"CPU": 2.0}}),
]


@pytest.mark.parametrize("case", CASES)
def test_actors_take_equal_parts_of_several_nodes(case: Case) -> None:
    nodes = machines(case.cpus)
    chosen = across_nodes(demand(8, case.nodes_per_env, **case.changes), nodes)
    assert chosen.nodes == case.nodes
    assert chosen.actor["CPU"] == 8 / case.nodes
    assert room_for(nodes, chosen) == case.room
    processes = chosen.num_actors + chosen.evaluators
    assert chosen.total()["CPU"] == processes * 8 + chosen.num_learners * 2


@pytest.mark.parametrize(
    ("nodes_per_env", "message"),
    [
        (2, r"2 x 4 CPU each .* its 3 nodes have 12 CPU and hold 1\. The ranks of 1 sampler fit"),
        (1, r"8 CPU each .* hold 0\. .* let ranks have several \(`nodes_per_env=auto`\)"),
    ],
)
def test_too_few_nodes_are_refused_with_the_number_that_fits(
    nodes_per_env: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = machines((4, 4, 4))
    ray = SimpleNamespace(nodes=lambda: [{"Resources": node, "Alive": True} for node in nodes])
    monkeypatch.setattr(capacity, "has_autoscaler", lambda ray: False)
    chosen = across_nodes(demand(8, nodes_per_env), nodes)
    with pytest.raises(ConfigError, match=message):
        in_ray_thread(partial(capacity.check_cluster, ray, chosen, print))


@executes("transports/ray/capacity.py: this machine is the only node. Use `nodes_per_env=1`")
def test_several_nodes_are_refused_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"nodes_per_env=2: this machine is the only node"):
        check_here(demand(2, 2), 0)
    small = {"actor": {"CPU": 0.5}, "samplers_with_cores": 0}
    check_here(demand(2, 1, **small), 0)
    check_here(demand(2, "auto", **small), 0)


def config_of(nodes_per_env: int | str) -> dppo.Config:
    settings = {"env_id": "dppo.remote:make", "ranks_per_env": 4, "num_actors": 2}
    return make_config(settings | {"nodes_per_env": nodes_per_env})


@pytest.mark.parametrize("nodes", [0, "all"])
def test_another_form_of_nodes_per_env_is_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=f"nodes_per_env={nodes}: must be a number"):
        config_of(nodes)


def test_the_doctor_says_that_it_measures_one_node() -> None:
    config = config_of(2)
    texts = [text for _, text in findings({}, config)]
    assert "nodes_per_env=2: all ranks were started on this machine" in texts[0]
