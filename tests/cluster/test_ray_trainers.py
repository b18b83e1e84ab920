"""Learners on Ray: what they come to, whatever happens to them; real processes, real gloo, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import ray
import torch
from commandline import Command, command_line, descendants
from hypothesis import given
from hypothesis import strategies as st
from meetings import OwnOrders

import dppo
from dppo import streams
from dppo.assemble import build_trainer
from dppo.cluster import calls, ray_trainers
from dppo.cluster.rank import TrainerRank, interface_of
from dppo.cluster.ray_trainers import RayTrainers
from dppo.cluster.trainers import LocalTrainer, worth_in_words
from dppo.config import make_config
from dppo.errors import ClusterError, ConfigError, TrainingDiverged
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.batch import Batch, make_batch
from dppo.ppo.normalizer import Statistics
from dppo.ppo.segment import Segment
from dppo.records import checkpoint as checkpoints
from dppo.spaces import DiscreteActions, Spaces
from dppo.streams import Stream

pytestmark = pytest.mark.usefixtures("ray_session")
SAMPLERS, STEPS, OBS = 4, 64, 6
SPACES = Spaces((OBS,), "float32", DiscreteActions(3))
REBUILT_S = 60.0  # a promise
LONG = 100  # epochs of an update that lasts long enough to be disturbed


def settings(**changes: Any) -> dppo.Config:
    base = {"env_id": "CartPole-v1", "num_actors": 1, "num_samplers": SAMPLERS, "num_steps": STEPS, "num_learners": 2}
    return make_config(base | {"update_epochs": 2, "progress": "off"} | changes)


def some_segments(dtype: str = "float32") -> list[Segment]:
    return [_segment(np.random.default_rng(sampler), dtype) for sampler in range(SAMPLERS)]


def _segment(rng: np.random.Generator, dtype: str) -> Segment:
    shape = (STEPS, 1)
    logprobs, values, next_values = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    return Segment(
        obs=rng.normal(size=(*shape, OBS)).astype(np.float32),
        actions=rng.integers(0, 3, shape),
        logprobs=-np.abs(logprobs),
        values=values,
        next_values=next_values,
        rewards=rng.normal(size=shape),
        terminated=rng.random(shape) < 0.05,
        truncated=np.zeros(shape, bool),
        valid=np.ones(shape, bool),
    )


@contextmanager
def ray_trainers_of(config: dppo.Config, notes: list[str] | None = None) -> Iterator[RayTrainers]:
    trainers = RayTrainers(config, SPACES, (notes if notes is not None else []).append)
    try:
        yield trainers
    finally:
        trainers.close()


# ------------------------------------------------------------------ disturbances


def ours(title: str) -> list[int]:
    """Processes below this one that show `title`: never those of somebody else."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if title in command_line(pid):
                found.append(pid)
    return sorted(found)


class Disturbance:
    """Waits in a thread until a process of ours is busy with `title`, gives it time to get on, and disturbs it."""

    def __init__(self, title: str, disturb: Callable[[int], None], times: int = 1) -> None:
        self.pids: list[int] = []
        self._title, self._disturb, self._times = title, disturb, times
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pid in self.pids:  # a process that was stopped must not stay behind, whatever became of the test
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert len(self.pids) >= self._times, f"none of ours was busy with {self._title} for long enough"

    def _run(self) -> None:
        while len(self.pids) < self._times and not self._over.is_set():
            for pid in ours(self._title):
                time.sleep(0.05)
                if pid in ours(self._title) and pid not in self.pids:
                    self.pids.append(pid)
                    self._disturb(pid)
                    break
            time.sleep(0.02)


def send(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def in_the_middle_of_an_update(disturb: Callable[[int], None], times: int = 1) -> Disturbance:
    return Disturbance("TrainerRank.update", disturb, times)


# ------------------------------------------------------------------ refused before anything starts


def refusal(**changes: Any) -> str | None:
    try:
        settings(**changes)
    except ConfigError as error:
        return str(error)
    return None


@hypothesis.settings(deadline=None)
@given(
    learners=st.integers(2, 5),
    samplers=st.integers(1, 12),
    envs=st.integers(1, 3),
    steps=st.integers(2, 70),
    share=st.none() | st.floats(0.01, 1.0),
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(
    learners: int, samplers: int, envs: int, steps: int, share: float | None
) -> None:
    """Whoever follows what the messages say gets a run, in two steps at most, whichever number is chosen."""
    chosen: dict[str, Any] = {"num_learners": learners, "num_samplers": samplers, "envs_per_sampler": envs}
    chosen |= {"num_steps": steps, "norm_adv": False}
    if share is not None:
        chosen["minibatch_size"] = max(1, int(share * samplers * envs * steps))
    for pick in (0, -1):
        settings_now, told = dict(chosen), []
        while (text := refusal(**settings_now)) is not None:
            told.append(text)
            match = re.search(r"Use (num_samplers|minibatch_size)=(\d+)(?: or (\d+))?", text)
            if match is None:  # of a batch that is now too small for its minibatch
                assert "is larger than the batch" in text
                settings_now["minibatch_size"] = int(re.search(r"Use at most (\d+)", text)[1])
            else:
                settings_now[match[1]] = int([number for number in match.groups()[1:] if number][pick])
            assert len(told) <= 3, told
        config = settings(**settings_now)
        assert config.samplers % learners == 0
        assert config.batch_size // learners % config.minibatches_per_epoch == 0


def test_the_nearest_number_of_samplers_is_no_less_than_that_of_actors() -> None:
    text = refusal(num_actors=6, num_samplers=6, num_learners=4)
    assert text == "num_learners=4 cannot share 6 samplers evenly. Use num_samplers=8, or another number of learners."
    assert refusal(num_actors=6, num_samplers=8, num_learners=4) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"device": "cuda"},
            "device=cuda: learners on Ray see the GPUs that they ask for, and ask for none. Give --learner-gpus 1, or "
            "--device cpu.",
        ),
        (
            {"learner_gpus": 1},
            "learner_gpus=1.0 has no effect: device=cpu trains on the CPU. Give --device cuda.",
        ),
        (
            {"learner_cpus": 2, "num_learners": 0},
            "learner_cpus=2.0 has no effect: num_learners=0 trains in this process. Give --num-learners.",
        ),
        (
            {"num_actors": 0},
            "num_learners=2 has no effect: num_actors=0 keeps everything in this process. Give --num-actors.",
        ),
        (
            {"micro_batch_size": 32},
            "micro_batch_size=32 has no effect: a minibatch has 64 rows. Use a smaller one, or leave it out.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_devices_and_sizes_that_contradict_each_other_are_refused(changes: dict[str, Any], text: str) -> None:
    assert refusal(**changes) == text


def test_devices_that_fit_together_are_accepted() -> None:
    for changes in ({"device": "cuda", "learner_gpus": 1}, {"device": "auto", "learner_gpus": 1}, {"device": "cpu"}):
        assert refusal(**changes) is None


# ------------------------------------------------------------------ one group, disturbed again and again


class Undisturbed:
    """Two ranks in the middle of a training, and what their next update comes to when nobody disturbs it."""

    def __init__(self, trainers: RayTrainers, notes: list[str]) -> None:
        self.trainers, self.notes = trainers, notes
        self.segments = [ray.put(segment) for segment in some_segments()]
        self.update()
        self.before = trainers.weights(), trainers.state()
        self.expected = self.update()

    def update(self) -> dict[str, Any]:
        figures = self.trainers.update(self.segments, Statistics(), 3)
        return {"figures": figures, "weights": self.trainers.weights(), **self.trainers.state()}

    def go_back(self) -> None:
        self.notes.clear()
        self.trainers.take_incidents()
        self.trainers.load(*self.before)

    def assert_as_expected(self, found: dict[str, Any]) -> None:
        assert found["figures"] == self.expected["figures"]
        for name in ("weights", "exp_avg", "exp_avg_sq", "step"):
            np.testing.assert_array_equal(found[name], self.expected[name], err_msg=name)


@pytest.fixture(scope="module")
def group(ray_session: None) -> Iterator[Undisturbed]:
    notes: list[str] = []
    with ray_trainers_of(settings(update_epochs=LONG), notes) as trainers:
        yield Undisturbed(trainers, notes)


def test_an_update_done_again_comes_to_the_same_bits(group: Undisturbed) -> None:
    group.go_back()
    group.assert_as_expected(group.update())
    assert (group.trainers.take_incidents(), group.notes) == ([], [])


def assert_rebuilt(group: Undisturbed, words: str, times: int = 1, within_s: float = REBUILT_S) -> None:
    """Do the update again, disturbed as it is; see that nobody can tell, but that it is told."""
    began = time.monotonic()
    found = group.update()
    assert time.monotonic() - began < within_s
    group.assert_as_expected(found)
    incidents = group.trainers.take_incidents()
    assert [incident.kind for incident in incidents] == ["learners_rebuilt"] * times
    assert re.search(words, incidents[0].message), incidents
    assert re.search(words, group.notes[0])
    assert "all 2 are started anew" in group.notes[0]
    assert re.fullmatch(r"learners are back after \d+ s", group.notes[-1])


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_an_update_is_not_noticed_in_its_result(group: Undisturbed, number: int) -> None:
    group.go_back()
    with in_the_middle_of_an_update(send(number)):
        assert_rebuilt(group, "a learner died: ")


@pytest.mark.parametrize("silent_s", [6.0, pytest.param(calls.SILENT_S, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_in_an_update_is_replaced(
    group: Undisturbed, silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.go_back()
    monkeypatch.setattr(calls, "SILENT_S", silent_s)
    monkeypatch.setattr(calls, "ASK_EVERY_S", min(calls.ASK_EVERY_S, silent_s / 4))
    with in_the_middle_of_an_update(send(signal.SIGSTOP)) as disturbance:
        assert_rebuilt(group, rf"a learner fell silent: rank [01] has not answered for {silent_s:.0f} s")
        gone_by = time.monotonic() + 20
        while Path(f"/proc/{disturbance.pids[0]}").exists() and time.monotonic() < gone_by:
            time.sleep(0.1)
        assert not Path(f"/proc/{disturbance.pids[0]}").exists(), "it still holds its memory"


def within_a_rank() -> tuple[Callable[[Any], Any], Callable[[Any, list[int]], None]]:
    """Two functions to be sent to a rank; they are made here, as a rank cannot import this module."""

    def connections(_: Any) -> dict[int, tuple[str, str]]:
        """Its TCP connections: own and other end by file descriptor."""
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        ends = {f"socket:[{row[9]}]": (row[1], row[2]) for row in rows if row[3] == "01"}
        found = {}
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if (target := os.readlink(link)) in ends:
                    found[int(link.name)] = ends[target]
        return found

    def cut(_: Any, descriptors: list[int]) -> None:
        """What a network does that breaks: the process lives, and its connection does not."""
        for descriptor in descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    return connections, cut


def test_ranks_whose_connection_is_cut_in_an_update_meet_anew(group: Undisturbed) -> None:
    group.go_back()
    connections, cut = within_a_rank()

    def beside_the_update(rank: int, *work: Any) -> Any:
        call = group.trainers._ranks[rank].__ray_call__.options(concurrency_group="life")
        return ray.get(call.remote(*work), timeout=30)

    of_each = [beside_the_update(rank, connections) for rank in range(2)]
    other_ends = {own for own, _ in of_each[1].values()}
    between = [descriptor for descriptor, (_, other) in of_each[0].items() if other in other_ends]
    assert between, "the ranks are not connected"
    with in_the_middle_of_an_update(lambda pid: beside_the_update(0, cut, between)):
        assert_rebuilt(group, "a learner failed: .*([Cc]losed|reset|Broken)")


def test_a_rank_that_died_between_updates_is_found_by_the_next(group: Undisturbed) -> None:
    group.go_back()
    os.kill(ours("ray::TrainerRank")[0], signal.SIGKILL)
    assert_rebuilt(group, "a learner died: ")


@pytest.mark.slow
def test_a_rank_that_dies_while_the_group_is_rebuilt_is_rebuilt_too(group: Undisturbed) -> None:
    group.go_back()
    first = ours("ray::TrainerRank")
    with (
        in_the_middle_of_an_update(send(signal.SIGKILL)),
        Disturbance("ray::TrainerRank.join", send(signal.SIGKILL)) as second,
    ):
        assert_rebuilt(group, "a learner died: ", times=2)
    assert not set(second.pids) & set(first)


@pytest.mark.slow
def test_ranks_that_die_again_and_again_end_the_run() -> None:
    rebuilds, notes = ray_trainers.MAX_REBUILDS, []
    with ray_trainers_of(settings(update_epochs=20 * LONG), notes) as trainers:  # none of its updates ends in time
        segments = [ray.put(segment) for segment in some_segments()]
        told = rf"died: (.|\n)*rebuilt {rebuilds} times in a row .*--resume.*--num-learners 0"
        with (
            in_the_middle_of_an_update(send(signal.SIGKILL), times=rebuilds + 1),
            pytest.raises(ClusterError, match=told),
        ):
            trainers.update(segments, Statistics(), 3)
        assert len(trainers.take_incidents()) == rebuilds
    assert sum("learners are back" in note for note in notes) == rebuilds


def test_an_update_that_diverges_on_one_rank_ends_the_run_and_tells_of_all(group: Undisturbed) -> None:
    group.go_back()
    segments = some_segments()
    segments[3].rewards[5] = np.nan
    with pytest.raises(TrainingDiverged) as raised:
        group.trainers.update(segments, Statistics(), 3)
    lines = str(raised.value).splitlines()
    assert re.match(r"Learner 0: SGD step 0 .* returns from -?\d", lines[0])
    assert re.match(r"Learner 1: SGD step 0 .* returns from nan to nan", lines[1])
    assert group.trainers.take_incidents() == []
    np.testing.assert_array_equal(group.trainers.weights(), group.before[0])


def test_worth_is_measured_and_changes_nothing(group: Undisturbed) -> None:
    group.go_back()
    alone, shared, summing = group.trainers.worth(2 * STEPS)
    assert 0 < summing < shared < 1000
    assert 0 < alone < 1000
    group.assert_as_expected(group.update())


def test_that_several_learners_do_not_pay_is_told_where_they_do_not() -> None:
    config = settings()
    spec = ModelSpec.of(SPACES, (64, 64), "tanh", "float32")
    slower = worth_in_words(config, spec, alone_ms=1.0, shared_ms=1.25, summing_ms=0.75)
    assert slower == (
        "2 learners, model of 9,476 parameters: the gradient of a minibatch of 64 rows takes 1.2 ms, 0.8 ms of it for "
        "the sum; one learner takes 1.0 ms. Several learners do not pay here; --num-learners 0 is faster."
    )
    faster = worth_in_words(config, spec, alone_ms=1000.0, shared_ms=550.0, summing_ms=20.0)
    assert faster.endswith("one learner takes 1000.0 ms. They are 1.8 times as fast.")


# ------------------------------------------------------------------ nodes that go

# So that a node that died is noticed in seconds; by default Ray takes a quarter of a minute.
QUICK = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.mark.slow
def test_nodes_that_go_take_a_learner_which_is_replaced_or_segments_which_are_not(tmp_path: Path) -> None:
    with Command([], tmp_path, program=(str(Path(__file__).with_name("losing_nodes.py")),), **QUICK) as command:
        assert command.wait(240) == 0
        told = json.loads(
            next(line for line in command.out.splitlines() if line.startswith("told ")).removeprefix("told ")
        )
    assert re.match(
        r"the segments of iteration 4 were lost with the node that held them .*--resume", told["lost segments"]
    )
    assert told["notes of lost segments"] == 0  # nobody was rebuilt in vain
    assert told["same weights"] is True
    assert told["incidents"] == ["learners_rebuilt"]
    assert told["notes"][0].startswith("a learner died: ")


# ------------------------------------------------------------------ starting, and not


def test_learners_without_room_are_told_and_leave_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_trainers, "START_TIMEOUT_S", 1.0)
    with pytest.raises(ClusterError, match=r"num_learners=2: learners of 6 CPU each found no room .*--learner-cpus"):
        RayTrainers(settings(learner_cpus=6), SPACES, print)
    assert_nothing_is_taken()


def test_the_wait_for_room_can_be_given_up() -> None:
    class GivenUp(BaseException):
        pass

    def check() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        RayTrainers(settings(learner_cpus=6), SPACES, print, check)
    assert_nothing_is_taken()


def assert_nothing_is_taken() -> None:
    """Apart from what the group of the tests above takes."""
    waiting = [one for one in ray.util.placement_group_table().values() if one["state"] == "PENDING"]
    assert not waiting


def test_ranks_of_one_node_can_only_be_reached_from_it() -> None:
    rank = TrainerRank(settings(), SPACES, 0)
    port = rank.open_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.slow
def test_ranks_that_meet_at_the_address_of_their_node_reach_each_other_there() -> None:
    """As they do where they run on several nodes."""
    config = settings()
    ranks: list[Any] = [ray.remote(TrainerRank).remote(config, SPACES, rank) for rank in range(2)]
    address = ray.get(ranks[0].address.remote(), timeout=60)
    port = ray.get(ranks[0].open_store.remote(address), timeout=60)
    assert ray.get([rank.join.remote(address, port) for rank in ranks], timeout=90) == [None, None]
    assert all(0 < seconds < 5 for seconds in ray.get([rank.time_summing.remote() for rank in ranks], timeout=60))
    connections, _ = within_a_rank()
    ends = [ray.get(rank.__ray_call__.remote(connections), timeout=30).values() for rank in ranks]
    between = {own for own, _ in ends[0]} & {other for _, other in ends[1]}
    written = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    assert {one.partition(":")[0] for one in between} == {written}
    for rank in ranks:
        ray.kill(rank)


def test_the_interface_is_that_of_the_nodes_own_address() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None
    address = ray.util.get_node_ip_address()
    found = interface_of(address)
    assert found in {name for _, name in socket.if_nameindex()}
    assert (found in ("lo", "lo0")) == address.startswith("127.")


# ------------------------------------------------------------------ the same learning problem


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch_size": 5, "clip_vloss": True}, pytest.param({"norm_adv": False}, marks=pytest.mark.slow)],
    ids=str,
)
def test_two_ranks_on_ray_are_one_trainer_with_the_minibatches_of_both(changes: dict[str, Any]) -> None:
    """In float64, to rounding; one trainer takes its minibatches whole."""
    config = settings(dtype="float64", minibatch_size=64, **changes)
    segments = some_segments("float64")
    alone = build_trainer(config.model_copy(update={"micro_batch_size": None}), SPACES)
    with ray_trainers_of(config) as trainers:
        trainers.load(alone.weights(), alone.state())
        figures = trainers.update(segments, Statistics(), 2)
        found = {"weights": trainers.weights(), **trainers.state()}
    shares = [
        make_batch(share, Statistics(), gamma=config.gamma, gae_lambda=config.gae_lambda)
        for share in (segments[:2], segments[2:])
    ]
    together = Batch(*(torch.cat([getattr(share, name) for share in shares]) for name in Batch.__slots__))
    orders = [streams.generator(config.seed, Stream.MINIBATCHES, 2, rank) for rank in range(2)]
    order: Any = OwnOrders(orders, config.minibatches_per_epoch)
    expected = alone.update(together, config.learning_rate_at(2), order)
    assert figures == pytest.approx(expected, rel=1e-10)
    for name, array in {"weights": alone.weights(), **alone.state()}.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


def test_one_rank_does_to_the_bit_what_the_driver_does() -> None:
    config = settings(num_learners=1)
    local = LocalTrainer(config.model_copy(update={"num_learners": 0}), SPACES)
    with ray_trainers_of(config) as remote:
        for iteration in range(2):
            figures = [one.update(some_segments(), Statistics(), iteration) for one in (local, remote)]
            assert figures[0] == figures[1]
            np.testing.assert_array_equal(local.weights(), remote.weights())
            for name, array in local.state().items():
                np.testing.assert_array_equal(array, remote.state()[name], err_msg=name)
    local.close()


# ------------------------------------------------------------------ whole runs

ITERATIONS = 4


class Recorder:
    """A progress display that keeps what it is told, and can act on an iteration."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self._stop_after = stop_after

    def start(self, title: str, lines: list[str], total_steps: int) -> None:
        pass

    def iteration(self, row: dict[str, float]) -> None:
        if row["iteration"] == self._stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, lines: list[str]) -> None:
        pass

    def close(self) -> None:
        pass


def run_settings(run_dir: Path, **changes: Any) -> dppo.Config:
    """Everything normalised, so that statistics must travel too; actors share CPUs with the learners."""
    base = {"env_id": "Pendulum-v1", "num_samplers": 8, "num_steps": 120, "gamma": 0.9, "update_epochs": 20}
    base |= {"norm_obs": True, "norm_reward": True, "total_timesteps": 8 * 120 * ITERATIONS}
    if changes.get("num_actors"):
        base |= {"cpus_per_actor": 0.5}
    return make_config(base | {"progress": "off", "run_dir": run_dir} | changes)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(run_settings(tmp_path_factory.mktemp("in_process") / "run")).weights_sha256


@pytest.fixture(scope="module")
def with_two(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> tuple[str, list[str]]:
    """The weights of an undisturbed run with two learners and one actor, and what was told."""
    recorder = Recorder()
    run = tmp_path_factory.mktemp("with_two") / "run"
    result = dppo.train(run_settings(run, num_actors=1, num_learners=2), progress=recorder)
    assert result.incidents == {}
    return result.weights_sha256, recorder.notes


def test_one_learner_gives_the_weights_of_none(in_process: str, tmp_path: Path) -> None:
    result = dppo.train(run_settings(tmp_path / "run", num_actors=1, num_learners=1))
    assert result.weights_sha256 == in_process


def test_two_learners_give_other_weights_and_say_what_they_are_worth(
    in_process: str, with_two: tuple[str, list[str]]
) -> None:
    sha, notes = with_two
    assert sha != in_process
    worth = [note for note in notes if note.startswith("2 learners, model of 8,963 parameters: ")]
    assert len(worth) == 1
    assert re.search(r"a minibatch of 240 rows takes \d+\.\d ms, \d+\.\d ms of it for the sum", worth[0])
    assert worth[0].endswith("Several learners do not pay here; --num-learners 0 is faster.")


@pytest.mark.slow
@pytest.mark.parametrize("num_actors", [3, 8])
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "slow_worlds:delayed_pendulum"])
def test_actors_and_the_order_of_arrival_do_not_show(
    num_actors: int, env_id: str, with_two: tuple[str, list[str]], tmp_path: Path
) -> None:
    result = dppo.train(run_settings(tmp_path / "run", num_actors=num_actors, num_learners=2, env_id=env_id))
    assert result.incidents == {}
    assert result.weights_sha256 == with_two[0]


def test_neither_the_order_of_arrival_nor_an_actor_killed_in_a_segment_shows(
    with_two: tuple[str, list[str]], tmp_path: Path
) -> None:
    delayed = {"env_id": "slow_worlds:delayed_pendulum", "env_kwargs": {"longest_s": 0.005}}
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)):
        result = dppo.train(run_settings(tmp_path / "run", num_actors=3, num_learners=2, **delayed))
    assert result.incidents == {"actor_lost": 1}
    assert result.weights_sha256 == with_two[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_learner_lost_in_the_middle_of_an_update_is_counted_and_does_not_show(
    number: int, with_two: tuple[str, list[str]], tmp_path: Path
) -> None:
    recorder = Recorder()
    with in_the_middle_of_an_update(send(number)):
        result = dppo.train(run_settings(tmp_path / "run", num_actors=1, num_learners=2), progress=recorder)
    assert result.incidents == {"learners_rebuilt": 1}
    assert result.metrics[-1]["incidents/learners_rebuilt"] == 1
    assert any(note.startswith("learners are back after ") for note in recorder.notes)
    assert result.weights_sha256 == with_two[0]


def test_a_run_with_two_learners_goes_on_with_two_exactly_and_with_none_as_well(
    with_two: tuple[str, list[str]], tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    two = {"num_actors": 1, "num_learners": 2}
    stopped = dppo.train(run_settings(run, **two), progress=Recorder(stop_after=2))
    assert stopped.iterations == 2
    shutil.copytree(run, copy)
    assert dppo.train(run_settings(run, **two), resume=run).weights_sha256 == with_two[0]
    recorder = Recorder()
    resumed = dppo.train(run_settings(copy), resume=copy, progress=recorder)
    assert resumed.iterations == ITERATIONS
    assert resumed.weights_sha256 != with_two[0]
    assert any(
        re.match(r"num_learners=0 instead of 2: .*differ.* in rounding or order", note) for note in recorder.notes
    )


def test_a_run_without_learners_goes_on_with_two(tmp_path: Path, in_process: str) -> None:
    run = tmp_path / "run"
    dppo.train(run_settings(run), progress=Recorder(stop_after=2))
    before = checkpoints.load(checkpoints.find(run).path)
    recorder = Recorder()
    resumed = dppo.train(run_settings(run, num_actors=1, num_learners=2), resume=run, progress=recorder)
    assert resumed.iterations == ITERATIONS
    assert any(note.startswith("num_learners=2 instead of 0: ") for note in recorder.notes)
    after = checkpoints.load(checkpoints.find(run).path)
    for stem, arrays in before.arrays.items():  # nothing in it tells how many learners there were
        found = {name: (array.shape, array.dtype) for name, array in after.arrays[stem].items()}
        if stem != "samplers":  # whose open episodes have other lengths
            assert found == {name: (array.shape, array.dtype) for name, array in arrays.items()}
        assert found.keys() == arrays.keys()


@pytest.mark.slow
def test_four_learners_keep_the_promise_too(tmp_path: Path) -> None:
    four = [run_settings(tmp_path / str(actors), num_actors=actors, num_learners=4) for actors in (1, 3)]
    assert len({dppo.train(config).weights_sha256 for config in four}) == 1


# ------------------------------------------------------------------ past the driver


def peak_growth_mb(work: Callable[[], object]) -> float:
    """By how much this process's memory grew at most, shared pages that it touched included."""

    def status(name: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_large_segments_do_not_pass_through_the_driver(tmp_path: Path) -> None:
    steps = 192
    batch_mb = 4 * steps * 2**15 * 4 / 2**20
    common = {"env_id": "wide_worlds:wide", "num_steps": steps, "num_actors": 2, "num_samplers": 4}
    common |= {"hidden_sizes": (4,), "norm_obs": False, "update_epochs": 1, "total_timesteps": 4 * steps}
    growth = {}
    for learners in (2, 0):
        config = run_settings(tmp_path / str(learners), num_learners=learners, **common)
        growth[learners] = peak_growth_mb(lambda config=config: dppo.train(config))
    assert growth[2] < batch_mb, growth  # what this process imports meanwhile
    assert growth[0] > 2 * batch_mb, growth  # which shows that it can be seen
