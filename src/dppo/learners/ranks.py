"""RayTrainers: updates shared by several ranks on Ray, which are started and replaced as one group."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from dppo.engine.restarts import delay_before
from dppo.errors import ClusterError, OutOfMemory, SegmentsLost, counted
from dppo.hosts.plans import TrainerPlan
from dppo.learners.placement import CLOSE_S, Placement
from dppo.learners.rank import COLLECTIVE_TIMEOUT, LOOPBACK, TrainerRank
from dppo.learners.speedup import Speedup
from dppo.learners.waiting import pause, raise_faults, wait_for, wait_while_alive
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Experience, Incident, IncidentKind, Update
from dppo.ppo.networks.choice import choose_network
from dppo.sac.replay_buffer import PREFIX, ReplayBuffer, rows_of_rank
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.capacity import in_words
from dppo.transports.ray.failures import FETCH_TIMEOUT_S, call_with_timeout, cause, last_line
from dppo.transports.ray.pickling import packed_model, sendable
from dppo.transports.ray.session import RayLink, link_of_its_own

T = TypeVar("T")

NOTIFY_S = 10.0  # duration of a wait after which it is logged
# longest start of a process that imports torch, on a machine that starts many at once
START_TIMEOUT_S = 120.0
LOST_S = 1.0  # longest wait for the end of ranks of a lost Ray
STATE_S = 5.0  # longest wait for the state of a rank
MAX_REBUILDS = 3  # consecutive rebuilds without an update in between


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
        link: RayLink | None = None,
        *,
        expected: Expected | None = None,
    ) -> None:
        """Reserve resources for the ranks, start them with the options of `link`, form the group, check its numerics.

        `check` is called during every wait, now and later, and may raise to end it. All calls into Ray are made by the
        thread of `link`, while the calling thread waits.

        Raise ClusterError if there is no room, or the ranks cannot start or reach each other.
        """
        self._notify = notify
        self._check_waiting = check
        self._expected = expected
        self._link = link if link is not None else link_of_its_own("learners")
        self._clock = self._link.clock.patience
        self.spec = choose_network(plan.network, spaces).spec
        self._spaces = spaces
        self._plan = replace(plan, network=replace(plan.network, model=plan.network.model_name))
        self._model = packed_model(plan.network.model)
        self.ranks: list[Any] = []  # Ray's handles of the ranks; a rebuild replaces them
        self._losses = 0  # consecutive losses of the group
        self._lost_at = math.inf
        self._weights = np.zeros(0)
        # as fetched last; empty until the first group has started
        self._state: dict[str, np.ndarray] = {}
        # equal copies of a newer state, on different nodes, not fetched yet
        self._states: list[ObjectRef[Any]] = []
        # ranks that return the state: on two nodes if possible, since one node may be lost
        self._reporters = [0]
        self._incidents: list[Incident] = []
        # ranks keep the rows of their samplers; these are all, for checkpoints and for ranks that replace lost ones
        self._replay_buffer: ReplayBuffer | None = None
        if plan.ppo.algo == "sac":
            assert plan.sac.replay_rows is not None, "the settings are not resolved"
            self._replay_buffer = ReplayBuffer(plan.sac.replay_rows, self.spec.spaces.obs)
        resources = {"CPU": plan.learners.learner_cpus, "GPU": plan.learners.learner_gpus}
        bundle = {name: amount for name, amount in resources.items() if amount > 0}
        self._placement = Placement(bundle, plan.learners.num_learners)
        try:
            self._link.calls.call(self._start, "starting the learners", check)
        except BaseException:
            self.close()
            raise

    def update(self, experience: Experience) -> Update:
        """Do one update on the segments of an iteration; each rank trains on those of its samplers.

        Waits for: all ranks, while each answers that it is running. Fails when: it diverges, or rebuilds are in vain.
        Raises SegmentsLost if they must be collected again; nothing has changed then.
        """
        update = self._call(partial(self._attempt, experience), "updating on the learners")
        if self._replay_buffer is not None:
            self._replay_buffer.append(experience.segments)
        incidents = tuple(self._incidents)
        self._incidents.clear()
        return replace(update, incidents=incidents)

    def weights(self) -> np.ndarray:
        """All weights [P], read-only."""
        return self._weights

    def state(self) -> dict[str, np.ndarray]:
        """Return the optimizer's state. If Ray is lost, return the state that has already arrived, if any."""
        state = self.learned_state()
        if self._replay_buffer is None:
            return state
        rows = {name: array.copy() for name, array in self._replay_buffer.state().items()}
        return state | rows

    def learned_state(self) -> dict[str, np.ndarray]:
        """Ask a rank for its state, which has no replay buffer."""
        ends_at = time.monotonic() + STATE_S

        def check() -> None:
            if time.monotonic() > ends_at:
                self._link.watch.check()

        return self._link.calls.call(self._fetch_state, "fetching the optimizer's state", check)

    @calls_ray
    def _fetch_state(self) -> dict[str, np.ndarray]:
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
        if self._replay_buffer is not None:
            self._replay_buffer.load(state)
            state = {name: array for name, array in state.items() if not name.startswith(PREFIX)}
        self._weights = weights
        self._state = state
        self._states = []
        self._call(self._load, "sending the weights to the learners")

    def close(self) -> None:
        """Kill all ranks, and release their resources."""
        with suppress(ClusterError):  # Ray does not answer
            timeout_s = LOST_S if self._link.watch.lost else 3 * CLOSE_S
            self._link.calls.call(self._release, "ending the learners", timeout_s=timeout_s)

    @calls_ray
    def _release(self) -> None:
        self._kill()
        self._placement.release()

    def measure_speedup(self, rows: int) -> Speedup:
        """Measure one minibatch of `rows` rows on the learners themselves."""
        return self._call(partial(self._measure, rows), "measuring the learners")

    @calls_ray
    def _measure(self, rows: int) -> Speedup:
        alone_s = self._ask(self.ranks[:1], "rehearse_s", rows)[0]
        learning_s = max(self._ask(self.ranks, "rehearse_s", rows // len(self.ranks)))
        summing_s = max(self._ask(self.ranks, "sum_s"))
        return Speedup(1e3 * alone_s, 1e3 * (learning_s + summing_s), 1e3 * summing_s)

    def _call(self, function: Callable[[], T], action: str) -> T:
        """Let the thread of the calls into Ray do `function` with a group of living ranks; wait for it."""
        return self._link.calls.call(
            partial(self._with_group, function), action, self._check_waiting
        )

    def _check(self) -> None:
        """Record that Ray has answered; raise if the result is not needed any more, or Ray is lost."""
        self._link.calls.heard()
        self._link.watch.raise_if_lost()

    @calls_ray
    def _with_group(self, call: Callable[[], T]) -> T:
        """Return the result of `call`; if a rank is lost, restart all with the state before it, and call again."""
        while True:
            try:
                if not self.ranks:
                    self._build()
                    self._notify(
                        f"learners are back after {time.monotonic() - self._lost_at:.0f} s"
                    )
                    self._lost_at = math.inf
                return call()
            except (RayError, TimeoutError) as error:
                raised = getattr(error, "cause", None)  # in the rank
                if isinstance(raised, OutOfMemory):  # new ranks would have no more memory
                    raise sendable(raised) from None
                self._lose(error)

    @calls_ray
    def _attempt(self, experience: Experience) -> Update:
        # ranks have the weights
        policy = replace(experience.policy, weights=experience.policy.weights[:0])
        without_segments = replace(experience, segments=(), policy=policy)
        share = len(experience.segments) // len(self.ranks)
        self._check()  # if the raylet has died, large arguments and results end this process
        calls = []
        for rank, handle in enumerate(self.ranks):
            segments = experience.segments[rank * share : (rank + 1) * share]
            update = handle.update.options(num_returns=3)
            with_state = rank in self._reporters
            calls.append(update.remote(without_segments, with_state, *segments))
        updates, weights, states = zip(*calls, strict=True)
        try:
            answers = wait_while_alive(self.ranks, updates, self._check, self._clock)
        except ObjectLostError as error:
            self._lose(error)  # because some ranks wait for those whose segments are lost
            number = experience.iteration + 1
            raise SegmentsLost(
                f"the segments of iteration {number} were lost with the node that held them ({last_line(error)})"
            ) from None
        raise_faults(answers)
        self._check()  # as above: the earlier weights are released here
        self._weights = ray.get(weights[0], timeout=FETCH_TIMEOUT_S)
        self._states = [states[rank] for rank in self._reporters]  # fetched when they are needed
        self._losses = 0
        return answers[0]

    @calls_ray
    def _lose(self, error: Exception) -> None:
        """End the group, which is to be restarted, and wait for a while; raise if that has been in vain too often."""
        self._check()  # a new group would be useless if the run is being stopped or Ray is gone
        reason = f"a learner {cause(error)}"
        learners = self._plan.learners.num_learners
        self._lost_at = min(self._lost_at, time.monotonic())
        self._kill()
        if self._losses == MAX_REBUILDS:
            traceback = f"\n{error}" if isinstance(error, RayTaskError) else ""
            raise ClusterError(
                f"{reason}\nThe group of {learners} learners was rebuilt {MAX_REBUILDS} times in a row without "
                f"finishing an update. Resume from the last checkpoint, if there is one (--resume), perhaps with "
                f"`num_learners=0`.{traceback}"
            )
        repeats = " and repeat the update" if self._state else ""
        self._notify(f"{reason}; all {learners} are restarted{repeats}")
        self._incidents.append(Incident(IncidentKind.LEARNERS_REBUILT, reason))
        self._losses += 1
        pause(delay_before(self._losses), self._check)

    @calls_ray
    def _start(self) -> None:
        number = self._plan.learners.num_learners
        learners = f"num_learners={number}: learners of {in_words(self._placement.bundle)} each"
        if not self._placement.reserve(self._check, self._clock, START_TIMEOUT_S):
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

    @calls_ray
    def _build(self) -> None:
        """Start all ranks, form their group, and load the state before the update."""
        self.ranks = [self._started(rank) for rank in range(self._plan.learners.num_learners)]
        calls = [handle.whereabouts.remote() for handle in self.ranks]
        places = wait_for(calls, self._start_check(), START_TIMEOUT_S, self._clock)
        nodes = [node for node, _ in places]
        # the first ranks of two nodes
        self._reporters = sorted({nodes.index(node) for node in nodes})[:2]
        self._form_group([address for _, address in places])
        if self._state:
            self._load()
            return
        weights, state = self._ask(self.ranks[:1], "snapshot")[0]
        # Copies, because releasing a view of Ray's store ends this process if the raylet has died.
        self._weights = weights.copy()
        self._state = {name: array.copy() for name, array in state.items()}

    @calls_ray
    def _started(self, rank: int) -> Any:
        # The extra concurrency group lets a rank answer during an update.
        remote_class: Any = ray.remote(concurrency_groups={"life": 1})(TrainerRank)  # type: ignore[call-overload]
        options = remote_class.options(
            num_cpus=self._plan.learners.learner_cpus,
            num_gpus=self._plan.learners.learner_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self._placement.strategy(rank),
            **self._link.options,
        )
        return options.remote(self._plan, self._spaces, rank, self._model)

    def _start_check(self) -> Callable[[], None]:
        """Return a check for a wait until the ranks have started, which logs a line once that takes long."""
        notify_at = self._clock() + NOTIFY_S
        lines = [
            f"waiting for {counted(len(self.ranks), 'learner')} to start: there may be no room, or a node does not "
            f"answer; after {START_TIMEOUT_S:.0f} s, they are given up"
        ]

        def check() -> None:
            self._check()
            if lines and self._clock() >= notify_at:
                self._notify(lines.pop())

        return check

    @calls_ray
    def _form_group(self, addresses: list[str]) -> None:
        """Let all ranks meet at the store of the first one, and report those that compute differently."""
        # On one node the store need not be reachable from others.
        host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
        opened = [self.ranks[0].open_store.remote(host)]
        (port,) = wait_for(opened, self._check, START_TIMEOUT_S, self._clock)
        joined = [handle.join.remote(host, port, self._expected) for handle in self.ranks]
        timeout_s = START_TIMEOUT_S + COLLECTIVE_TIMEOUT.total_seconds()
        problems = wait_for(joined, self._check, timeout_s, self._clock)
        raise_faults(problems)
        for problem in sorted(set(problems) - {""}):
            self._notify(problem)
            self._incidents.append(Incident(IncidentKind.OTHER_CPU, problem))

    @calls_ray
    def _load(self) -> None:
        """Load the state before the update into all ranks."""
        weights = ray.put(self._weights)
        state = ray.put(self._fetch_state())
        rows = {} if self._replay_buffer is None else self._replay_buffer.state()
        calls = [
            handle.load.remote(weights, state, rows_of_rank(rows, rank, len(self.ranks)))
            for rank, handle in enumerate(self.ranks)
        ]
        wait_while_alive(self.ranks, calls, self._check, self._clock)

    @calls_ray
    def _kill(self) -> None:
        ranks = self.ranks
        self.ranks = []
        call_with_timeout(CLOSE_S, lambda: [ray.kill(handle) for handle in ranks])

    @calls_ray
    def _ask(self, ranks: list[Any], method: str, *args: Any) -> list[Any]:
        calls = [getattr(handle, method).remote(*args) for handle in ranks]
        return wait_while_alive(ranks, calls, self._check, self._clock)
