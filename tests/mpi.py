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


def use_mpi(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the mpicc and mpirun of a family into PATH, below `folder`; skip the test where there are none."""
    binaries = folder / name
    binaries.mkdir()
    for program in ("mpicc", "mpirun"):
        path = _path(program, name)
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


def compiled_heat(folder: Path) -> str:
    """Return the path of the heated bar, compiled by the mpicc in PATH."""
    program = str(folder / "heat")
    words = ["mpicc", "-O2", "-I", str(INCLUDE), str(HEAT), "-o", program, "-lm"]
    subprocess.run(words, check=True)
    return program


def ranks_of(program: str) -> list[int]:
    """Return the ranks of a program that run, without their guards and launchers."""
    found = subprocess.run(["pgrep", "-fx", program], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]
