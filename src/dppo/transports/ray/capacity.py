"""Check that a cluster or this machine has room for the processes of a run."""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dppo.errors import ConfigError, counted
from dppo.machine import cores_in_words, usable_cores
from dppo.slots.layout import CORES_REMEDY
from dppo.transports.ray.calls import calls_ray

# Without an autoscaler, Ray reports each node as its own type: "node_" and the id of the node.
NOT_AUTOSCALED = re.compile(r"node_[0-9a-f]{56}")
# Each node has 1 of a resource with this prefix, also in the plans of autoscalers. Ray Serve limits replicas so, too.
PER_NODE = "node:__internal_implicit_resource_dppo"


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of processes of a run, and the resources of each."""

    num_actors: int
    actor: dict[str, float]
    num_learners: int
    learner: dict[str, float]
    most_actors: int = 0  # 0 if the number of actors is fixed; else they join and leave, and `num_actors` is the fewest
    # resources that an actor may take instead of `actor`
    alternatives: tuple[dict[str, float], ...] = ()
    evaluators: int = 0  # further actors, which take the resources of `actor`
    # samplers of an actor whose CPUs are the cores of its environments' ranks
    samplers_with_cores: int = 0
    nodes: int = 1  # nodes of an actor, whose environments have as many ranks on each; `actor` is its part on the first
    node_counts: tuple[int, ...] = (1,)  # possible values of `nodes`

    @property
    def further(self) -> dict[str, float]:
        """The resources of an actor on each further node."""
        return {"CPU": self.actor["CPU"]}

    @property
    def groups(self) -> tuple[dict[str, float], ...]:
        """The resources of an actor, and the alternatives to these."""
        return self.actor, *self.alternatives

    def total(self) -> dict[str, float]:
        total = defaultdict[str, float](float)
        for count, needs in (
            (self.num_actors + self.evaluators, self.actor),
            (self.num_learners, self.learner),
        ):
            for name, amount in needs.items():
                total[name] += count * amount
        num_further = (self.num_actors + self.evaluators) * (self.nodes - 1)
        total["CPU"] += num_further * self.further["CPU"]
        return {name: amount for name, amount in total.items() if amount > 0 and name != PER_NODE}


def actors_that_fit(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return the number of actors with these `needs` that fit the resources of one node."""
    return min(
        _that_fit(name, node.get(name, 0.0), amount) for name, amount in needs.items() if amount > 0
    )


def _that_fit(name: str, amount: float, needed: float) -> int:
    if name == "GPU" and needed < 1:  # each process stays on one GPU
        whole_gpus, part = divmod(amount + 1e-6, 1)
        return int(whole_gpus) * int(1 / needed + 1e-6) + int(part / needed)
    return int(amount / needed + 1e-6)


def rooms_for(nodes: Iterable[Mapping[str, float]], demand: Demand) -> list[int]:
    """Return the number of actors of each group that fit the nodes; learners take the largest nodes."""
    rooms = [0] * (1 + len(demand.groups))
    learners = demand.num_learners
    beside_learners = []
    for node in sorted(nodes, key=lambda node: -node.get("CPU", 0.0)):
        num_fitting = min(learners, actors_that_fit(node, demand.learner)) if learners else 0
        learners -= num_fitting
        unused = {PER_NODE: 1.0, **node}
        for number, needs in enumerate([demand.learner, *demand.groups]):
            num_fitting = actors_that_fit(unused, needs) if number else num_fitting
            unused = {
                name: amount - num_fitting * needs.get(name, 0.0) for name, amount in unused.items()
            }
            rooms[number] += num_fitting
            if number == 0:
                beside_learners.append(unused)
    if demand.nodes > 1:
        return [_room_across(beside_learners, rooms[1], demand)]
    return rooms[1:]


def has_place(node: Mapping[str, float], demand: Demand) -> bool:
    """Return whether a node has the resources of an actor, or of a part of one on several nodes."""
    parts = list(demand.groups)
    if demand.nodes > 1:
        parts.append(demand.further)
    resources = {PER_NODE: 1.0, **node}
    return any(actors_that_fit(resources, needs) for needs in parts)


def _room_across(nodes: Iterable[Mapping[str, float]], most: int, demand: Demand) -> int:
    """Return the number of actors, `most` at most, that fit if each takes a part of several nodes."""
    parts = [actors_that_fit(node, demand.further) for node in nodes]
    while sum(min(part, most) for part in parts) < most * demand.nodes:
        most -= 1
    return most


def across_nodes(demand: Demand, nodes: Iterable[Mapping[str, float]]) -> Demand:
    """Return the demand with the fewest nodes for each actor with which enough of them fit; else one, the largest."""
    nodes = list(nodes)
    cpus = demand.actor["CPU"]
    choices = [
        replace(demand, nodes=count, actor=demand.actor | {"CPU": math.ceil(cpus / count)})
        for count in demand.node_counts
    ]
    for enough in (demand.num_actors, 1):
        for choice in choices:
            if room_for(nodes, choice) >= enough:
                return choice
    return choices[0]


def room_for(nodes: Iterable[Mapping[str, float]], demand: Demand) -> int:
    """Return the number of actors that fit the nodes in addition to the learners and the actors of evaluations."""
    return max(0, sum(rooms_for(nodes, demand)) - demand.evaluators)


def in_words(*groups: dict[str, float]) -> str:
    """Format the resources of an actor for a message: `1 CPU + 2 licence`."""
    texts = [
        " + ".join(f"{amount:g} {name}" for name, amount in group.items() if name != PER_NODE)
        for group in groups
    ]
    text = " or ".join(texts)
    if PER_NODE in groups[0]:
        text += f" (at most {round(1 / groups[0][PER_NODE])} on a node)"
    return text


def actor_in_words(demand: Demand) -> str:
    """Format the resources of an actor for a message: `1 CPU`, or `2 x 8 CPU` on two nodes."""
    text = in_words(*demand.groups)
    return text if demand.nodes == 1 else f"{demand.nodes} x {text}"


def fitted_here(demand: Demand, gpus: int, notify: Callable[[str], None]) -> Demand:
    cores = usable_cores()
    machine = {
        name: (demand.most_actors + demand.evaluators) * amount
        for name, amount in demand.actor.items()
    }
    machine |= {"CPU": cores, "GPU": gpus, PER_NODE: 1.0}
    number = max(demand.num_actors, min(room_for([machine], demand), demand.most_actors))
    while number > demand.num_actors and _gpus_for(replace(demand, num_actors=number)) > gpus:
        number -= 1  # a learner's part of a GPU may leave too little for an actor on each
    notify(f"using {counted(number, 'actor')}: this machine has {cores_in_words()}")
    return replace(demand, num_actors=number)


def gpus_here() -> int:
    """Count the GPUs that Ray would find on this machine; CUDA_VISIBLE_DEVICES may hide some."""
    # ray.init counts in the same way, and refuses to exceed it
    from ray._private import accelerators

    manager = accelerators.get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return 0
    visible = manager.get_current_process_visible_accelerator_ids()
    count = int(manager.get_current_node_num_accelerators())
    if visible is None:
        return count
    return min(count, len(visible))


def check_here(demand: Demand, gpus: int) -> None:
    """Raise `ConfigError` if the actors cannot be placed on this machine, the only node of a Ray that starts here."""
    if demand.alternatives:
        raise ConfigError(
            f"actor_resources: the {len(demand.groups)} alternatives are for the nodes of a running cluster. Set "
            f"`address`, or name the resources of one."
        )
    if 1 not in demand.node_counts:
        raise ConfigError(
            f"nodes_per_env={demand.node_counts[0]}: this machine is the only node. Use `nodes_per_env=1`, or a "
            f"cluster (address).",
            setting="nodes_per_env",
        )
    if demand.samplers_with_cores:
        _check_cores_here(demand)
    room = room_for([demand.total() | {"GPU": 1e6}], demand)  # `check_gpus` counts these
    if room < demand.num_actors:
        limit = round(1 / demand.actor[PER_NODE])
        use = "Raise"
        if room > 0:
            use = f"Use at most `num_actors={room}`, raise"
        raise ConfigError(
            f"actors_per_node={limit}: this machine is the only node, and {demand.num_actors} actors"
            f"{_evaluators_of(demand)} are wanted. {use} `actors_per_node`, or use a cluster (address)."
        )
    check_gpus(demand, gpus)


def _check_cores_here(demand: Demand) -> None:
    """Raise `ConfigError` if this machine has too few cores for ranks that have cores of their own."""
    cores = int(demand.actor["CPU"])
    room = usable_cores() // cores - demand.evaluators
    if room < demand.num_actors:
        raise ConfigError(
            f"ranks_per_env: {counted(demand.num_actors, 'actor')}{_evaluators_of(demand)} need {cores} cores each, "
            f"for the ranks of their environments, and this machine has {cores_in_words()}, enough for "
            f"{max(0, room)}. {CORES_REMEDY}"
        )


def check_gpus(demand: Demand, gpus: int) -> None:
    """Raise `ConfigError` if a run needs more than this machine's `gpus`: Ray would wait for them silently."""
    needed = _gpus_for(demand)
    if needed <= gpus:
        return
    has = str(gpus)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        has += f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})"
    groups = _with_gpus(demand)
    processes = []
    for noun, number, gpus_each in groups:
        for_evaluations = ""
        if noun == "actor" and demand.evaluators:
            for_evaluations = f" ({demand.evaluators} for evaluations)"
        processes.append(f"{counted(number, noun)}{for_evaluations} of {gpus_each:g} GPU each")
    noun, _, gpus_each = groups[0]
    raise ConfigError(
        f"{noun}_gpus={gpus_each:g}: {' and '.join(processes)} need {counted(needed, 'GPU')}, this machine has "
        f"{has}. Use fewer processes, a fraction such as `actor_gpus=0.25` to share a GPU, or a larger "
        f"cluster (address)."
    )


def _with_gpus(demand: Demand) -> list[tuple[str, int, float]]:
    """Return the kind, the number and the GPUs of each, of the processes that have any."""
    num_actors = demand.num_actors + demand.evaluators
    kinds = (
        ("actor", num_actors, demand.actor.get("GPU", 0.0)),
        ("learner", demand.num_learners, demand.learner.get("GPU", 0.0)),
    )
    return [(noun, count, gpus) for noun, count, gpus in kinds if count and gpus]


def _gpus_for(demand: Demand) -> int:
    return math.ceil(sum(_gpu_slots(count, gpus) for _, count, gpus in _with_gpus(demand)) - 1e-6)


def _evaluators_of(demand: Demand) -> str:
    if demand.evaluators:
        return f" beside {demand.evaluators} of evaluations"
    return ""


def _gpu_slots(count: int, gpus: float) -> float:
    """Return the GPUs that `count` processes occupy: a process with a fraction of a GPU stays on one GPU."""
    if gpus >= 1:
        return count * gpus
    full_gpus, processes_left = divmod(count, int(1 / gpus + 1e-6))
    return full_gpus + processes_left * gpus


@calls_ray
def check_cluster(ray: Any, demand: Demand, notify: Callable[[str], None]) -> None:
    """Raise `ConfigError` if the cluster is too small: Ray would wait silently. Warn if it can grow or is busy."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def have(names: Iterable[str]) -> dict[str, float]:
        return {name: sum(node.get(name, 0.0) for node in nodes) for name in names}

    needs = demand.total()
    holds = room_for(nodes, replace(demand, num_learners=0))
    actors = demand.num_actors
    if demand.alternatives:  # what all alternatives take alike; `holds` counts the rest
        alike = [
            name
            for name in demand.learner
            if len({group.get(name) for group in demand.groups}) == 1
        ]
        needs = {name: needs[name] for name in alike if name in needs}
    too_small = any(amount < needs[name] - 1e-6 for name, amount in have(needs).items())
    if demand.num_learners and too_small:
        fact = (
            f"num_learners={demand.num_learners}: {actors} actors{_evaluators_of(demand)} and {demand.num_learners} "
            f"learners need {in_words(needs)}, the cluster's {len(nodes)} nodes have {in_words(have(needs))}"
        )
        remedy = "Use fewer, or lower `learner_cpus` or `cpus_per_actor`."
    elif holds < actors:
        names = dict.fromkeys(name for group in demand.groups for name in group if name != PER_NODE)
        fact = (
            f"num_actors={actors} actors of {actor_in_words(demand)} each{_evaluators_of(demand)} do not fit the "
            f"cluster: its {len(nodes)} nodes have {in_words(have(names))} and hold {holds}"
        )
        remedy = "lower `cpus_per_actor` (0.5 lets two share a CPU), or add nodes."
        if PER_NODE in demand.actor:
            remedy = "raise `actors_per_node`, or add nodes."
        if holds:
            remedy = f"use at most {holds}, {remedy}"
        remedy = remedy[0].upper() + remedy[1:]
        if demand.samplers_with_cores:
            hosted = holds * demand.samplers_with_cores
            spread = (
                "" if demand.nodes > 1 else ", or let ranks have several (`nodes_per_env=auto`)"
            )
            remedy = f"The ranks of {counted(hosted, 'sampler')} fit. {CORES_REMEDY} Or add nodes{spread}."
    else:
        num_free = free_room(demand)
        if num_free < actors:
            room = f"the cluster has room for {num_free} of {actors} actors now ({actor_in_words(demand)} each)"
            notify(f"{room}; the others start when other jobs end.")
        return
    if not has_autoscaler(ray):
        raise ConfigError(f"{fact}. {remedy}")
    notify(f"{fact}. The cluster has an autoscaler: the others start when it has added nodes.")


@calls_ray
def free_room(demand: Demand) -> int:
    """Return the number of actors that the connected cluster could start now."""
    from ray._private.state import available_resources_per_node

    return room_for(available_resources_per_node().values(), replace(demand, num_learners=0))


@calls_ray
def has_autoscaler(ray: Any) -> bool:
    """Return whether an autoscaler manages the cluster: then the types of its nodes have configured names."""
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        status = json.loads(_internal_kv_get("__autoscaling_status") or b"{}")
        report = status.get("autoscaler_report") or {}
        types = [*report.get("active_nodes", {}), *report.get("pending_launches", {})]
        types += (report.get("node_type_mapping") or {}).values()
        if not types:  # the second autoscaler reports elsewhere
            from ray.autoscaler.v2.sdk import get_cluster_status

            status = get_cluster_status(ray.get_runtime_context().gcs_address)
            if status.stats.autoscaler_version not in (None, "", "0"):
                nodes = (*status.active_nodes, *status.idle_nodes)
                types = [node.ray_node_type_name for node in nodes]
    except Exception:
        # the form of Ray's report is not documented; without one, expect no autoscaler
        return False
    return any(name and not NOT_AUTOSCALED.fullmatch(name) for name in types)
