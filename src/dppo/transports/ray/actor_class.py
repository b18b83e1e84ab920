"""The class of the actors of a run, as Ray starts them."""

from collections.abc import Mapping
from typing import Any

import ray


def actor_class(kind: type, resources: Mapping[str, float], options: dict[str, Any]) -> Any:
    return ray.remote(kind).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        resources={
            name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")
        },
        scheduling_strategy="SPREAD",
        max_restarts=0,  # the engine replaces actors, so it must see every death
        max_task_retries=0,
        enable_task_events=False,
        **options,
    )
