"""RayTrainers: updates shared by several ranks on Ray, which are started and replaced as one group."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dppo.cluster.learning.rank import COLLECTIVE_TIMEOUT, LOOPBACK, TICK_S, TrainerRank, wait_for, wait_while_alive
from dppo.cluster.ray.capacity import in_words
from dppo.cluster.wire import (
    FETCH_TIMEOUT_S,
    TrainerPlan,
    cause,
    delay_before,
    last_line,
    packed_model,
    sendable,
    within,
)
from dppo.errors import ClusterError, DppoError, OutOfMemory, SegmentsLost, TrainingDiverged
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, Update
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces

T = TypeVar("T")

START_TIMEOUT_S = 120.0  # for a process that imports torch, on a machine that starts many at once
CLOSE_S = 2.0  # for Ray to release the resources of the ranks
MAX_REBUILDS = 3  # in a row, without an update in between


class RayTrainers:
    """L ranks of one trainer. They receive segments by reference, and return figures and weights.

    A rank that dies or stops answering takes the whole group with it, because the others wait for it in a sum. All
    ranks are then restarted with the state before the update, and repeat it on the same segments with the same result.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        spaces: Spaces,
        notify: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        *,
        expected: Expected | None = None,
        **options: Any,
    ) -> None:
        """Reserve resources for the ranks, start them with `options` of Ray, form the group, check its numerics.

        `check` is called during every wait, now and later, and may raise to end it.

        Raise ClusterError if there is no room, or the ranks cannot start or reach each other.
        """
        self._notify, self._check, self._expected, self._options = notify, check, expected, options
        self.spec, self._spaces = choose_network(plan.network, spaces).spec, spaces
        self._plan = replace(plan, network=replace(plan.network, model=plan.network.model_name))
        self._model = packed_model(plan.network.model)
        self.ranks: list[Any] = []  # Ray's handles of the ranks; a rebuild replaces them
        self._losses, self._lost_at = 0, math.inf  # of the group: in a row, and since when
        self._weights: np.ndarray
        self._state: dict[str, np.ndarray]
        self._states: list[ObjectRef[Any]] = []  # equal copies of a newer state, on different nodes, not fetched yet
        self._reporters = [0]  # ranks that return the state: on two nodes if possible, since one node may be lost
        self._incidents: list[Incident] = []
        bundle = {"CPU": plan.learners.learner_cpus, "GPU": plan.learners.learner_gpus}
        self._bundle = {name: amount for name, amount in bundle.items() if amount > 0}
        self._group = placement_group([self._bundle] * plan.learners.num_learners, strategy="PACK")
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def update(
        self, segments: Sequence[Any], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one PPO update on the segments of `iteration`; each rank trains on those of its samplers.

        Waits for: all ranks, while each answers that it is running. Fails when: it diverges, or rebuilds are in vain.
        Raises SegmentsLost if they must be collected again; nothing has changed then.
        """
        update = self._with_group(partial(self._attempt, segments, policy, reward_scale, iteration))
        incidents, self._incidents = tuple(self._incidents), []
        return replace(update, incidents=incidents)

    def weights(self) -> np.ndarray:
        """Return all weights [P], read-only."""
        return self._weights

    def state(self) -> dict[str, np.ndarray]:
        """Return the optimizer's state."""
        for number, ref in enumerate(self._states, start=1):
            try:
                # The reference is kept, because releasing it ends this process if the raylet has died.
                self._state = ray.get(ref, timeout=FETCH_TIMEOUT_S)
                break
            except RayError as error:
                if number == len(self._states):
                    raise ClusterError(
                        f"the optimizer's state was lost with the learners' nodes ({last_line(error)}). Use --resume."
                    ) from None
        return self._state

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with these weights and this optimizer state, on every rank."""
        self._weights, self._state, self._states = weights, state, []
        self._with_group(self._load)

    def close(self) -> None:
        """Kill all ranks, and release their resources."""
        self._kill()
        within(CLOSE_S, lambda: remove_placement_group(self._group))

    def worth(self, rows: int) -> tuple[float, float, float]:
        """Measure one minibatch of `rows` rows on the learners themselves.

        Returns: milliseconds on one learner alone; on all learners, including the sum of gradients; of that sum.
        """

        def measured() -> tuple[float, float, float]:
            alone = self._ask(self.ranks[:1], "median_s", "rehearse", rows)[0]
            shared = max(self._ask(self.ranks, "median_s", "rehearse", rows // len(self.ranks)))
            summing = max(self._ask(self.ranks, "median_s", "sum_gradients"))
            return 1e3 * alone, 1e3 * (shared + summing), 1e3 * summing

        return self._with_group(measured)

    def _with_group(self, call: Callable[[], T]) -> T:
        """Return the result of `call`; if a rank is lost, restart all with the state before it, and call again."""
        while True:
            try:
                if not self.ranks:
                    self._build()
                    self._notify(f"learners are back after {time.monotonic() - self._lost_at:.0f} s")
                    self._lost_at = math.inf
                return call()
            except (RayError, TimeoutError) as error:
                raised = getattr(error, "cause", None)  # in the rank
                if isinstance(raised, OutOfMemory):  # new ranks would have no more memory
                    raise sendable(raised) from None
                self._lose(error)

    def _attempt(
        self, segments: Sequence[Any], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        share, policy = len(segments) // len(self.ranks), replace(policy, weights=policy.weights[:0])  # ranks have them
        self._check()  # if the raylet has died, large arguments and results end this process
        calls = [
            handle.update.options(num_returns=3).remote(
                policy, reward_scale, iteration, rank in self._reporters, *segments[rank * share : (rank + 1) * share]
            )
            for rank, handle in enumerate(self.ranks)
        ]
        try:
            answers = wait_while_alive(self.ranks, [update for update, _, _ in calls], self._check)
        except ObjectLostError as error:
            self._lose(error)  # because some ranks wait for those whose segments are lost
            raise SegmentsLost(
                f"the segments of iteration {iteration + 1} were lost with the node that held them ({last_line(error)})"
            ) from None
        _raise_faults(answers)
        self._check()  # the same for the earlier weights, which are released here
        self._weights = ray.get(calls[0][1], timeout=FETCH_TIMEOUT_S)
        self._states = [calls[rank][2] for rank in self._reporters]  # fetched when they are needed
        self._losses = 0
        return answers[0]

    def _lose(self, error: Exception) -> None:
        """End the group, which is to be restarted, and wait for a while; raise if that has been in vain too often."""
        self._check()  # a new group would be useless if the run is being stopped or Ray is gone
        reason, learners = f"a learner {cause(error)}", self._plan.learners.num_learners
        self._lost_at = min(self._lost_at, time.monotonic())
        self._kill()
        if self._losses == MAX_REBUILDS:
            raise ClusterError(
                f"{reason}\nThe group of {learners} learners was rebuilt {MAX_REBUILDS} times in a row without "
                f"finishing an update. Resume from the last checkpoint, if there is one (--resume), perhaps with "
                f"`num_learners=0`." + (f"\n{error}" if isinstance(error, RayTaskError) else "")
            )
        repeats = " and repeat the update" if hasattr(self, "_weights") else ""
        self._notify(f"{reason}; all {learners} are restarted{repeats}")
        self._incidents.append(Incident(IncidentKind.LEARNERS_REBUILT, reason))
        self._losses += 1
        time.sleep(delay_before(self._losses))

    def _start(self) -> None:
        learners = f"num_learners={self._plan.learners.num_learners}: learners of {in_words(self._bundle)} each"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._group.wait(TICK_S):
            self._check()
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{learners} found no room in the cluster within {START_TIMEOUT_S:.0f} s (see `ray status`). Lower "
                    f"`num_learners`, `learner_cpus` or `learner_gpus`."
                )
        try:
            self._build()
        except RayActorError as error:
            self._lose(error)
            self._with_group(lambda: None)
        except (RayError, TimeoutError) as error:
            raise ClusterError(
                f"{learners} could not start: one {cause(error)}\nIf they run on several nodes, these must reach each "
                f"other on any port. `num_learners=0` trains in this process."
            ) from None

    def _build(self) -> None:
        """Start all ranks, form their group, and load the state before the update."""
        # The extra concurrency group lets a rank answer during an update.
        remote_class: Any = ray.remote(concurrency_groups={"life": 1})(TrainerRank)  # type: ignore[call-overload]
        self.ranks = [
            remote_class.options(
                num_cpus=self._plan.learners.learner_cpus,
                num_gpus=self._plan.learners.learner_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
                **self._options,
            ).remote(self._plan, self._spaces, rank, self._model)
            for rank in range(self._plan.learners.num_learners)
        ]
        places = wait_for([handle.whereabouts.remote() for handle in self.ranks], self._check, START_TIMEOUT_S)
        nodes, addresses = zip(*places, strict=True)
        self._reporters = sorted({nodes.index(node) for node in nodes})[:2]
        # On one node the store need not be reachable from others.
        host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
        port = wait_for([self.ranks[0].open_store.remote(host)], self._check, START_TIMEOUT_S)[0]
        joined = [handle.join.remote(host, port, self._expected) for handle in self.ranks]
        problems = wait_for(joined, self._check, START_TIMEOUT_S + COLLECTIVE_TIMEOUT.total_seconds())
        _raise_faults(problems)
        for problem in sorted({*problems} - {""}):
            self._notify(problem)
            self._incidents.append(Incident(IncidentKind.OTHER_CPU, problem))
        self._load()

    def _load(self) -> None:
        """Load the state before the update into all ranks; at the start, take it from the first."""
        if not hasattr(self, "_weights"):
            weights, state = self._ask(self.ranks[:1], "snapshot")[0]
            # Copies, because releasing a view of Ray's store ends this process if the raylet has died.
            self._weights, self._state = weights.copy(), {name: array.copy() for name, array in state.items()}
            return
        self._ask(self.ranks, "load", ray.put(self._weights), ray.put(self.state()))

    def _kill(self) -> None:
        ranks, self.ranks = self.ranks, []
        within(CLOSE_S, lambda: [ray.kill(handle) for handle in ranks])

    def _ask(self, ranks: list[Any], method: str, *args: Any) -> list[Any]:
        """Call a method of some ranks at once; return their answers."""
        return wait_while_alive(ranks, [getattr(handle, method).remote(*args) for handle in ranks], self._check)


def _raise_faults(answers: list[Any]) -> None:
    """Raise the fault of a rank, if any. A divergence concerns all ranks, and each describes its own rows."""
    faults = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, DppoError)}
    for error in faults.values():
        if len(faults) > 1 and isinstance(error, TrainingDiverged):
            raise TrainingDiverged("\n".join(f"Learner {rank}: {each}" for rank, each in faults.items()))
        raise error


def worth_in_words(plan: TrainerPlan, spec: NetworkSpec, alone_ms: float, shared_ms: float, summing_ms: float) -> str:
    """Describe the times of `RayTrainers.worth`, and say whether several learners are faster than one."""
    facts = f"{plan.learners.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a "
    facts += f"minibatch of {plan.sizes.minibatch_rows:,} rows takes {shared_ms:.1f} ms, {summing_ms:.1f} ms of it for "
    facts += f"the sum; one learner takes {alone_ms:.1f} ms"
    if shared_ms < 0.95 * alone_ms:
        return f"{facts}. They are {alone_ms / shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay off here; num_learners=0 is faster."
