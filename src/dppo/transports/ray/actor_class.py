"""The class of the actors of a run, as Ray starts them: on one node, or with cores of several."""

from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.capacity import Demand

NODE_LABEL = "ray.io/node-id"  # Ray gives it to each node


class ActorClass:
    """A class whose instances take some resources."""

    def __init__(self, kind: type, resources: Mapping[str, float], options: dict[str, Any]) -> None:
        self._class: Any = ray.remote(kind)
        self._options = options | {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "resources": {
                name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")
            },
            "max_restarts": 0,  # the engine replaces actors, so it must see every death
            "max_task_retries": 0,
            "enable_task_events": False,
        }

    @calls_ray
    def start(
        self, arguments: tuple[Any, ...], group: PlacementGroup | None, avoided: Iterable[str] = ()
    ) -> Any:
        """Request an actor: in the first bundle of a group; without one on any node, if possible not on `avoided`."""
        strategy: Any = "SPREAD"
        options = self._options
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, 0)
        elif avoided:
            selector = {"label_selector": {NODE_LABEL: f"!in({','.join(avoided)})"}}
            options = options | selector | {"fallback_strategy": [{"label_selector": {}}]}
        return self._class.options(scheduling_strategy=strategy, **options).remote(*arguments)


@calls_ray
def group_of(demand: Demand) -> PlacementGroup | None:
    """Reserve the resources of an actor on several nodes; None if it needs one only."""
    if demand.nodes == 1:
        return None
    bundles = [demand.actor, *[demand.further] * (demand.nodes - 1)]
    return placement_group(bundles, strategy="STRICT_SPREAD")
