"""The words that start ranks on their hosts, by the launcher of this machine."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

from dppo.slots.layout import Layout
from dppo.slots.program import GUARD, SolverError

VERSION_S = 10.0
# arguments with which Python runs the agent that stands in for ssh
AGENT = ["-I", "-S", GUARD, "agent"]
# characters at which launchers divide the words of an agent; quotes do not help
DIVIDERS = re.compile(r"[\s:]")
# variables of a launcher that has started this process; with them, a new launcher believes to be a part of it
OF_LAUNCHERS = ("OMPI_COMM_", "OMPI_UNIVERSE", "OMPI_APP", "PMIX_", "PMI_", "PRTE_", "HYDI_")
# variables of Slurm, from which srun would take the shape of the whole job for its step
OF_SLURM = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_MPI_TYPE")
# the interface by which ranks under srun find each other, for each family
INTERFACES = {"open-mpi": "pmix", "hydra": "pmi2"}


def launcher_words(layout: Layout, variables: Mapping[str, str]) -> list[str]:
    """Return the words before the program that start its ranks on their nodes, without binding them.

    Raise SolverError if there is no launcher.
    """
    ranks = layout.ranks
    path = variables.get("PATH")
    if "SLURM_JOB_ID" in variables and shutil.which("srun", path=path):
        shape = [f"--ntasks={ranks}", *_slurm_nodes(layout, variables), *_interface(variables)]
        if layout.cores == 0:
            # these ranks may share fewer cores than there are ranks
            shape.append("--overcommit")
        return ["srun", "--overlap", "--cpu-bind=none", "--kill-on-bad-exit=1", *shape]
    program = shutil.which("mpirun", path=path)
    if program is None:
        raise SolverError(
            f"ranks_per_env={ranks}: neither mpirun nor srun is in PATH. Install Open MPI or MPICH, load the module of "
            f"your cluster, or use `ranks_per_env=1`"
        )
    if layout.nodes:
        _check_agent(len(layout.nodes))
    addresses = [node.address for node in layout.nodes]
    hosts = ",".join(f"{address}:{layout.ranks_per_node}" for address in addresses)
    if _family(program) == "open-mpi":
        where = ["--host", hosts or f"localhost:{ranks}", "--bind-to", "none"]
        if hosts:
            agent = " ".join([sys.executable, *AGENT])
            where += ["--map-by", "slot", "--mca", "plm_rsh_agent", agent]
            where += ["--leave-session-attached"]  # a daemon ends with its agent
        return [program, "-n", str(ranks), *where]
    words = [program, "-launcher", "fork"]
    if hosts:
        # the only way to give a launcher arguments
        words = ["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={' '.join(AGENT)}", program]
        words += ["-launcher", "rsh", "-launcher-exec", sys.executable, "-hosts", hosts]
        words += ["-localhost", addresses[0]]
    return [*words, "-bind-to", "none", "-n", str(ranks)]


def _check_agent(num_nodes: int) -> None:
    for path in (sys.executable, GUARD):
        if DIVIDERS.search(path):
            raise SolverError(
                f"nodes_per_env={num_nodes}: mpirun starts {path} on the other nodes, and would divide it at a "
                f"space or colon. Install Python and dppo at a path without these, or use `nodes_per_env=1`"
            )


def _slurm_nodes(layout: Layout, variables: Mapping[str, str]) -> list[str]:
    """Return the options of srun for the nodes of the ranks, in the order of the ranks."""
    if not layout.nodes:
        node = variables.get("SLURMD_NODENAME") or os.uname().nodename
        return ["--nodes=1", f"--nodelist={node}"]
    names = [node.slurm_name for node in layout.nodes for _ in range(layout.ranks_per_node)]
    return ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]


def without(variables: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables without those that describe the launch of this process, or another step of Slurm."""
    return {
        name: value
        for name, value in variables.items()
        if name in KEPT_OF_SLURM or not name.startswith(prefixes)
    }


def _interface(variables: Mapping[str, str]) -> list[str]:
    """Return the option of srun without which ranks would not find each other, unless the user has chosen one."""
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
    if "open mpi" in version or "openrte" in version:
        return "open-mpi"
    return "hydra"
