"""PPOActor, which hosts samplers in a process on Ray; and the file that shows its progress, even while it is stuck."""

import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from dppo.engine.messages import Recycled
from dppo.envs.activity import ActivityRecord
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.hosts.host import SamplerHost, ThreadedHost, host_of
from dppo.hosts.keeper import begin_log
from dppo.hosts.plans import SamplerPlan
from dppo.numerics.arithmetic import limit_blas
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.questions import Answer, Question
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot
from dppo.slots.layout import Layout
from dppo.slots.program import processes_of_programs
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.pickling import (
    NO_MODEL,
    PackedModel,
    encode_answer,
    sendable,
    unpack,
    unpacked_model,
)
from dppo.transports.ray.progress_file import (
    ProgressFile,
    make_progress_file,
    write_stacks_on_signal,
)
from dppo.user_code import in_a_line

if TYPE_CHECKING:
    from dppo.transports.ray.nodes import ActorNodes

MEASURE_S = 2.0  # between two measurements of memory
# longest wait for environments that close; Ray kills a process 5 s after SIGTERM
TERMINATED_S = 3.0


class PPOActor:
    """Collects segments of its samplers on request, and sends faults as plain data."""

    def __init__(self, plan: bytes, model: PackedModel = NO_MODEL) -> None:
        """Store a pickled plan, and the user's network, which it does not contain: first use unpickles both.

        Nothing here can fail, because Ray reports a failing constructor badly.
        """
        self._plan = plan
        self._model = model
        self.progress = ActivityRecord()
        self._progress_file = ""
        self._pid = os.getpid()
        self._host: SamplerHost | ThreadedHost | None = None
        self._players: list[Any] = []  # players, whose environments are closed, too
        self._making_host = threading.Lock()
        self._group: Any = None  # Ray's reservation of cores on several nodes, if there is one
        self._nodes: ActorNodes | None = None
        self._elsewhere = ""  # the name of the node, if it is not the driver's node
        self._fault: DppoError | None = None
        self._recycling = (math.inf, math.inf)  # bytes and segments after which it is worn out
        self._memory = 0  # bytes of this process and its children
        self._measured_at = -math.inf
        self._segments = 0  # made so far

    def configure_process(
        self, keep_gpus: bool, log: str, node_id: str, driver: int, group: Any = None
    ) -> ProgressFile:
        """Limit this process to one core and, without `keep_gpus`, no GPU; record progress in a file.

        Its output goes to `log` if it is on the node `node_id` of the process `driver`, else beside its progress file.
        `group`: the placement group with cores on several nodes, if environments have ranks on them.
        """
        self._group = group
        if not keep_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Ray's handler raises SystemExit, which in the middle of a step would look like a fault of the environment.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that an environment may import
        limit_blas(1)
        self._progress_file, self.progress = make_progress_file()
        write_stacks_on_signal(self._progress_file)
        import ray  # loaded already: Ray has started this process

        context = ray.get_runtime_context()
        this_node = context.get_node_id()
        head = context.gcs_address
        host_name = socket.gethostname()
        if this_node == node_id:
            path = begin_log(log, self._progress_file, driver, head)
        else:
            self._elsewhere = host_name
            path = begin_log("", self._progress_file, head=head)
        return ProgressFile(this_node, self._progress_file, host_name, path, self._pid)

    def _terminated(self, *_: object) -> None:
        """Close the environments, in a few seconds, and end: the node is drained, or the driver has been killed."""
        if os.getpid() == self._pid:  # not in a simulator's fork of this process
            threading.Timer(TERMINATED_S, os._exit, (128 + signal.SIGTERM,)).start()
            self.close()
        os._exit(128 + signal.SIGTERM)

    def describe(self, sampler_id: int) -> Spaces | DppoError:
        """Create the environments of a sampler and return their spaces."""
        try:
            return self._hosted().spaces(sampler_id)
        except DppoError as error:
            return self._sendable(error)

    def make_segments(self, question: Question, policy: PolicySnapshot) -> Answer | DppoError:
        """Collect all requested segments; return a fault if an environment fails, also for all later questions."""
        if self._fault is not None:
            return self._fault
        try:
            host = self._hosted()
            self._check_wear()
            host.close_all_but(question.hosted)
            answer = host.collect(question.requests, policy, question.spaces)
            self._segments += len(answer.results)
            answer = replace(answer, timings=replace(answer.timings, memory=self._memory))
            if question.expected is not None:
                answer = _compared(answer, question.expected)
            return answer
        except DppoError as error:
            self._fault = self._sendable(error)
            return self._fault

    def _sendable(self, error: DppoError) -> DppoError:
        """Return an error that can be sent; it names this node if that may be the reason: a module that is missing."""
        if self._elsewhere and isinstance(error, ConfigError):
            error = ConfigError(
                f"{error}\nThis was on node {self._elsewhere}; `upload` sends a folder to all nodes."
            )
        elif self._elsewhere and isinstance(error, EnvironmentFault) and error.in_constructor:
            error.args = (f"{error.message} (on node {self._elsewhere})", *error.args[1:])
        return sendable(error)

    def _check_wear(self) -> None:
        """Measure the memory of this process and its children every few seconds; raise `Recycled` if it is worn out."""
        if time.monotonic() - self._measured_at > MEASURE_S:
            with suppress(psutil.Error):
                process = psutil.Process()
                processes = [process, *process.children(recursive=True), *processes_of_programs()]
                self._memory = sum(process.memory_info().rss for process in processes)
            self._measured_at = time.monotonic()
        max_memory, max_segments = self._recycling
        is_worn = self._memory > max_memory or self._segments >= max_segments
        if self._segments and is_worn:
            raise Recycled(
                f"uses {self._memory / 1e9:.2f} GB after {self._segments} segments of its samplers"
            )

    def make_segments_packed(
        self, question: bytes, policy: bytes | PolicySnapshot, by_reference: bool
    ) -> bytes | list[Any]:
        """Do `make_segments` over Ray; return the packed reports and each segment apart if `by_reference`."""
        unpacked_question: Question = unpack(question)
        answer = self.make_segments(unpacked_question, unpack(policy))
        encoded = encode_answer(answer, by_reference=by_reference)
        if by_reference and isinstance(encoded, bytes):  # a fault, and as many values
            return [encoded, *unpacked_question.samplers]
        return encoded

    def close(self) -> None:
        """Close all environments."""
        if self._host is not None:
            self._host.close()
        for player in self._players:
            player.close()
        ProgressFile("", self._progress_file).remove()

    def keep(self, player: Any) -> None:
        """Close `player` when the process ends, for any reason."""
        self._players.append(player)

    def on_nodes(self, layout: Layout) -> Layout:
        """Add the nodes of this actor to a layout; raise as `ActorNodes`."""
        if self._group is None:
            return layout
        if self._nodes is None:
            from dppo.transports.ray.nodes import ActorNodes

            self._nodes = ActorNodes(self._group)
        return replace(layout, nodes=self._nodes.nodes)

    def _hosted(self) -> SamplerHost | ThreadedHost:
        with self._making_host:
            if self._host is not None:
                return self._host
            model = unpacked_model(self._model)
            try:
                plan: SamplerPlan = unpack(self._plan)
            except (Exception, SystemExit) as error:  # importing a user's module may raise anything
                raise ConfigError(
                    f"env_id: the environment cannot be loaded in an actor: {in_a_line(error)}. It must be importable "
                    f"on every node (see `upload`); pass module:factory rather than a function of a script."
                ) from None
            plan = replace(plan, layout=self.on_nodes(plan.layout))
            self._recycling = plan.recycling
            self._host = host_of(
                replace(plan, network=replace(plan.network, model=model)), self.progress
            )
            return self._host


def _compared(answer: Answer, expected: Expected) -> Answer:
    """Add an incident if this process computes other bits than `expected`, or raise `ClusterError` if that is asked."""
    # loaded by now if the network acts with it
    problem = expected.problem(torch="torch" in sys.modules)
    if not problem:
        return answer
    (first, segment), *later = answer.results
    first = replace(first, incidents=(*first.incidents, Incident(IncidentKind.OTHER_CPU, problem)))
    return replace(answer, results=((first, segment), *later))
