"""RunContext: a run that is ready to train, as its evaluations and the observers of its files get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.records.observers import Observers
from dppo.records.outside import OutsideThread
from dppo.run.learner import PPOLearner
from dppo.signals import StopSignals
from dppo.spaces.actions import Actions


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts of a run that exist before its first iteration."""

    config: Config
    path: Path
    """The run folder."""
    learner: PPOLearner
    actions: Actions
    """The action space of the environments."""
    deterministic: bool
    """False if the environment is declared nondeterministic: a seed does not determine an episode."""
    trace: Callable[..., dict[str, Any]] | None
    """Returns the line of trace.jsonl for a row of metrics; None if there is no such file."""
    observers: Observers
    disk: OutsideThread
    stop: StopSignals
    rows: Sequence[dict[str, float]]
    """The rows of metrics.jsonl before this call."""
    resumed_from: dict[str, Any]
    """The values in the checkpoint that the run continues; {} for a new run."""
