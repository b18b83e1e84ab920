"""The progress that actors record, and the cost of replays."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import make_config
from processes import wait_until
from ray.exceptions import ActorUnavailableError, RayActorError

from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Process, Progressed
from dppo.envs.activity import BYTES, Activity, ActivityRecord, Phase, place_of
from dppo.hosts.host import SamplerHost
from dppo.hosts.plans import sampler_plan
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.networks.choice import choose_network
from dppo.transports.in_process import ReplayLog
from dppo.transports.ray import progress_file
from dppo.transports.ray.progress_file import ProgressFile

STEPS = 30


def test_recorded_progress_is_read_from_its_file() -> None:
    path, record = progress_file.make_progress_file()
    record.begin(to_replay=3700)
    for _ in range(2100):
        record.replay()
    activity = progress_file.ProgressFile("", path).read()
    assert activity is not None
    assert (activity.num_calls, activity.replayed, str(activity)) == (
        2100,
        2100,
        "replaying 2,100 of 3,700 steps",
    )

    progress_file.ProgressFile("", path).remove()
    progress_file.ProgressFile("", path).remove()
    assert progress_file.ProgressFile("", path).read() is None
    record.replay()  # still works without the file


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.MAKE, "making env 5 of sampler 123456"),
        (Phase.RESET, "resetting env 5 of sampler 123456, episode 7"),
        (Phase.STEP, "stepping env 5 of sampler 123456, episode 7, step 3"),
        (Phase.CLOSE, "closing env 5 of sampler 123456"),
        (Phase.BUILD, "preparing env 5 of sampler 123456"),
        (Phase.RESTART, "restarting the program of env 5 of sampler 123456"),
        (Phase.IDLE, "idle"),
    ],
)
def test_progress_names_the_phase_and_the_sampler(phase: Phase, words: str) -> None:
    record = ActivityRecord()
    record.enter(place_of(phase, 123_456, 5), 7, 2)
    assert str(record.look()) == words


def test_a_restart_in_the_background_is_counted_and_does_not_change_what_the_process_does() -> None:
    record = ActivityRecord()
    record.enter(place_of(Phase.STEP, 3, 1), 7, 2)
    with record.restarting():
        with record.restarting() as show:
            assert record.look().phase is Phase.RESTART
            record.enter(place_of(Phase.RESET, 3), 8)
            show()
        # the first program has not started yet
        assert str(record.look()) == "restarting the program of env 0 of sampler 3"
    assert str(record.look()) == "resetting env 0 of sampler 3, episode 8"
    assert record.look().restarts == 2
    record.finish()
    assert str(record.look()) == "idle"
    assert record.look().restarts == 0, "the answer has reported them"


STUCK = """
import os, sys, time
from dppo.transports.ray.progress_file import write_stacks_on_signal
def in_the_simulator():
    open(sys.argv[1], "w").write("")
    time.sleep(60)
write_stacks_on_signal(sys.argv[1])
in_the_simulator()
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[ProgressFile]:
    """Yield the progress file of a process that is stuck in its simulator."""
    path = str(tmp_path / "progress")
    with subprocess.Popen([sys.executable, "-c", STUCK, path]) as process:
        try:
            wait_until(Path(path).exists)
            yield ProgressFile("", path, pid=process.pid)
        finally:
            process.kill()


@pytest.mark.proves("is stuck in native code, or stopped")
def test_stacks_are_those_of_faulthandler_and_of_py_spy_where_it_answers_in_time(
    stuck: ProgressFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    monkeypatch.setattr(progress_file, "which", lambda *_, **__: str(program))
    assert "in in_the_simulator" in stuck.stacks(), "py-spy cannot be started"

    for script, words in (
        ('echo "found $*"', "found dump --native --pid"),
        ("echo denied >&2; exit 1", "denied\n"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        assert words in stuck.stacks()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(progress_file, "PY_SPY_S", 0.2)
    stacks = stuck.stacks()
    assert "in in_the_simulator" in stacks


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_shows_a_process_that_is_stopped(stuck: ProgressFile) -> None:
    os.kill(stuck.pid, signal.SIGSTOP)
    assert "in_the_simulator (<string>:" in stuck.stacks()


def test_an_incomplete_or_foreign_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    for content in (b"", b"123", b"\xff" * BYTES):
        path.write_bytes(content)
        assert progress_file.ProgressFile("", str(path)).read() is None


def test_an_actor_works_without_a_progress_file_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    before = set(Path(tempfile.gettempdir()).glob("dppo-progress-*"))
    monkeypatch.setattr(os, "write", full)
    path, record = progress_file.make_progress_file()
    record.enter(place_of(Phase.STEP))
    assert path == ""
    assert set(Path(tempfile.gettempdir()).glob("dppo-progress-*")) == before


def answered(host: SamplerHost, request: SegmentRequest) -> Answer:
    spaces = host.spaces(0)
    weights = np.zeros(choose_network(PLAN.network, spaces).spec.num_parameters, np.float32)
    return host.collect([request], PolicySnapshot(0, weights), spaces)


PLAN = sampler_plan(
    make_config(
        {
            "env_id": "Pendulum-v1",
            "num_samplers": 1,
            "num_steps": STEPS,
            "envs_per_sampler": 2,
            "hidden_sizes": (2,),
        }
    )
)


def test_an_answer_reports_the_cost_of_its_replay_and_counts_its_own_steps() -> None:
    steps: list[int] = []
    record = ActivityRecord(on_step=steps.append)
    ledger = ReplayLedger(1, replay=True)
    first = SamplerHost(PLAN, ActivityRecord())
    second = SamplerHost(PLAN, record)
    for index in range(2):
        answer = answered(first, SegmentRequest(0, index))
        assert answer.timings.replayed_steps == 0
        assert answer.timings.replay_s == 0.0
        [(report, _)] = answer.results
        ledger.record(report)

    rebuilt = answered(second, SegmentRequest(0, 2, ledger.rebuild(0, 2))).timings
    replayed = 2 * 2 * STEPS
    assert rebuilt.replayed_steps == replayed
    assert 0 < rebuilt.replay_s < rebuilt.env_s < rebuilt.total_s

    created = 2
    reset = 2
    assert record.look().num_calls >= created + reset + replayed + STEPS
    assert record.look().steps == 2 * STEPS

    again = answered(second, SegmentRequest(0, 3)).timings
    assert again.replayed_steps == 0
    assert again.replay_s == 0.0
    assert record.look().steps == 2 * STEPS
    # 0 before and after each constructor; steps are counted for each question, without replays
    assert steps == [0] * 2 * created + [*range(1, 2 * STEPS + 1)] * 2

    first.close()
    second.close()


def test_a_long_replay_in_process_is_logged_every_half_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [1000.0]
    say = ReplayLog(clock=lambda: now[0])
    record = ActivityRecord(on_replay=say)
    for _ in range(2):
        record.begin(to_replay=70)
        for _ in range(70):
            record.replay()
            now[0] += 1.0
    assert caplog.messages == ["replaying 31 of 70 steps", "replaying 61 of 70 steps"] * 2


def test_progress_of_actors_on_other_nodes_is_read_by_a_witness(ray_session: None) -> None:
    import ray

    from dppo.transports.ray.session import link_of_its_own
    from dppo.transports.ray.watching import Watching

    link = link_of_its_own("test")
    node_id = ray.get_runtime_context().get_node_id()
    path, record = progress_file.make_progress_file()
    file = progress_file.ProgressFile(node_id, path)
    record.begin(to_replay=7)
    record.replay()
    record.enter(place_of(Phase.STEP))
    record.stepped()
    process = Process(0, 5)

    watching = Watching(link, node_id="another node")
    watching.started(process, file)
    watching.started(Process(1, 5), progress_file.ProgressFile(node_id, "/no/such/file"))
    # on a node that is gone
    watching.started(Process(2, 5), progress_file.ProgressFile("ab" * 28, path))
    for actor_id in (0, 1, 2, 3):
        watching.look(Process(actor_id, 5))
    events: list[Progressed] = []

    def has_looked() -> bool:
        events.extend(watching.take_events())
        return bool(events) or not watching._looks

    wait_until(has_looked)
    [event] = events
    assert event.process == process
    assert event.progress.replayed == 1
    assert event.progress.steps == 1

    assert watching.last_activity(process) is None, "it may be of an earlier question"

    (witness,) = watching.take_witnesses()  # that of the lost node is forgotten
    ray.kill(witness)

    here = Watching(link, node_id)
    here.started(process, file)
    here.look(process)
    [event] = here.take_events()
    assert event.progress.to_replay == 7

    record.stepped()
    here.look(process)
    [event] = here.take_events()
    assert event.progress.steps == 2

    here.ended(process)
    assert not Path(path).exists()


class HeldWitness:
    """A process of Ray on another node that is asked, and has not answered yet."""

    def __init__(self) -> None:
        self.asked: list[Future[Activity]] = []
        self.read = SimpleNamespace(remote=self._ask)

    def _ask(self, file: ProgressFile) -> Any:
        self.asked.append(Future())
        return SimpleNamespace(future=lambda: self.asked[-1])

    def as_class_of_ray(self, plain: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self))


def test_a_look_at_another_node_is_repeated_once_the_one_before_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dppo.transports.ray import watching
    from dppo.transports.ray.calls import RayCalls

    witness = HeldWitness()
    monkeypatch.setattr(watching, "ray", SimpleNamespace(remote=witness.as_class_of_ray))
    monkeypatch.setattr(watching, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    link: Any = SimpleNamespace(calls=RayCalls("test"))
    looks = watching.Watching(link, node_id="another node")
    process = Process(0, 5)
    looks.started(process, progress_file.ProgressFile("its node", "/progress"))

    def questions_after_looks(count: int) -> int:
        for _ in range(count):
            looks.look(process)
        link.calls.call(lambda: None, "waiting for the looks")
        return len(witness.asked)

    assert questions_after_looks(2) == 1
    assert looks.take_events() == []
    for number in (1, 2):
        activity = ActivityRecord().look()
        witness.asked[-1].set_result(activity)
        assert looks.take_events() == [Progressed(process, activity)]
        assert questions_after_looks(2) == 1 + number
    assert link.calls.close(timeout_s=60.0)


def test_the_end_of_a_log_on_another_node_is_read_by_a_witness_unless_the_node_may_be_lost(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from dppo.transports.ray import watching
    from dppo.transports.ray.session import link_of_its_own

    monkeypatch.setattr(watching, "LOG_ELSEWHERE_S", 60.0)  # the witness may start slowly
    log = tmp_path / "log"
    log.write_text(
        "dppo: process 7 began\nnode h3 is lost\ndppo: process 7 ended with exit code 1\n"
    )
    node_id = ray.get_runtime_context().get_node_id()
    looks = watching.Watching(link_of_its_own("test"), node_id="another node")
    file = progress_file.ProgressFile(node_id, "", node="h2", log=str(log), pid=7)
    looks.started(Process(0, 5), file)
    crash = RuntimeError("Worker unexpectedly exits with a connection error code 2. End of file.")
    cause = looks.cause_of_death(Process(0, 5), crash)
    assert cause == f"died with exit code 1; its log: {log} on h2\n    node h3 is lost"

    for witness in looks.take_witnesses():
        ray.kill(witness)
    cause = looks.cause_of_death(Process(0, 5), RuntimeError("The node is dead: 10.0.0.1"))
    assert cause == f"died: The node is dead: 10.0.0.1; its log: {log} on h2"
    assert not looks.take_witnesses()


def test_a_node_on_which_a_process_dies_before_it_has_started_is_named_and_avoided(
    ray_session: None,
) -> None:
    import ray

    from dppo.transports.ray.actor_class import ActorClass
    from dppo.transports.ray.failures import UNREACHABLE
    from dppo.transports.ray.session import link_of_its_own
    from dppo.transports.ray.watching import Watching

    class Fragile:  # local, so that Ray pickles it by value
        def end(self) -> None:
            os._exit(1)

        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    link = link_of_its_own("test")
    looks = Watching(link, node_id="another node")
    fragile = ActorClass(Fragile, {"CPU": 1}, {})

    def started() -> Any:
        return link.calls.call(lambda: fragile.start((), None, looks.avoided), "starting an actor")

    with pytest.raises(RayActorError) as ended:
        ray.get(started().end.remote())
    cause = looks.cause_of_death(Process(0, 5), ended.value)
    assert cause.startswith(f"died on {socket.gethostname()} before it had started (is ")
    here = ray.get_runtime_context().get_node_id()
    assert looks.avoided == {here}

    actor = started()  # here nevertheless, because there is no other node
    assert ray.get(actor.node.remote(), timeout=60) == here
    ray.kill(actor)
    looks.started(Process(0, 6), progress_file.ProgressFile(here, ""))
    assert not looks.avoided

    # of the dead actor, whose node Ray still knows, as if a firewall dropped packets
    lost = ActorUnavailableError(
        "recvmsg: Connection timed out", bytes.fromhex(ended.value.actor_id)
    )
    cause = looks.cause_of_death(Process(0, 7), lost)
    assert cause == f"on {socket.gethostname()} {UNREACHABLE}"
    assert looks.avoided == {here}
    looks.started(Process(0, 7), progress_file.ProgressFile("elsewhere", ""))
    assert looks.cause_of_death(Process(0, 7), lost) == UNREACHABLE
    assert looks.avoided == {here, "elsewhere"}

    of_nobody = ActorUnavailableError("it does not answer", None)
    assert looks.cause_of_death(Process(0, 8), of_nobody).startswith("on its node ")


def test_a_log_on_a_disk_that_blocks_does_not_keep_the_loop_from_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dppo.transports.ray import watching
    from dppo.transports.ray.session import link_of_its_own

    blocked = threading.Event()
    monkeypatch.setattr(watching, "LOG_S", 0.05)
    monkeypatch.setattr(watching, "end_of_log", lambda path, pid: blocked.wait())
    looks = watching.Watching(link_of_its_own("test"), node_id="this node")
    path, _ = progress_file.make_progress_file()
    looks.started(Process(0, 5), progress_file.ProgressFile("this node", path, log="/net/log"))
    try:
        cause = looks.cause_of_death(Process(0, 5), RuntimeError("The actor died"))
    finally:
        blocked.set()
        looks.ended(Process(0, 5))
    assert cause.endswith("its log: /net/log")
