"""RayTrainers: SGD spread over several learners on Ray, which live and are replaced together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dppo.assemble import model_spec
from dppo.cluster.actor import or_raise
from dppo.cluster.rank import COLLECTIVE_TIMEOUT, TrainerRank
from dppo.cluster.recovery import RestartBudget
from dppo.config import Config
from dppo.errors import ClusterError
from dppo.ppo.normalizer import Statistics
from dppo.ppo.segment import Incident
from dppo.spaces import Spaces

START_TIMEOUT_S = 120.0  # for a process that imports torch, on a machine that starts many at once
ASK_EVERY_S = 3.0  # how often a rank is asked whether it runs
SILENT_S = 20.0  # a rank that has not answered for so long is stopped, or its node is gone
MAX_REBUILDS = 3  # in a row, without an update between them


class RayTrainers:
    """L ranks of one trainer. Segments go to them by reference; figures and weights come back.

    A rank that dies or falls silent takes the whole group with it, for the others wait for it in the middle of a sum:
    all are started anew from the state before the update, which is then done again on the same segments, with the
    same result.
    """

    def __init__(self, config: Config, spaces: Spaces, notify: Callable[[str], None]) -> None:
        self.spec = model_spec(config, spaces)
        # A rank has no environments, and shall not import the user's module.
        self._config = config.model_copy(update={"env_id": config.env_name})
        self._spaces = spaces
        self._notify = notify
        self._budget = RestartBudget(MAX_REBUILDS)
        self._ranks: list[Any] = []
        self._weights: np.ndarray | None = None
        self._state: ObjectRef[Any] | dict[str, np.ndarray] | None = None
        self._incidents: list[Incident] = []
        bundle = {"CPU": config.learner_cpus, "GPU": config.learner_gpus}
        self._bundle = {name: amount for name, amount in bundle.items() if amount > 0}
        self._group = placement_group([self._bundle] * config.num_learners, strategy="PACK")
        if not self._group.wait(START_TIMEOUT_S):
            remove_placement_group(self._group)
            raise ClusterError(
                f"num_learners={config.num_learners} learners of {self._bundle} each found no room in the cluster within "
                f"{START_TIMEOUT_S:.0f} s (see `ray status`). Use fewer, or lower --learner-cpus or --learner-gpus."
            )
        self._build()

    # ------------------------------------------------------------------ the face of a trainer

    def update(self, segments: Sequence[Any], statistics: Statistics, iteration: int) -> dict[str, float]:
        """One PPO update on the segments of `iteration`, each rank on those of its samplers.

        Waits for: all ranks, as long as each shows that it runs. Fails when: an update diverges, or the group has been
        rebuilt too often in a row.
        """
        share = len(segments) // len(self._ranks)
        while True:
            calls = [
                handle.update.options(num_returns=3).remote(
                    statistics, iteration, *segments[rank * share : (rank + 1) * share]
                )
                for rank, handle in enumerate(self._ranks)
            ]
            try:
                self._wait([figures for figures, _, _ in calls])
                figures: dict[str, float] = or_raise(ray.get(calls[0][0], timeout=START_TIMEOUT_S))
                self._weights = ray.get(calls[0][1], timeout=START_TIMEOUT_S)
            except ObjectLostError as error:
                raise ClusterError(
                    f"the segments of iteration {iteration + 1} were lost with the node that held them ({error}). Go on "
                    f"from the last checkpoint with --resume."
                ) from None
            except (RayError, TimeoutError) as error:
                self._rebuild(error)
                continue
            # The state stays where rank 0 put it, until it is needed.
            self._state = calls[0][2]
            self._budget.delivered(0)
            return figures

    def weights(self) -> np.ndarray:
        """All weights [P]; not to be written."""
        assert self._weights is not None
        return self._weights

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state."""
        if isinstance(self._state, ObjectRef):
            self._state = ray.get(self._state, timeout=START_TIMEOUT_S)
        assert isinstance(self._state, dict)
        return self._state

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state, on every rank."""
        self._weights, self._state = weights, state
        self._load()

    def take_incidents(self) -> list[Incident]:
        """What befell the learners since the last call."""
        incidents, self._incidents = self._incidents, []
        return incidents

    def close(self) -> None:
        for handle in self._ranks:
            ray.kill(handle)
        self._ranks = []
        remove_placement_group(self._group)

    def worth(self, rows: int) -> tuple[float, float, float]:
        """Milliseconds of one minibatch of `rows` rows: on one learner, on all, and of these for the sum of gradients."""
        alone = max(self._all("measure", rows))[0]
        measured = self._all("measure", rows // len(self._ranks))
        shared, summing = max(seconds for seconds, _ in measured), max(seconds for _, seconds in measured)
        return 1e3 * alone, 1e3 * (shared + summing), 1e3 * summing

    # ------------------------------------------------------------------ building and rebuilding

    def _build(self) -> None:
        """Start all ranks and let them meet."""
        config = self._config
        # Asked whether it runs, a rank must answer in the middle of an update.
        remote_class: Any = ray.remote(concurrency_groups={"life": 1})(TrainerRank)
        self._ranks = [
            remote_class.options(
                num_cpus=config.learner_cpus,
                num_gpus=config.learner_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            ).remote(config, self._spaces, rank)
            for rank in range(config.num_learners)
        ]
        host, port = ray.get(self._ranks[0].open_store.remote(), timeout=START_TIMEOUT_S)
        joined = [handle.join.remote(host, port) for handle in self._ranks]
        for answer in ray.get(joined, timeout=START_TIMEOUT_S + COLLECTIVE_TIMEOUT.total_seconds()):
            or_raise(answer)
        if self._weights is None:
            self._weights, self._state = ray.get(self._ranks[0].snapshot.remote(), timeout=START_TIMEOUT_S)

    def _load(self) -> None:
        weights = ray.put(self._weights)
        self._all("load", weights, self._state)

    def _rebuild(self, error: Exception) -> None:
        """Start the group anew from the state before the update."""
        reason = f"a learner {_cause(error)}"
        for handle in self._ranks:
            ray.kill(handle)
        delay = self._budget.spend(0)
        if delay is None:
            raise ClusterError(
                f"{reason}\nThe group of {len(self._ranks)} learners was rebuilt {MAX_REBUILDS} times in a row without "
                f"finishing an update. Go on from the last checkpoint with --resume, or with --num-learners 0."
            )
        self._notify(f"{reason}; all {len(self._ranks)} are started anew, and the update is done again")
        time.sleep(delay)
        began = time.monotonic()
        self._build()
        self._load()
        self._incidents.append(Incident("learners_rebuilt", reason))
        self._notify(f"learners are back after {time.monotonic() - began:.0f} s")

    # ------------------------------------------------------------------ waiting

    def _wait(self, calls: list[ObjectRef[Any]]) -> None:
        """Wait until all calls have ended, or one has failed, or a rank falls silent."""
        pending = list(calls)
        heard = [time.monotonic()] * len(self._ranks)
        asked: dict[ObjectRef[Any], int] = {}
        next_question = time.monotonic() + ASK_EVERY_S
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=0.5)
            if ready:
                ray.get(ready, timeout=START_TIMEOUT_S)  # raises what it raised
            if time.monotonic() < next_question:
                continue
            next_question = time.monotonic() + ASK_EVERY_S
            answered = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
            for ref in answered:
                ray.get(ref)
                heard[asked.pop(ref)] = time.monotonic()
            silent = [rank for rank, when in enumerate(heard) if time.monotonic() - when > SILENT_S]
            if silent:
                raise TimeoutError(f"fell silent: rank {silent[0]} has not answered for {SILENT_S:.0f} s")
            for rank, handle in enumerate(self._ranks):
                if rank not in asked.values():
                    asked[handle.answer.options(concurrency_group="life").remote()] = rank

    def _all(self, method: str, *args: Any) -> list[Any]:
        calls = [getattr(handle, method).remote(*args) for handle in self._ranks]
        self._wait(calls)
        return list(ray.get(calls, timeout=START_TIMEOUT_S))


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not isinstance(error, GetTimeoutError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = "failed" if isinstance(error, RayTaskError) else "died" if isinstance(error, RayActorError) else "is lost"
    return f"{what}: {(lines or [type(error).__name__])[-1][:300]}"
