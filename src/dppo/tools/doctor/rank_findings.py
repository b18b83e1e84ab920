"""Findings about the ranks of an environment's program: their cores, and how many environments fit this machine."""

from collections.abc import Iterator

from dppo.config import Config
from dppo.tools.doctor.speed import Facts


def _shared_cores(facts: Facts, config: Config) -> Iterator[str]:
    if facts["shared_cores"] and config.layout.cores:
        yield (
            f"its ranks are not bound to cores of their own: several may run on core {facts['shared_cores'][0]}. Start "
            f"them by `slots.launch`, without an mpirun of your own"
        )


def _environments_that_fit(facts: Facts, config: Config) -> Iterator[str]:
    if config.layout.cores:
        by_cores = facts["cpus"] // config.layout.cores
        by_memory = int(facts["available_mb"] // max(1.0, facts["env_mb"]))
        yield (
            f"{min(by_cores, by_memory)} environments of {config.layout} fit this machine: {by_cores} by its cores, "
            f"{by_memory} by its memory, {facts['env_mb']:,.0f} MB for all ranks of an environment"
        )


def _one_node(facts: Facts, config: Config) -> Iterator[str]:
    if config.nodes_per_env != 1:
        yield (
            f"nodes_per_env={config.nodes_per_env}: all ranks were started on this machine, so the times lack the "
            f"network between nodes"
        )


FINDINGS_ABOUT_RANKS = (
    ("warning", _shared_cores),
    ("note", _environments_that_fit),
    ("note", _one_node),
)
