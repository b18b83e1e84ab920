"""Instance: which of the environments of a run is made, and what for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dppo.envs.activity import ActivityRecord
from dppo.log import logger
from dppo.slots.layout import PLAIN, Layout


@dataclass(frozen=True, slots=True)
class Instance:
    """One environment of a run. A user's factory gets what it asks for by the names of its parameters."""

    sampler_id: int = 0
    env_index: int = 0
    """Index among the environments of the sampler."""
    seed: int = 0
    """Seed with which the sub-environments begin."""
    num_sub_envs: int = 0
    """Sub-environments that the environment has; 0: only a single environment is accepted."""
    max_steps: int | None = None
    """Steps after which episodes are truncated."""
    render_mode: str | None = None
    """Mode in which the environment is shown; None: not at all."""
    layout: Layout = PLAIN
    """Ranks of its program, and their cores."""
    progress: ActivityRecord = field(default_factory=ActivityRecord)
    """Activity of the process, which shows when the program is started again."""
    on_restart: Callable[[str], None] = logger.warning
    """Called with the reason for such a start."""

    def optional_arguments(self) -> dict[str, Any]:
        """Return what a factory gets for parameters of these names, whether they have default values or not."""
        return {"sampler_id": self.sampler_id, "env_index": self.env_index}

    def required_arguments(self) -> dict[str, Any]:
        """Return what a factory gets for parameters of these names that have no default values.

        An environment that is shown has its render_mode among its own arguments.
        """
        return {"render_mode": None, "num_envs": max(1, self.num_sub_envs), "seed": self.seed}

    @contextmanager
    def restarting(self, reason: str) -> Iterator[Callable[[], None]]:
        """Context in which the program is started again: see `Slots.restarting`."""
        self.on_restart(reason)
        with self.progress.restarting() as show:
            yield show


ANY_INSTANCE = Instance()
"""A single environment of which only the kind matters."""
