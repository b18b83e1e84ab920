"""Watching: reads the progress of actors that are too busy to answer, on any node."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dppo import streams
from dppo.engine.messages import Process, Progressed, Started
from dppo.envs.activity import Activity, Phase
from dppo.errors import ClusterError
from dppo.hosts.keeper import end_of_log
from dppo.streams import Stream
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.failures import UNKNOWN, UNREACHABLE, cause_of_death, result_within
from dppo.transports.ray.progress_file import ProgressFile
from dppo.transports.ray.session import RayLink

T = TypeVar("T")

DIED_STARTING = "before it had started (is /tmp, /dev/shm or the memory full there?)"
UNKNOWN_NODE = ("", "its node")
LOG_S = 3.0  # longest wait for the last lines of a log on this node
# longest wait for a witness on another node, which may have to start; the run waits
LOG_ELSEWHERE_S = 5.0
STACKS_S = 15.0  # longest wait for stacks from a witness on another node
# a call into Ray that waits for longer shows a silent network, in which no process can answer
BUSY_S = 2.0


class NodeWitness:
    """Reads the progress files of its node, in a process of its own."""

    def read(self, file: ProgressFile) -> Activity | None:
        return file.read()

    def stacks(self, file: ProgressFile) -> str:
        return file.stacks()

    def end_of_log(self, file: ProgressFile) -> tuple[str, list[str]]:
        return end_of_log(file.log, file.pid)


class Watching:
    """Reads the progress files of actors: directly on this node, through a witness process on other nodes.

    A witness starts with the first look at an actor of its node, and reserves no CPU of the cluster. It is asked in the
    thread of the calls into Ray: a look never waits, even if the network does.
    """

    def __init__(self, link: RayLink, node_id: str, seed: int | None = None) -> None:
        self._link = link
        self.node_id = node_id
        """Id of this node."""
        self._seed = seed  # seed of the run; None for actors of evaluations, which host no samplers
        self._files: dict[Process, ProgressFile] = {}
        self._latest: dict[Process, Activity] = {}
        # by the id of the node; belongs to the thread of the calls
        self._witnesses: dict[str, Any] = {}
        self._looks = set[Process]()  # processes whose looks are pending
        self._results = SimpleQueue[tuple[Process, str, Callable[[], Activity | None]]]()
        """Looks that have ended: the process, the id of its node, and a function that returns or raises the result."""
        self._events: list[Progressed] = []
        self.avoided: frozenset[str] = frozenset()
        """Ids of the nodes whose last process could not start, or could not be reached."""

    def started(self, process: Process, file: ProgressFile) -> Started:
        """Record the progress file of a new process; return the event."""
        self._files[process] = file
        self.avoided -= {file.node_id}
        return Started(process, file.node)

    def ended(self, process: Process) -> None:
        """Forget a process."""
        self._latest.pop(process, None)
        self._looks.discard(process)
        file = self._files.pop(process, None)
        if file is not None and file.node_id == self.node_id:
            file.remove()

    def cause_of_death(self, process: Process, error: Exception) -> str:
        """Return how a process died, what it was doing, where its log is and, if it can be read, the end of it."""
        cause = cause_of_death(error)
        if process not in self._files:
            return self._loss_before_the_start(cause, error)
        file = self._files[process]
        if cause == UNREACHABLE:
            self.avoided |= {file.node_id}
        is_here = file.node_id == self.node_id
        activity = self.last_activity(process) or self._latest.get(process)
        place = self._describe_place(activity)
        if not file.log:
            return f"{cause}{place}"
        unread = "", list[str]()
        if is_here:
            read = partial(end_of_log, file.log, file.pid)
            status, lines = result_within(LOG_S, read, unread)  # its disk may block
        else:
            status, lines = unread
            if cause == UNKNOWN:  # otherwise its node may be lost as well
                status, lines = self._answer_of_witness("end_of_log", file, LOG_ELSEWHERE_S, unread)
        if status and cause in (UNKNOWN, UNREACHABLE):
            cause = f"died {status}"
        return "\n    ".join([f"{cause}{place}; its log: {self.log_of(process)}", *lines])

    def _loss_before_the_start(self, cause: str, error: Exception) -> str:
        """Return where a process was lost that had not started; from now on, others start elsewhere if they can."""
        if cause not in (UNKNOWN, UNREACHABLE):
            return cause
        find = partial(_node_of, getattr(error, "actor_id", ""))
        node_id, host = self._answer(
            find, "finding the node of an actor", LOG_ELSEWHERE_S, UNKNOWN_NODE
        )
        self.avoided |= {node_id} - {""}
        if cause == UNREACHABLE:
            return f"on {host} {cause}"
        return f"died on {host} {DIED_STARTING}"

    def log_of(self, process: Process) -> str:
        """Return the path of the log of a process, with its node if that is another one; "" if there is no log."""
        file = self._files.get(process)
        if file is None or not file.log:
            return ""
        if file.node_id == self.node_id:
            return file.log
        return f"{file.log} on {file.node}"

    def last_activity(self, process: Process) -> Activity | None:
        """Return what a process of this node did last; None if that is not known."""
        file = self._files.get(process)
        if file is not None and file.node_id == self.node_id:
            return file.read()
        return None

    def _describe_place(self, activity: Activity | None) -> str:
        if activity is None or activity.phase is Phase.IDLE:
            return ""
        if self._seed is None:
            return f", in episode {activity.episode}"
        if activity.phase not in (Phase.RESET, Phase.STEP):
            return f", {activity}"
        position = activity.sampler_id, activity.env, activity.episode
        return f", {activity} (seed {streams.integer(self._seed, Stream.EPISODES, *position)})"

    def homes(self) -> dict[int, str]:
        """Return the id of the node of each actor with a process, by the id of the actor."""
        return {process.actor_id: file.node_id for process, file in self._files.items()}

    def look(self, process: Process) -> None:
        """Look at a process; does not wait."""
        file = self._files.get(process)
        if file is not None and file.node_id == self.node_id:
            self._take(process, file.read())
        elif file is not None and file.path and process not in self._looks:
            self._looks.add(process)
            self._link.calls.post(
                partial(self._ask_witness, process, file), "looking at an actor of another node"
            )

    @calls_ray
    def _ask_witness(self, process: Process, file: ProgressFile) -> None:
        try:
            reading = self._witness(file).read.remote(file)
        except RayError as error:
            self._results.put((process, file.node_id, partial(_raise, error)))
            return
        reading.future().add_done_callback(
            lambda done: self._results.put((process, file.node_id, done.result))
        )

    def stacks(self, process: Process) -> str:
        """Return the stacks of the threads of a process, "" if they cannot be read; waits a moment."""
        file = self._files.get(process)
        if file is None or not file.path:
            return ""
        if file.node_id == self.node_id:
            return file.stacks()
        return self._answer_of_witness("stacks", file, STACKS_S, "")

    def _answer_of_witness(
        self, method: str, file: ProgressFile, timeout_s: float, default: T
    ) -> T:
        """Return the answer of a witness on another node; `default` if there is none in time."""
        ask = partial(self._ask_and_wait, method, file, timeout_s)
        return self._answer(
            ask, f"reading {method.replace('_', ' ')} of an actor", timeout_s, default
        )

    def _answer(self, ask: Callable[[], T], action: str, timeout_s: float, default: T) -> T:
        """Return what a call into Ray returns; `default` if it fails, takes too long, or another one is stuck."""
        waited_s, _ = self._link.calls.waiting()
        if waited_s > BUSY_S:
            return default
        with suppress(RayError, ClusterError):
            return self._link.calls.call(ask, action, timeout_s=timeout_s)
        return default

    @calls_ray
    def _ask_and_wait(self, method: str, file: ProgressFile, timeout_s: float) -> Any:
        answer = getattr(self._witness(file), method).remote(file)
        return ray.get(answer, timeout=timeout_s)

    @calls_ray
    def _witness(self, file: ProgressFile) -> Any:
        if file.node_id not in self._witnesses:
            strategy = NodeAffinitySchedulingStrategy(file.node_id, soft=False)
            witness: Any = ray.remote(NodeWitness)
            self._witnesses[file.node_id] = witness.options(
                num_cpus=0, scheduling_strategy=strategy
            ).remote()
        return self._witnesses[file.node_id]

    def take_events(self) -> list[Progressed]:
        """Return the progress that looks since the last call have shown, without waiting for pending looks."""
        with suppress(Empty):
            while True:
                process, node_id, result = self._results.get_nowait()
                self._looks.discard(process)
                try:
                    self._take(process, result())
                except RayError:
                    # the witness is lost, perhaps with its node; the next look starts another
                    forget = partial(self._witnesses.pop, node_id, None)
                    self._link.calls.post(forget, "looking at an actor of another node")
        events = self._events
        self._events = []
        return events

    def take_witnesses(self) -> list[Any]:
        """Forget all witnesses; return their handles, to be killed by the caller."""
        witnesses = list(self._witnesses.values())
        self._witnesses.clear()
        return witnesses

    def _take(self, process: Process, progress: Activity | None) -> None:
        if progress is not None:
            self._latest[process] = progress
            self._events.append(Progressed(process, progress))


@calls_ray
def _node_of(actor_id: str) -> tuple[str, str]:
    """Return the id and the host name of the node on which an actor was."""
    # ray.nodes() would start a Ray if this one has been shut down
    from ray._private.state import state

    address = state.actor_table(actor_id).get("Address")
    if address is None:  # Ray does not know the actor, or the error does not name it
        return UNKNOWN_NODE
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in state.node_table()}
    return address["NodeID"], hosts.get(address["NodeID"], address["IPAddress"])


def _raise(error: Exception) -> None:
    raise error
