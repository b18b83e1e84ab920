"""Whole runs with learners on Ray: the promise for each number of them, checkpoints, and what passes the driver by."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disturbance import Disturbance, in_the_middle_of_an_update, send
from recorder import Notes, Recorder

import dppo
from dppo.config import make_config
from dppo.records import checkpoint as checkpoints

pytestmark = pytest.mark.usefixtures("ray_session")
ITERATIONS = 4


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
    run = tmp_path_factory.mktemp("with_two") / "run"
    with Notes() as notes:
        result = dppo.train(run_settings(run, num_actors=1, num_learners=2))
    assert result.incidents == {}
    return result.weights_sha256, notes.texts


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
    with in_the_middle_of_an_update(send(number)), Notes() as notes:
        recorder = Recorder()
        result = dppo.train(run_settings(tmp_path / "run", num_actors=1, num_learners=2), observers=[recorder])
    assert result.incidents == {"learners_rebuilt": 1}
    assert [incident.kind for incident in recorder.incidents] == ["learners_rebuilt"]
    assert result.metrics[-1]["incidents/learners_rebuilt"] == 1
    assert any(note.startswith("learners are back after ") for note in notes.texts)
    assert result.weights_sha256 == with_two[0]


def test_a_run_with_two_learners_goes_on_with_two_exactly_and_with_none_as_well(
    with_two: tuple[str, list[str]], tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    two = {"num_actors": 1, "num_learners": 2}
    stopped = dppo.train(run_settings(run, **two), observers=[Recorder(interrupt_at=2)])
    assert stopped.iterations == 2
    shutil.copytree(run, copy)
    assert dppo.train(run_settings(run, **two), resume=run).weights_sha256 == with_two[0]
    with Notes() as notes:
        resumed = dppo.train(run_settings(copy), resume=copy)
    assert resumed.iterations == ITERATIONS
    assert resumed.weights_sha256 != with_two[0]
    assert any(
        re.match(r"num_learners=0 instead of 2: .*differ in rounding or in their order", note) for note in notes.texts
    )


def test_a_run_without_learners_goes_on_with_two(tmp_path: Path, in_process: str) -> None:
    run = tmp_path / "run"
    dppo.train(run_settings(run), observers=[Recorder(interrupt_at=2)])
    before = checkpoints.load(checkpoints.find(run).path)
    with Notes() as notes:
        resumed = dppo.train(run_settings(run, num_actors=1, num_learners=2), resume=run)
    assert resumed.iterations == ITERATIONS
    assert any(note.startswith("num_learners=2 instead of 0: ") for note in notes.texts)
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
        growth[learners] = peak_growth_mb(partial(dppo.train, config))
    assert growth[2] < batch_mb, growth  # what this process imports meanwhile
    assert growth[0] > 2 * batch_mb, growth  # which shows that it can be seen
