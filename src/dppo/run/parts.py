"""The parts of a run, and what is around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dppo.config import Config
from dppo.config.resolve import Choice
from dppo.engine.collector import Collector
from dppo.numerics.fingerprint import Expected
from dppo.records.files.run_folder import RunFolder
from dppo.records.observers import Observers
from dppo.records.outside import OutsideThread
from dppo.run.in_process_players import InProcessPlayers
from dppo.run.learner import PPOLearner
from dppo.signals import StopSignals
from dppo.spaces.actions import Actions, actions_from_json

if TYPE_CHECKING:
    from dppo.engine.actor_players import ActorPlayers
    from dppo.transports.ray.core_use import CoreUse


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run that the runner works with."""

    collector: Collector
    learner: PPOLearner
    model: dict[str, Any]
    """Spaces and network as JSON values, as checkpoints store them."""
    numerics: Expected
    """The last bits that every process must compute."""
    epochs: int | None
    """K of the updates."""
    choices: tuple[Choice, ...]
    """The defaults that depend on the task."""
    trace: Callable[..., dict[str, Any]] | None
    """Returns the line of trace.jsonl for a row of metrics; None if there is no such file."""
    players: InProcessPlayers | ActorPlayers | None
    """Plays the episodes of evaluations; None without evaluations."""
    core_use: CoreUse | None
    """Measures whether the cores are busy; None without a Ray that was started here."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run that is ready to train, as its loop, its checkpoints, its evaluations and its files need it."""

    config: Config
    folder: RunFolder
    observers: Observers
    parts: Parts
    disk: OutsideThread
    """The thread of the disk of the folder."""
    stop: StopSignals

    @property
    def actions(self) -> Actions:
        """The action space of the environments."""
        return actions_from_json(self.parts.model["actions"])
