"""Slots: the cores and ranks of one environment, on which it starts its program."""

import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

from dppo.log import logger
from dppo.slots.cores import Lease
from dppo.slots.launchers import OF_LAUNCHERS, OF_SLURM, launcher_words, without
from dppo.slots.layout import PLAIN, Layout
from dppo.slots.node import MARK, NodeLease
from dppo.slots.program import GUARD, Program, SolverError

Restarting = Callable[[str], AbstractContextManager[Callable[[], None]]]
"""As `Slots.restarting`."""


@contextmanager
def log_restart(reason: str) -> Iterator[Callable[[], None]]:
    """Log that a program is started again."""
    logger.warning("%s", reason)
    yield lambda: None


class Slots:
    """Ranks of an environment and the cores of each rank, passed to a factory as its parameter `slots`."""

    def __init__(
        self,
        layout: Layout = PLAIN,
        sampler_id: int = 0,
        env_index: int = 0,
        restarting: Restarting = log_restart,
    ) -> None:
        """Lease the cores; raise NoCores if too few are free on this machine."""
        self.restarting = restarting
        """Returns a context in which the program is started again within a reset or step, for a reason that the run
        reports and counts. It has the time limit of a constructor, from the last call of the function that it yields.
        """
        self.layout = layout
        self.sampler_id = sampler_id
        self.env_index = env_index
        self._mark = f"dppo-slots-{secrets.token_hex(16)}"
        self._folders = set[str]()  # folders that the other nodes have until `close`
        share = layout.cores // max(1, len(layout.nodes))
        with ExitStack() as stack:
            self._lease = Lease(share)
            stack.callback(self._lease.close)
            self._elsewhere = [
                stack.enter_context(closing(NodeLease(node, share, self._mark)))
                for node in layout.nodes[1:]
            ]
            self._leases = stack.pop_all()

    @property
    def hosts(self) -> list[str]:
        """The host name of each rank."""
        names = [node.host for node in self.layout.nodes] or [os.uname().nodename]
        return [name for name in names for _ in range(self.layout.ranks_per_node)]

    @property
    def cores(self) -> list[list[int]]:
        """The ids of the cores of each rank, empty if ranks have none of their own."""
        cores = [*self._lease.cores]
        for lease in self._elsewhere:
            cores += lease.cores
        per_rank = self.layout.cores // self.layout.ranks
        return [cores[rank * per_rank : (rank + 1) * per_rank] for rank in range(self.layout.ranks)]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that start the ranks of a program here, each bound to its cores.

        `launch` also starts and watches them. Raise SolverError if there is no launcher.
        """
        if self.layout.is_plain:
            return [*words]
        texts = [",".join(map(str, cores)) for cores in self.cores]
        bound = ":".join(texts) if self.layout.cores else ""
        guarded = [sys.executable, "-I", "-S", GUARD, "rank", bound, "--", *words]
        if self.layout.ranks == 1:
            return guarded
        return [*launcher_words(self.layout, os.environ), *guarded]

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
            as_it_is: the words begin with a launcher, so that none is added and no rank is bound.

        Raises:
            SolverError: the program or the launcher cannot be started.
        """
        words = shlex.split(words) if isinstance(words, str) else [*words]
        if not words:
            raise SolverError("command=[]: is empty, and cannot be started")
        variables = {**os.environ}
        if self.layout.ranks > 1:
            variables = without(variables, OF_LAUNCHERS)
            if not as_it_is:
                variables = without(variables, OF_SLURM)
                variables["DPPO_RANKS"] = str(self.layout.ranks)
        if self.layout.cores:
            variables["OMP_NUM_THREADS"] = str(self.layout.cores_per_rank)
        elif self.layout.ranks > 1:
            # ranks that wait leave the core to others, also in dppo.h
            variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
            variables["DPPO_NAP"] = "1"
        variables |= {**(env or {})}
        started = words if as_it_is else self.command(words)
        folder = os.path.abspath(cwd)
        if not self._elsewhere:
            return Program(started, folder, variables, self._lease.handles)
        if folder not in self._folders:
            for node in self.layout.nodes[1:]:
                self._leases.enter_context(closing(NodeLease(node, 0, self._mark, folder)))
            self._folders.add(folder)
        variables[MARK] = self._mark
        return Program(
            started, folder, variables, self._lease.handles, self.layout.nodes[0].address
        )

    def __deepcopy__(self, memo: object) -> "Slots":
        """Return the slots themselves: a copy of their environment has no cores of its own."""
        return self

    def close(self) -> None:
        """Give the cores back; cores of a program that still runs are free when it has ended."""
        self._leases.close()
