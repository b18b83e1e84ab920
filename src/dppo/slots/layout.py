"""Layout: how many ranks an environment starts, and the cores of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CORES_REMEDY = (
    "Lower `ranks_per_env`, `cores_per_rank`, or `num_samplers`, which makes the batch smaller; or use "
    "`cores_per_rank=0`, with which ranks share cores."
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node on which an environment has ranks."""

    host: str
    """Its host name."""
    address: str
    """Its address in the network of the cluster."""
    slurm_name: str = ""
    port: int = 0
    """Port of its server; 0 for the node of the environment itself."""
    secret: str = field(default="", repr=False)
    """The server's secret."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of the program of an environment."""

    ranks: int = 1
    cores_per_rank: int = 1
    """0: ranks share the cores of the machine, and are not bound."""
    nodes: tuple[Node, ...] = ()
    """The nodes of the ranks, which have as many each; the first is that of the environment. Empty: one node."""

    @classmethod
    def by_names(cls, settings: Mapping[str, Any]) -> "Layout":
        """Make a layout on one node from settings; those that are missing have their defaults."""
        return cls(settings.get("ranks_per_env", 1), settings.get("cores_per_rank", 1))

    @property
    def is_plain(self) -> bool:
        """True for a program of one rank without cores of its own, as if there were no layout."""
        return self.ranks == 1 and self.cores_per_rank <= 1

    @property
    def cores(self) -> int:
        """Cores that an environment has to itself."""
        if self.is_plain:
            return 0
        return self.ranks * self.cores_per_rank

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // max(1, len(self.nodes))

    def __str__(self) -> str:
        return f"ranks_per_env={self.ranks} x cores_per_rank={self.cores_per_rank}"


PLAIN = Layout()
