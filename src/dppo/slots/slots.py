"""Slots: the cores and ranks of one environment, on which it starts its program."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from dppo.slots.cores import Lease
from dppo.slots.launchers import launcher_words, without_launcher, without_shape
from dppo.slots.layout import PLAIN, Layout
from dppo.slots.program import GUARD, Program, SolverError


class Slots:
    """Ranks of an environment and the cores of each rank, passed to a factory as its parameter `slots`."""

    def __init__(self, layout: Layout = PLAIN, sampler_id: int = 0, env_index: int = 0) -> None:
        """Lease the cores; raise NoCores if too few are free on this machine."""
        self.layout = layout
        self.sampler_id = sampler_id
        self.env_index = env_index
        self._lease = Lease(layout.cores)

    @property
    def hosts(self) -> list[str]:
        """The host name of each rank."""
        return [os.uname().nodename] * self.layout.ranks

    @property
    def cores(self) -> list[list[int]]:
        """The ids of the cores of each rank, empty if ranks have none of their own."""
        cores = self._lease.cores
        each = self.layout.cores // self.layout.ranks
        return [cores[rank * each : (rank + 1) * each] for rank in range(self.layout.ranks)]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that start the ranks of a program here, each bound to its cores.

        `launch` starts them, and looks after them, too. Raise SolverError if there is no launcher.
        """
        if self.layout.is_plain:
            return [*words]
        texts = [",".join(map(str, cores)) for cores in self.cores]
        bound = ":".join(texts) if self.layout.cores else ""
        guarded = [sys.executable, "-I", "-S", GUARD, "rank", bound, "--", *words]
        if self.layout.ranks == 1:
            return guarded
        return [*launcher_words(self.layout.ranks, os.environ), *guarded]

    def launch(
        self,
        words: Sequence[str] | str,
        cwd: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        *,
        as_it_is: bool = False,
    ) -> Program:
        """Start a program on these slots, and return its handle.

        Args:
            words: the program with its arguments; a text is split as a shell does.
            cwd: its folder; what all ranks print is in `solver.log` there.
            env: variables that are added to the environment of this process.
            as_it_is: the words name a launcher already, so that none is added and no rank is bound.

        Raises:
            SolverError: the program or the launcher cannot be started.
        """
        words = shlex.split(words) if isinstance(words, str) else [*words]
        if not words:
            raise SolverError("command=[]: is empty, and cannot be started")
        variables = {**os.environ}
        if self.layout.ranks > 1:
            variables = without_launcher(variables)
            if not as_it_is:
                variables = without_shape(variables)
                variables["DPPO_RANKS"] = str(self.layout.ranks)
        if self.layout.cores:
            variables["OMP_NUM_THREADS"] = str(self.layout.cores_per_rank)
        elif self.layout.ranks > 1:
            # ranks that wait leave the core to others, also in dppo.h
            variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
            variables["DPPO_NAP"] = "1"
        started = words if as_it_is else self.command(words)
        return Program(
            started, os.path.abspath(cwd), {**variables, **(env or {})}, self._lease.handles
        )

    def close(self) -> None:
        """Give the cores back; cores of a program that still runs are free when it has ended."""
        self._lease.close()
