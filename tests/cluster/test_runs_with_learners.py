"""Whole runs with learners on Ray: speed, other numbers of them, and the memory of the driver. See also matrix.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from recorder import Notes, Recorder, lasting

import dppo
from dppo.records.files import checkpoint as checkpoints

pytestmark = pytest.mark.usefixtures("ray_session")
ITERATIONS = 3
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


def shapes_of(run: Path) -> dict[tuple[str, str], Any]:
    """Return shape and dtype of each array of the last checkpoint; open episodes have any length."""
    checkpoint = checkpoints.load(checkpoints.find(run).path)
    return {
        (stem, name): None if stem == "samplers" else (array.shape, array.dtype)
        for stem, arrays in checkpoint.arrays.items()
        for name, array in arrays.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_a_run_is_resumed_with_another_number_of_learners(
    before: int, after: int, in_process: str, with_two: Weights, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def train(learners: int, **arguments: Any) -> dppo.Result:
        config = run_settings(run, num_actors=min(learners, 1), num_learners=learners)
        return dppo.train(config, **arguments)

    assert train(before, observers=[Recorder(interrupt_at=2)]).iterations == 2
    shapes = shapes_of(run)
    with Notes() as notes:
        resumed = train(after, resume=run)
    assert resumed.iterations == ITERATIONS
    assert resumed.weights_sha256 != (with_two[0] if before else in_process)

    line = f"num_learners={after} instead of {before}: .*by the order of rows"
    assert any(re.match(line, note) for note in notes.texts)
    assert shapes_of(run) == shapes


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
        "env_id": "worlds.simple:Wide",
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
