"""Whole runs with learners on Ray: equal weights, lost processes, checkpoints, and the memory of the driver."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from processes import Disturbance, in_the_middle_of_an_update, send
from recorder import Notes, Recorder, lasting

import dppo
from dppo.records.files import checkpoint as checkpoints

pytestmark = pytest.mark.usefixtures("ray_session")
ITERATIONS = 3
DELAYED = {
    "env_id": "worlds.slow:delayed",
    "env_kwargs": {"world": "Pendulum-v1", "longest_s": 0.005},
}
Weights = tuple[str, list[str]]  # their SHA-256, and the lines that the run logged


def run_settings(run_dir: Path, **changes: Any) -> dppo.Config:
    """Normalize everything, so that statistics are exchanged, too; let actors share CPUs with the learners."""
    base = {
        "env_id": "Pendulum-v1",
        "num_samplers": 8,
        "num_steps": 120,
        "gamma": 0.9,
        "update_epochs": 20,
    }
    base |= {"norm_obs": True, "norm_reward": True, "total_timesteps": 8 * 120 * ITERATIONS}
    if changes.get("num_actors"):
        base |= {"cpus_per_actor": 0.5}
    return make_config(base | {"progress": "off", "run_dir": run_dir} | changes)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(run_settings(tmp_path_factory.mktemp("in_process") / "run")).weights_sha256


@pytest.fixture(scope="module")
def with_two(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Weights:
    """Return the weights of a run with two learners and one actor, and the lines that it logged."""
    run = tmp_path_factory.mktemp("with_two") / "run"
    with Notes() as notes:
        result = dppo.train(run_settings(run, num_actors=1, num_learners=2))
    assert lasting(result) == {}
    return result.weights_sha256, notes.texts


def test_one_learner_gives_the_same_weights_as_none(tmp_path: Path) -> None:
    short: dict[str, Any] = {"num_steps": 40, "total_timesteps": 8 * 40 * 2, "update_epochs": 2}
    none = dppo.train(run_settings(tmp_path / "none", **short))
    single = dppo.train(run_settings(tmp_path / "single", num_actors=1, num_learners=1, **short))
    assert single.weights_sha256 == none.weights_sha256


@pytest.mark.slow  # tests/cluster/test_ranks.py has two learners in the fast set
def test_two_learners_give_other_weights_and_log_how_fast_they_are(
    in_process: str, with_two: Weights
) -> None:
    sha, notes = with_two
    assert sha != in_process
    worth = [note for note in notes if note.startswith("2 learners, model of 8,963 parameters: ")]
    assert len(worth) == 1
    assert re.search(
        r"a minibatch of 64 rows takes \d+\.\d ms, \d+\.\d ms of it for the sum", worth[0]
    )
    assert re.search(
        r"(do not pay off here; num_learners=0 is faster|They are \d+\.\d times as fast)\.$",
        worth[0],
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_actors", [3, 8])
@pytest.mark.parametrize("world", [{}, DELAYED], ids=["at once", "delayed"])
def test_neither_actors_nor_the_order_of_arrival_change_the_weights(
    num_actors: int, world: dict[str, Any], with_two: Weights, tmp_path: Path
) -> None:
    result = dppo.train(
        run_settings(tmp_path / "run", num_actors=num_actors, num_learners=2, **world)
    )
    assert lasting(result) == {}
    assert result.weights_sha256 == with_two[0]


@pytest.mark.slow
def test_a_killed_actor_does_not_change_the_weights_of_two_learners(
    with_two: Weights, tmp_path: Path
) -> None:
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)):
        result = dppo.train(run_settings(tmp_path / "run", num_actors=3, num_learners=2, **DELAYED))
    assert lasting(result) == {"actor_lost": 1}
    assert result.weights_sha256 == with_two[0]


@pytest.mark.slow  # tests/cluster/test_ranks.py kills a rank in the fast set
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_learner_is_counted_and_changes_no_weights(
    number: int, with_two: Weights, tmp_path: Path
) -> None:
    recorder = Recorder()
    with in_the_middle_of_an_update(send(number)), Notes() as notes:
        result = dppo.train(
            run_settings(tmp_path / "run", num_actors=1, num_learners=2), observers=[recorder]
        )
    assert lasting(result) == {"learners_rebuilt": 1}
    assert "learners_rebuilt" in [incident.kind for incident in recorder.incidents]
    assert result.metrics[-1]["incidents/learners_rebuilt"] == 1
    assert any(note.startswith("learners are back after ") for note in notes.texts)
    assert result.weights_sha256 == with_two[0]


@pytest.mark.slow
def test_a_run_with_two_learners_resumes_with_two_exactly_and_with_none(
    with_two: Weights, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copy = tmp_path / "copy"
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
        re.match(r"num_learners=0 instead of 2: .*by the order of rows", note)
        for note in notes.texts
    )


@pytest.mark.slow
def test_a_run_without_learners_can_be_resumed_with_two(tmp_path: Path, in_process: str) -> None:
    run = tmp_path / "run"
    dppo.train(run_settings(run), observers=[Recorder(interrupt_at=2)])
    before = checkpoints.load(checkpoints.find(run).path)
    with Notes() as notes:
        resumed = dppo.train(run_settings(run, num_actors=1, num_learners=2), resume=run)
    assert resumed.iterations == ITERATIONS
    assert any(note.startswith("num_learners=2 instead of 0: ") for note in notes.texts)
    after = checkpoints.load(checkpoints.find(run).path)
    for stem, arrays in before.arrays.items():  # it does not depend on the number of learners
        shapes = {name: (array.shape, array.dtype) for name, array in after.arrays[stem].items()}
        if stem != "samplers":  # open episodes have other lengths
            assert shapes == {name: (array.shape, array.dtype) for name, array in arrays.items()}
        assert shapes.keys() == arrays.keys()


def memory_mb(name: str) -> float:
    """Return a figure of this process, including shared pages that it touched."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) / 1024


@pytest.mark.slow
def test_large_segments_do_not_pass_through_the_driver(tmp_path: Path) -> None:
    steps = 192
    batch_mb = 4 * steps * 2**15 * 4 / 2**20
    common = {
        "env_id": "worlds.simple:wide",
        "num_steps": steps,
        "num_actors": 2,
        "num_samplers": 4,
    }
    common |= {
        "hidden_sizes": (4,),
        "norm_obs": False,
        "update_epochs": 1,
        "total_timesteps": 4 * steps,
    }
    growth = {}
    for learners in (2, 0):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory_mb("VmRSS")
        dppo.train(run_settings(tmp_path / str(learners), num_learners=learners, **common))
        growth[learners] = memory_mb("VmHWM") - before
    assert growth[2] < batch_mb, growth  # at most the modules imported meanwhile
    assert growth[0] > 2 * batch_mb, growth  # so the measurement can detect it
