"""Ranks of real MPIs: they are bound, sleep while they wait, and end together; runs have the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from commandline import Command
from mpi import FAMILIES, compiled_fortran_heat, compiled_heat, ranks_of, use_mpi
from processes import wait_until
from test_remote import settings

import dppo
from dppo.machine import usable_cores
from dppo.remote import make
from dppo.slots import cores
from dppo.slots.cores import cores_here
from dppo.slots.layout import Layout
from dppo.slots.program import SolverError
from dppo.slots.slots import Slots

# into a file: Open MPI may print a part of a line between those of another rank
AFFINITY = "import os; open(f'cores-{os.getpid()}', 'w').write(str(os.sched_getaffinity(0)))"


@pytest.fixture(params=FAMILIES)
def mpi(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI, then MPICH; with locks of cores that no other test uses."""
    use_mpi(request.param, tmp_path, monkeypatch)
    monkeypatch.setattr(cores, "LOCK", f"dppo-{tmp_path}-{os.getpid()}")


@pytest.fixture
def heat(mpi: None, tmp_path: Path) -> str:
    return compiled_heat(tmp_path)


@pytest.mark.usefixtures("mpi")
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_each_rank_is_bound_to_its_own_core(tmp_path: Path) -> None:
    slots = Slots(Layout(2, 1))
    program = slots.launch([sys.executable, "-c", AFFINITY], tmp_path)
    program.terminate(wait_s=60)
    slots.close()
    bound = [file.read_text() for file in tmp_path.glob("cores-*")]
    expected = [str({core}) for core in cores_here()[:2]]
    assert sorted(bound) == sorted(expected)
    assert program.exit_codes == {0: 0, 1: 0}
    assert program.poll() == 0


@pytest.mark.usefixtures("mpi")
def test_a_rank_that_dies_is_named_and_the_others_end(tmp_path: Path) -> None:
    program = Slots(Layout(3, 0)).launch(["sleep", "1000"], tmp_path)
    wait_until(lambda: len(program.exit_codes) == 3)
    ranks = [psutil.Process(rank.pid) for rank in program.ranks.values()]
    os.kill(program.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: program.poll() is not None)
    end = program.end(wait_s=20)
    assert f"(rank 1 on {os.uname().nodename} by SIGKILL)" in end
    _, alive = psutil.wait_procs(ranks, timeout=0)
    assert alive == []


@pytest.fixture(params=["c", "fortran"])
def any_heat(request: pytest.FixtureRequest, mpi: None, tmp_path: Path) -> str:
    if request.param == "c":
        return compiled_heat(tmp_path)
    if None in (shutil.which("gfortran"), shutil.which("mpif90")):
        pytest.skip("no Fortran compiler")
    return compiled_fortran_heat(tmp_path)


def test_ranks_that_share_cores_sleep_while_the_policy_is_computed(
    any_heat: str, tmp_path: Path
) -> None:
    """A rank that is in MPI_Bcast never gives its core back by itself."""
    env = make([any_heat], scratch_dir=str(tmp_path), slots=Slots(Layout(2, 0)))
    env.reset(seed=1)
    observation, *_ = env.step(np.full(3, 0.5))
    assert observation.shape == (48,)

    waiting = [psutil.Process(pid) for pid in ranks_of(any_heat)]
    assert len(waiting) == 2

    def most_sleeps() -> int:
        return max(rank.num_ctx_switches().voluntary for rank in waiting)

    before = most_sleeps()
    wait_until(lambda: most_sleeps() > before + 50)
    env.close()
    assert not ranks_of(any_heat)


@pytest.mark.usefixtures("mpi")
def test_a_state_is_complete_when_every_rank_has_written_its_file(tmp_path: Path) -> None:
    command = [compiled_heat(tmp_path, restarts=True)]
    env = make(command, scratch_dir=str(tmp_path), slots=Slots(Layout(2, 0)))
    env.reset(seed=1)
    state = env.get_state()  # type: ignore[attr-defined]
    files = {path.name for path in state["restart"].iterdir()}
    env.close()
    assert files == {"0", "1"}


@pytest.mark.parametrize(("mpi", "other"), [("openmpi", "mpich")], indirect=["mpi"])
def test_a_solver_of_another_mpi_than_mpirun_is_an_error_that_says_so(
    heat: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its ranks takes itself for the only one."""
    use_mpi(other, tmp_path, monkeypatch)
    with pytest.raises(SolverError, match="MPI started each rank as a program of its own"):
        make([heat], scratch_dir=str(tmp_path), slots=Slots(Layout(2, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_command_that_names_its_launcher_trains_to_the_same_weights_with_and_without_actors(
    tmp_path: Path, heat: str
) -> None:
    command = ["mpirun", "--oversubscribe", "-n", "2", heat]
    alone = dppo.train(settings(tmp_path / "alone", command))
    spread = dppo.train(settings(tmp_path / "spread", command, num_actors=2))
    assert spread.weights_sha256 == alone.weights_sha256
    assert not ranks_of(heat)


@dataclass
class SignalsARank(dppo.Observer):
    """Sends a signal to a rank in the middle of a run."""

    program: str
    number: int

    def on_iteration(self, row: dict[str, float]) -> None:
        if row["iteration"] == 3:
            os.kill(ranks_of(self.program)[-1], self.number)


RANKS: dict[str, Any] = {
    "ranks_per_env": 2,
    "cores_per_rank": 0,  # on few cores
    "num_steps": 8,
    "total_timesteps": 96,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpi", "number", "changes"),
    [
        ("openmpi", 0, {"num_actors": 2}),
        ("openmpi", signal.SIGKILL, {}),
        ("openmpi", signal.SIGKILL, {"num_actors": 2}),
        ("openmpi", signal.SIGSTOP, {"num_actors": 2, "step_timeout_s": 15}),
        ("mpich", signal.SIGKILL, {"num_actors": 2}),
    ],
    indirect=["mpi"],
)
def test_ranks_of_mpi_lead_to_the_same_weights_when_one_is_killed_or_hangs(
    tmp_path: Path, heat: str, number: int, changes: dict[str, Any]
) -> None:
    alone = dppo.train(settings(tmp_path / "alone", [heat], **RANKS))
    config = settings(tmp_path / "disturbed", [heat], **RANKS, **changes)
    disturbed = dppo.train(config, observers=[SignalsARank(heat, number)])
    assert disturbed.weights_sha256 == alone.weights_sha256
    wait_until(lambda: not ranks_of(heat), 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpi", "num_actors"), [("openmpi", 0), ("openmpi", 2), ("mpich", 0)], indirect=["mpi"]
)
def test_no_rank_is_left_after_the_driver_is_killed(
    tmp_path: Path, heat: str, num_actors: int
) -> None:
    program = ["train", "dppo.remote:make", f"--env-kwargs={json.dumps({'command': [heat]})}"]
    sizes = f"--num-samplers 2 --ranks-per-env 2 --cores-per-rank 0 --num-actors {num_actors}"
    with Command([*program, *sizes.split()], tmp_path) as driver:
        driver.wait_until(lambda: len(ranks_of(heat)) == 4, 300)
        driver.send(signal.SIGKILL)
        wait_until(lambda: not ranks_of(heat), 10)
