"""Layout: how many ranks an environment starts, and the cores of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CORES_REMEDY = (
    "Lower `ranks_per_env`, `cores_per_rank`, or `num_samplers`, which makes the batch smaller; or use "
    "`cores_per_rank=0`, with which ranks share cores."
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of the program of an environment."""

    ranks: int = 1
    cores_per_rank: int = 1
    """0: ranks share the cores of the machine, and are not bound."""

    @classmethod
    def by_names(cls, settings: Mapping[str, Any]) -> "Layout":
        """Return the layout of settings, which may lack these."""
        return cls(settings.get("ranks_per_env", 1), settings.get("cores_per_rank", 1))

    @property
    def is_plain(self) -> bool:
        """True for a program of one rank without cores of its own, as if there were no layout."""
        return self.ranks == 1 and self.cores_per_rank <= 1

    @property
    def cores(self) -> int:
        """Cores that an environment has to itself."""
        return 0 if self.is_plain else self.ranks * self.cores_per_rank

    def __str__(self) -> str:
        return f"ranks_per_env={self.ranks} x cores_per_rank={self.cores_per_rank}"


PLAIN = Layout()
