"""Open MPI and MPICH of this machine, which Debian installs side by side, and the heated bar compiled for each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import dppo
from dppo.slots import launchers

FAMILIES = {"openmpi": "open-mpi", "mpich": "hydra"}
INCLUDE = Path(dppo.__file__).parent / "remote"
HEAT = Path(__file__).parents[1] / "examples" / "solvers" / "heat.c"
SAVES_LATE = """
    while (reply == DPPO_SAVE) {
      struct timespec late = {0, rank * 300000000};
      char path[4096];
      nanosleep(&late, NULL);
      snprintf(path, sizeof path, "mkdir -p '%s' && touch '%s/%d'", dppo_path(d), dppo_path(d), rank);
      if (system(path)) MPI_Abort(MPI_COMM_WORLD, 3);
      reply = dppo_step_all(d, bar, reward, end, power, MPI_COMM_WORLD);
    }
"""
# changes of heat.f90 that let all ranks compute the same
FOR_ALL_RANKS = {
    "  use dppo\n": "  use mpi\n  use dppo\n",
    "  integer :: interval,": "  integer :: error, interval,",
    "d = dppo_open(": "call MPI_Init(error)\n  d = dppo_open_all(",
    '"power[3](0:1)")': '"power[3](0:1)", MPI_COMM_WORLD)',
    "dppo_step(d, now(1:cells), reward, end, power)": (
        "dppo_step_all(d, now(1:cells), reward, end, power, MPI_COMM_WORLD)"
    ),
    "call dppo_close(d)": "call dppo_close(d)\n  call MPI_Finalize(error)",
}


def use_mpi(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the compilers and the mpirun of a family into PATH, below `folder`; skip the test where there are none."""
    binaries = folder / name
    binaries.mkdir()
    for program in ("mpicc", "mpif90", "mpirun"):
        path = _path(program, name)
        if path is None and program == "mpif90":  # tests in Fortran skip themselves
            continue
        if path is None:
            pytest.skip(f"no {program} of {name}")
        script = binaries / program
        script.write_text(f'#!/bin/sh\nexec {path} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(binaries), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(variable, "1")


def _path(program: str, name: str) -> str | None:
    if path := shutil.which(f"{program}.{name}"):
        return path
    launcher = shutil.which("mpirun")
    if launcher is None or launchers._family(launcher) != FAMILIES[name]:
        return None
    return shutil.which(program)


def compiled_heat(
    folder: Path, pause_ms: int = 0, substeps: int = 20, *, restarts: bool = False
) -> str:
    """Return the path of the heated bar, compiled by the mpicc in PATH.

    It sleeps so long in each step; with fewer substeps, ranks wait less often for each other. `restarts`: each rank
    writes a file of its own, which is empty, and rank 0 first.
    """
    source = folder / "heat.c"
    text = HEAT.read_text().replace("SUBSTEPS 20", f"SUBSTEPS {substeps}")
    assert "interval++;" in text
    pause = f"struct timespec pause = {{0, {pause_ms}000000}}; nanosleep(&pause, NULL);"
    if pause_ms:
        text = text.replace("interval++;", f"interval++; {pause}")
    if restarts:
        text = text.replace("DPPO_DOUBLE", "DPPO_DOUBLE | DPPO_RESTART")
        stops = "    if (reply == DPPO_STOP)"
        text = text.replace(stops, SAVES_LATE + stops)
    source.write_text(text)
    program = str(folder / "heat")
    words = ["mpicc", "-O2", "-I", str(INCLUDE), str(source), "-o", program, "-lm"]
    subprocess.run(words, check=True)
    return program


def compiled_fortran_heat(folder: Path) -> str:
    """Return the path of the heated bar in Fortran, of which each rank computes the whole, compiled for MPI."""
    source = folder / "heat.f90"
    changed = HEAT.with_suffix(".f90").read_text()
    for before, after in FOR_ALL_RANKS.items():
        assert before in changed
        changed = changed.replace(before, after)
    source.write_text(changed)
    header = ["-x", "c", "-include", "mpi.h", "-DDPPO_IMPLEMENTATION", str(INCLUDE / "dppo.h")]
    subprocess.run(["mpicc", "-c", *header, "-o", "dppo.o"], cwd=folder, check=True)
    program = str(folder / "heat")
    sources = [str(INCLUDE / "dppo_module.f90"), str(source)]
    subprocess.run(["mpif90", "-o", program, *sources, "dppo.o"], cwd=folder, check=True)
    return program


def ranks_of(program: str) -> list[int]:
    """Return the ranks of a program that run, without their guards and launchers."""
    answer = subprocess.run(["pgrep", "-fx", program], capture_output=True, text=True, check=False)
    return [int(pid) for pid in answer.stdout.split()]
