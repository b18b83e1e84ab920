"""The words that start ranks on their hosts, by the launcher of this machine."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

from dppo.slots.program import SolverError

VERSION_S = 10.0
# variables of a launcher that has started this process, from which a new one would take itself for a part of it
OF_LAUNCHERS = ("OMPI_COMM_", "OMPI_UNIVERSE", "OMPI_APP", "PMIX_", "PMI_", "PRTE_", "HYDI_")
# variables of Slurm, from which srun would take the shape of the job for that of its step
OF_SLURM = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_MPI_TYPE")
# the interface by which ranks under srun find each other, for each family
INTERFACES = {"open-mpi": "pmix", "hydra": "pmi2"}


def launcher_words(ranks: int, variables: Mapping[str, str]) -> list[str]:
    """Return the words before the program that start so many ranks on this host, without binding them.

    Raise SolverError if there is no launcher.
    """
    path = variables.get("PATH")
    if "SLURM_JOB_ID" in variables and shutil.which("srun", path=path):
        node = variables.get("SLURMD_NODENAME") or os.uname().nodename
        shape = [f"--ntasks={ranks}", "--nodes=1", f"--nodelist={node}", *_interface(variables)]
        return ["srun", "--overlap", "--cpu-bind=none", "--kill-on-bad-exit=1", *shape]
    program = shutil.which("mpirun", path=path)
    if program is None:
        raise SolverError(
            f"ranks_per_env={ranks}: neither mpirun nor srun is in PATH. Install Open MPI or MPICH, load the module of "
            f"your cluster, or use `ranks_per_env=1`"
        )
    if _family(program) == "open-mpi":
        here = ["--host", f"localhost:{ranks}", "--bind-to", "none"]
        return [program, "-n", str(ranks), *here]
    return [program, "-launcher", "fork", "-bind-to", "none", "-n", str(ranks)]


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that no launcher has set for this process."""
    return {name: value for name, value in variables.items() if not name.startswith(OF_LAUNCHERS)}


def without_shape(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of Slurm that describe another step."""
    return {
        name: value
        for name, value in variables.items()
        if name in KEPT_OF_SLURM or not name.startswith(OF_SLURM)
    }


def _interface(variables: Mapping[str, str]) -> list[str]:
    """Return the option of srun without which ranks would not find each other: where nobody has chosen one."""
    program = shutil.which("mpirun", path=variables.get("PATH"))
    if program is None or "SLURM_MPI_TYPE" in variables or not _is_none_by_default():
        return []
    return [f"--mpi={INTERFACES[_family(program)]}"]


@functools.cache
def _is_none_by_default() -> bool:
    """Return whether this Slurm has no interface of MPI by default, as it is after its installation."""
    try:
        answer = subprocess.run(
            ["scontrol", "show", "config"],
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return re.search(r"^MpiDefault\s*= none$", answer.stdout, re.MULTILINE) is not None


@functools.cache
def _family(program: str) -> Literal["open-mpi", "hydra"]:
    """Return the family of an mpirun: Open MPI, or Hydra (MPICH and its relatives)."""
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SolverError(
            f"{program} --version failed ({error}). Repair the MPI of this machine"
        ) from None
    version = answer.stdout.lower()
    return "open-mpi" if "open mpi" in version or "openrte" in version else "hydra"
