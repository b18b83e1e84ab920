"""The observers that write the files of a run: a table of names and factories."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dppo.envs.names import solved_at
from dppo.plugins import plugin
from dppo.records.baseline_note import BaselineNote
from dppo.records.clone_note import CloneNote
from dppo.records.files.episode_writer import EpisodeWriter
from dppo.records.files.run_files import EPISODES, METRICS, TRACE
from dppo.records.metrics.reading import read_metrics
from dppo.records.metrics.tensorboard import TensorBoard
from dppo.records.metrics.writer import MetricsWriter, cut_rows
from dppo.records.notes import LearningNotes
from dppo.records.observer import Observer
from dppo.records.outside import FileWriter, OnDisk
from dppo.run.context import RunContext
from dppo.run.outputs import call_disk

Factory = Callable[[RunContext], FileWriter | Observer | None]
"""Runs in the thread of the disk; a FileWriter writes there, too. Returns None if the settings do not ask for it."""


def file_observers(context: RunContext) -> list[Observer]:
    """Return the observers of the table that this run has, in the order in which they are called."""
    observers: list[Observer] = []
    for name, factory in FACTORIES:
        observer = call_disk(context.disk, f"opening {name}", partial(factory, context))
        if isinstance(observer, FileWriter):
            observer = OnDisk(observer, context.disk, name)
        if observer is not None:
            observers.append(observer)
    return observers


def cut_row_files(path: Path, last_iteration: int | None) -> list[dict[str, float]]:
    """Cut off the lines after the iteration from which a run in the folder `path` goes on; return its metrics.

    Raises a DppoError if a file cannot be written, or holds the rows of another run.
    """
    for name in (METRICS, TRACE, EPISODES):
        cut_rows(path / name, last_iteration)
    if (path / METRICS).exists():
        return read_metrics(path)
    return []


def _metrics(context: RunContext) -> FileWriter:
    return MetricsWriter(context.path / METRICS)


def _tensorboard(context: RunContext) -> Observer:
    last_step = max((int(row["global_step"]) for row in context.rows), default=0)
    return TensorBoard(context.path, last_step + 1, context.stop.seconds_since)


def _trace(context: RunContext) -> FileWriter | None:
    if context.trace is None:
        return None
    return MetricsWriter(context.path / TRACE, context.trace)


def _episodes(context: RunContext) -> FileWriter | None:
    if context.config.record_episodes == "none":
        return None
    learner = context.learner
    return EpisodeWriter(
        context.path,
        context.config,
        learner.ledger.actions_before,
        lambda: learner.reports,
        learner.episodes,
    )


def _learning_notes(context: RunContext) -> Observer:
    config = context.config
    return LearningNotes(config, context.actions, context.rows, solved_at(config.env_name))


def _clone_note(context: RunContext) -> Observer | None:
    if context.config.prior is None:
        return None
    return CloneNote(context.config)


def _baseline_note(context: RunContext) -> Observer | None:
    if context.config.baseline is None:
        return None
    return BaselineNote(context.config, context.rows)


def _learning_curve(context: RunContext) -> FileWriter:
    curve: FileWriter = plugin("learning_curve")(
        f"{context.config.env_name}, seed {context.config.seed}"
    )
    return curve


FACTORIES: list[tuple[str, Factory]] = [
    (METRICS, _metrics),
    ("the events of TensorBoard", _tensorboard),
    (TRACE, _trace),
    (EPISODES, _episodes),
    ("notes on learning", _learning_notes),
    ("the note on a clone", _clone_note),
    ("the note on a baseline", _baseline_note),
    ("learning_curve.png", _learning_curve),
]
