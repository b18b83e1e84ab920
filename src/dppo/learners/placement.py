"""Placement: the resources that Ray reserves for the ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dppo.learners.waiting import TICK_S
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.failures import call_with_timeout

CLOSE_S = 2.0  # longest wait until Ray has released the resources


class Placement:
    """Reserves equal bundles of resources for all ranks, close together."""

    def __init__(self, bundle: dict[str, float], number: int) -> None:
        self.bundle = bundle
        self._number = number
        self._group: PlacementGroup | None = None

    @calls_ray
    def reserve(
        self, check: Callable[[], None], clock: Callable[[], float], timeout_s: float
    ) -> bool:
        """Reserve them; return whether there was room within `timeout_s`. `check` may end the wait."""
        deadline = clock() + timeout_s
        group = placement_group([self.bundle] * self._number, strategy="PACK")
        self._group = group
        while not group.wait(TICK_S):
            check()
            if clock() > deadline:
                return False
        return True

    def strategy(self, rank: int) -> Any:
        assert self._group is not None, "strategy() without reserve()"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    @calls_ray
    def release(self) -> None:
        """Release the resources, if any are reserved."""
        group = self._group
        if group is not None:
            call_with_timeout(CLOSE_S, partial(remove_placement_group, group))
