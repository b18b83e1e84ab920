"""Learners on Ray: equal results, also if ranks are lost; with real processes, gloo and signals."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from builders import mlp_of, plan_of
from made_up import POLICY, SPACES, STEPS, settings, some_segments
from meetings import OwnOrders
from nodes import report_of
from processes import Disturbance, in_the_middle_of_an_update, ours, send, wait_until
from ray.exceptions import RayTaskError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import dppo
from dppo import streams
from dppo.config.parts import annealed
from dppo.errors import ClusterError, OutOfMemory, TrainingDiverged
from dppo.hosts.trainer_builder import build_trainer
from dppo.learners import ranks, waiting
from dppo.learners.rank import TrainerRank, interface_of
from dppo.learners.ranks import RayTrainers
from dppo.learners.speedup import Speedup, describe_speedup
from dppo.ppo.exchange.records import Experience
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.streams import Stream
from dppo.transports.ray.calls import RayCalls

pytestmark = pytest.mark.usefixtures("ray_session")
LONG = 100  # epochs of an update that lasts long enough to be disturbed


@contextmanager
def ray_trainers_of(config: dppo.Config, notes: list[str] | None = None) -> Iterator[RayTrainers]:
    notes = [] if notes is None else notes
    trainers = RayTrainers(plan_of(config, SPACES.actions), SPACES, notes.append)
    try:
        yield trainers
    finally:
        trainers.close()


def experience_of(segments: Sequence[Any], iteration: int = 3) -> Experience:
    return Experience(list(segments), POLICY, 1.0, iteration)


def sent_segments() -> list[Any]:
    return [ray.put(segment) for segment in some_segments()]


class Undisturbed:
    """Two ranks in the middle of a training, and the result of their next update without faults."""

    def __init__(self, trainers: RayTrainers, notes: list[str]) -> None:
        self.trainers = trainers
        self.notes = notes
        self.experience = experience_of(sent_segments())
        self.update()
        self.before = trainers.weights(), trainers.state()
        self.expected = self.update()

    def update(self) -> dict[str, Any]:
        update = self.trainers.update(self.experience)
        self.incidents = update.incidents
        return {
            "figures": update.figures,
            "weights": self.trainers.weights(),
            **self.trainers.state(),
        }

    def go_back(self) -> None:
        self.notes.clear()
        self.trainers.load(*self.before)

    def assert_repeated(self, rebuilt: str | None = None, times: int = 1) -> None:
        """Repeat the update under the current disturbance; compare its result, its incidents and the logged lines.

        Args:
            rebuilt: pattern of the reason why the ranks are rebuilt; None if they are not.
        """
        update = self.update()
        assert update["figures"] == self.expected["figures"]
        for name in ("weights", "exp_avg", "exp_avg_sq", "step"):
            np.testing.assert_array_equal(update[name], self.expected[name], err_msg=name)
        incidents = self.incidents
        if rebuilt is None:
            assert incidents == ()
            assert self.notes == []
            return
        kinds = [incident.kind for incident in incidents]
        assert kinds == ["learners_rebuilt"] * times
        first, *_, last = self.notes
        assert re.search(rebuilt, incidents[0].message), incidents
        assert re.search(rebuilt, first)
        assert "all 2 are restarted" in first
        assert re.fullmatch(r"learners are back after \d+ s", last)


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[Undisturbed]:
    notes: list[str] = []
    with ray_trainers_of(settings(update_epochs=LONG), notes) as trainers:
        yield Undisturbed(trainers, notes)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_in_an_update_does_not_change_its_result(
    group: Undisturbed, number: int
) -> None:
    group.go_back()
    with in_the_middle_of_an_update(send(number)):
        group.assert_repeated("a learner died: ")


@pytest.mark.slow
@pytest.mark.parametrize("silent_s", [5.0, waiting.SILENT_S])
def test_a_stopped_rank_is_replaced(
    group: Undisturbed, silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.go_back()
    monkeypatch.setattr(waiting, "SILENT_S", silent_s)
    monkeypatch.setattr(waiting, "ASK_EVERY_S", min(waiting.ASK_EVERY_S, silent_s / 4))
    with in_the_middle_of_an_update(send(signal.SIGSTOP)) as disturbance:
        group.assert_repeated(
            rf"a learner stopped answering: rank [01] has been silent for {silent_s:.0f} s"
        )
        # the stopped process is killed
        wait_until(lambda: not Path(f"/proc/{disturbance.pids[0]}").exists())


def within_a_rank() -> tuple[Callable[[Any], Any], Callable[[Any, list[int]], None]]:
    """Return two functions to send to a rank; they are local, because a rank cannot import this module."""
    established = "01"

    def connections(_: Any) -> dict[int, tuple[str, str]]:
        """Return both ends of its TCP connections, by file descriptor."""
        ends = {}
        _, *lines = Path("/proc/self/net/tcp").read_text().splitlines()
        for line in lines:
            _, here, there, state, *row = line.split()
            inode = row[5]
            if state == established:
                ends[f"socket:[{inode}]"] = (here, there)
        sockets = {}
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)
                if target in ends:
                    sockets[int(link.name)] = ends[target]
        return sockets

    def cut(_: Any, descriptors: list[int]) -> None:
        """Close connections while the process lives, like a broken network."""
        for descriptor in descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    return connections, cut


@pytest.mark.slow
def test_ranks_whose_connection_is_cut_in_an_update_reconnect(group: Undisturbed) -> None:
    group.go_back()
    connections, cut = within_a_rank()

    def beside_the_update(rank: int, *work: Any) -> Any:
        call = group.trainers.ranks[rank].__ray_call__.options(concurrency_group="life")
        return ray.get(call.remote(*work), timeout=120)

    first_ends = beside_the_update(0, connections)
    second_ends = beside_the_update(1, connections)
    ends_of_second = {here for here, _ in second_ends.values()}
    between = [number for number, (_, there) in first_ends.items() if there in ends_of_second]
    assert between, "the ranks are not connected"

    with in_the_middle_of_an_update(lambda pid: beside_the_update(0, cut, between)):
        group.assert_repeated("a learner failed: .*([Cc]losed|reset|Broken)")


@pytest.mark.slow
def test_a_rank_that_died_between_updates_is_replaced_by_the_next(group: Undisturbed) -> None:
    group.go_back()
    os.kill(ours("ray::TrainerRank")[0], signal.SIGKILL)
    group.assert_repeated("a learner died: ")


@pytest.mark.slow
def test_a_rank_that_dies_during_a_rebuild_is_rebuilt_as_well(group: Undisturbed) -> None:
    group.go_back()
    first = ours("ray::TrainerRank")
    # one that has just started
    with (
        in_the_middle_of_an_update(send(signal.SIGKILL)),
        Disturbance("ray::TrainerRank", send(signal.SIGKILL)) as second,
    ):
        group.assert_repeated("a learner died: ", times=2)
    assert not set(second.pids) & set(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("busy_with", "rows"), [("ray::TrainerRank", 64), ("TrainerRank.rehearse_s", 500_000)]
)
def test_a_rank_that_dies_while_the_group_starts_is_replaced(busy_with: str, rows: int) -> None:
    notes: list[str] = []
    with (
        Disturbance(busy_with, send(signal.SIGKILL)) as disturbance,
        ray_trainers_of(settings(), notes) as trainers,
    ):
        seconds = trainers.measure_speedup(rows)
        assert min(seconds) > 0
        update = trainers.update(experience_of(sent_segments(), 0))
    assert len(disturbance.pids) == 1

    [incident] = update.incidents
    assert incident.kind == "learners_rebuilt"
    # on a busy machine, a line about a slow start comes first
    [loss] = [note for note in notes if "restarted" in note]
    assert re.match("a learner died: .*; all 2 are restarted", loss)


@pytest.mark.slow
def test_ranks_that_die_repeatedly_end_the_run() -> None:
    rebuilds = ranks.MAX_REBUILDS
    notes = list[str]()
    # no update ends in time
    with ray_trainers_of(settings(update_epochs=20 * LONG), notes) as trainers:
        experience = experience_of(sent_segments())
        error = rf"died: (.|\n)*rebuilt {rebuilds} times in a row .*--resume.*num_learners=0"
        with (
            in_the_middle_of_an_update(send(signal.SIGKILL), times=rebuilds + 1),
            pytest.raises(ClusterError, match=error),
        ):
            trainers.update(experience)
    assert sum("learners are back" in note for note in notes) == rebuilds


@pytest.mark.slow
def test_ranks_that_fail_in_each_update_end_the_run_with_their_traceback() -> None:
    segments = some_segments()
    broken = [
        dataclasses.replace(segments[0], actions=segments[0].actions[:, :, None]),
        *segments[1:],
    ]
    with (
        ray_trainers_of(settings()) as trainers,
        pytest.raises(
            ClusterError,
            match=r"(?s)a learner failed: .*rebuilt 3 times in a row .*File .*batch\.py",
        ),
    ):
        trainers.update(experience_of(broken, 0))


def test_an_update_that_diverges_on_one_rank_ends_the_run_with_a_line_for_each_rank(
    group: Undisturbed,
) -> None:
    group.go_back()
    segments = some_segments()
    rewards = segments[3].rewards.copy()
    rewards[5] = np.nan
    segments[3] = dataclasses.replace(segments[3], rewards=rewards)
    with pytest.raises(TrainingDiverged) as raised:
        group.trainers.update(experience_of(segments))
    lines = str(raised.value).splitlines()
    assert re.match(r"Learner 0: SGD step 0 .* returns from -?\d", lines[0])
    assert re.match(r"Learner 1: SGD step 0 .* returns from nan to nan", lines[1])
    np.testing.assert_array_equal(group.trainers.weights(), group.before[0])


def test_timing_the_learners_does_not_change_their_updates(group: Undisturbed) -> None:
    group.go_back()
    alone, shared, summing = group.trainers.measure_speedup(2 * STEPS)
    assert 0 < summing < shared
    assert alone > 0
    group.assert_repeated()


@pytest.mark.parametrize(
    ("shared_ms", "words"),
    [
        (1.25, "Several learners do not pay off here; num_learners=0"),
        (0.55, "They are 1.8 times as fast."),
    ],
)
def test_the_measured_worth_in_words(shared_ms: float, words: str) -> None:
    spec = mlp_of(SPACES, (64, 64), "tanh", "float32")
    plan = plan_of(settings(), SPACES.actions)
    text = describe_speedup(plan, spec, Speedup(alone_ms=1.0, shared_ms=shared_ms, summing_ms=0.5))
    assert text.startswith(
        "2 learners, model of 9,476 parameters: the gradient of a minibatch of 64 rows takes "
    )
    assert (
        f"takes {shared_ms:.1f} ms, 0.5 ms of it for the sum; one learner takes 1.0 ms. {words}"
        in text
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learners_and_segments_of_lost_nodes_are_replaced(tmp_path: Path) -> None:
    report = report_of("losing_nodes.py", tmp_path)
    assert report["lost segments"].startswith(
        "the segments of iteration 4 were lost with the node that held them ("
    )
    assert report["nothing has changed"] is True
    assert report["same weights"] is True
    assert report["incidents"] == ["learners_rebuilt"]
    assert any(note.startswith("a learner died: ") for note in report["notes"])
    assert report["run"]["same"] is True
    assert report["run"]["incidents"]["segments_lost"] == 2


def test_learners_without_room_raise_and_release_their_resources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether their time is over or a check ends the wait."""

    class Abandoned(BaseException):
        pass

    def check() -> None:
        raise Abandoned

    plan = plan_of(settings(learner_cpus=6), SPACES.actions)
    with pytest.raises(Abandoned):
        RayTrainers(plan, SPACES, print, check)

    monkeypatch.setattr(ranks, "START_TIMEOUT_S", 0.5)
    with pytest.raises(
        ClusterError, match=r"num_learners=2: learners of 6 CPU each found no room .*learner_cpus"
    ):
        RayTrainers(plan, SPACES, print)
    assert not [
        group for group in ray.util.placement_group_table().values() if group["state"] == "PENDING"
    ]


def test_the_store_of_ranks_on_one_node_is_bound_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def store_of_torch_2_6(*arguments: Any, **keywords: Any) -> Any:
        assert not keywords["use_libuv"], "the libuv TCPStore takes no listen fd"
        return TCPStore(*arguments, **keywords)

    monkeypatch.setattr("dppo.learners.rank.TCPStore", store_of_torch_2_6)
    rank = TrainerRank(plan_of(settings(), SPACES.actions), SPACES, 0)
    port = rank.open_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)


def answer_of(call: Any, timeout: float = 120) -> Any:
    return ray.get(call, timeout=timeout)


def as_in_proc(address: str) -> str:
    """Return an IPv4 address as /proc/net/tcp writes it: in hexadecimal digits, the last byte first."""
    parts = address.split(".")
    return "".join(f"{int(part):02X}" for part in reversed(parts))


@pytest.mark.slow
def test_ranks_that_meet_at_the_address_of_their_node_use_it() -> None:
    """As they do on several nodes."""
    plan = plan_of(settings(), SPACES.actions)
    first: Any = ray.remote(TrainerRank).remote(plan, SPACES, 0)
    second: Any = ray.remote(TrainerRank).remote(plan, SPACES, 1)
    ranks = [first, second]
    _, address = answer_of(first.whereabouts.remote(), 60)
    port = answer_of(first.open_store.remote(address), 60)
    joined = answer_of([rank.join.remote(address, port) for rank in ranks], 90)
    assert joined == ["", ""]

    seconds = answer_of([rank.sum_s.remote() for rank in ranks])
    assert min(seconds) > 0

    connections, _ = within_a_rank()
    first_ends = answer_of(first.__ray_call__.remote(connections))
    second_ends = answer_of(second.__ray_call__.remote(connections))
    ends_of_first = {here for here, _ in first_ends.values()}
    between = ends_of_first & {there for _, there in second_ends.values()}
    addresses = {place.partition(":")[0] for place in between}
    assert addresses == {as_in_proc(address)}

    for rank in ranks:
        ray.kill(rank)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None
    address = ray.util.get_node_ip_address()
    interface = interface_of(address)
    assert interface in {name for _, name in socket.if_nameindex()}
    assert (interface in ("lo", "lo0")) == address.startswith("127.")


def joined_batch(config: dppo.Config, segments: Sequence[Any]) -> Batch:
    """Return the batch of one trainer: the rows of the first rank, then those of the second."""
    first = make_batch(segments[:2], None, 1.0, config.ppo)
    second = make_batch(segments[2:], None, 1.0, config.ppo)
    columns: dict[str, Any] = {}
    for name in Batch.__slots__:
        column = getattr(first, name)
        if isinstance(column, torch.Tensor):
            columns[name] = torch.cat([column, getattr(second, name)])
    columns["index"] = torch.arange(len(columns["index"]))
    return Batch(**columns)


@pytest.mark.slow  # tests/ppo/test_parallel.py compares ranks in threads in the fast set
@pytest.mark.parametrize(
    "changes", [{"micro_batch_size": 5, "clip_vloss": True}, {"norm_adv": False}], ids=str
)
def test_two_ranks_on_ray_are_one_trainer_with_the_minibatches_of_both(
    changes: dict[str, Any],
) -> None:
    """In float64, to rounding; the single trainer does not split its minibatches."""
    config = settings(dtype="float64", minibatch_size=64, overlap=True, **changes)
    in_one_piece = dataclasses.replace(config, micro_batch_size=None)
    alone = build_trainer(plan_of(in_one_piece, SPACES.actions), SPACES)
    assert isinstance(alone, PPOTrainer)

    segments = some_segments("float64")
    experience = experience_of(segments, 2)  # two policies ago
    with ray_trainers_of(config) as trainers:
        trainers.load(alone.weights(), alone.state())
        update = trainers.update(experience)
        results = {"weights": trainers.weights(), **trainers.state()}

    orders = [streams.generator(config.seed, Stream.MINIBATCHES, 2, rank) for rank in range(2)]
    order: Any = OwnOrders(orders, config.sizes.minibatches_per_epoch)
    ppo = annealed(alone.ppo, 2 / config.iterations)
    expected = alone.train_on(joined_batch(config, segments), ppo, order, experience)
    assert update.figures == pytest.approx(expected.figures, rel=1e-10)
    assert update.learning_rate == expected.learning_rate
    np.testing.assert_allclose(results.pop("weights"), alone.weights(), rtol=1e-9, atol=1e-12)
    for name, array in alone.state().items():
        np.testing.assert_allclose(results[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_rank_without_memory_ends_the_run_at_once() -> None:
    """New ranks would have no more memory, and the others wait for this one in a sum."""
    trainers = RayTrainers.__new__(RayTrainers)
    trainers.ranks = ["a rank"]
    cause = OutOfMemory("micro_batch_size=none: 64 rows at once do not fit")

    def update() -> None:
        raise RayTaskError("update", "the traceback of the rank", cause).as_instanceof_cause()

    calls = RayCalls("test")
    with pytest.raises(OutOfMemory, match=r"^micro_batch_size=none: 64 rows at once do not fit$"):
        calls.call(lambda: trainers._with_group(update), "updating")
    assert calls.close(10.0)


def test_a_wait_for_learners_to_start_is_reported_once_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    notes: list[str] = []
    trainers = object.__new__(RayTrainers)
    trainers._clock = lambda: now[0]
    trainers._notify = notes.append
    trainers.ranks = [object(), object()]
    monkeypatch.setattr(RayTrainers, "_check", lambda self: None)
    check = trainers._start_check()
    for now[0] in (0.0, 9.0, 11.0, 60.0):
        check()
    assert [line.partition(":")[0] for line in notes] == ["waiting for 2 learners to start"]
