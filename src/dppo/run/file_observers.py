"""The observers that write the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from dppo.envs.names import solved_at
from dppo.plugins import plugin
from dppo.records.baseline_note import BaselineNote
from dppo.records.clone_note import CloneNote
from dppo.records.files.episode_writer import EpisodeWriter
from dppo.records.files.run_files import EPISODES, METRICS, TRACE
from dppo.records.metrics.reading import Row, read_metrics
from dppo.records.metrics.tensorboard import TensorBoard
from dppo.records.metrics.writer import MetricsWriter, cut_rows
from dppo.records.notes import LearningNotes
from dppo.records.observer import Observer
from dppo.records.outside import FileWriter, OnDisk
from dppo.run.outputs import call_disk
from dppo.run.parts import RunContext


def file_observers(context: RunContext, rows: Sequence[Row]) -> list[Observer]:
    """Return the observers of the files of a run with these earlier `rows`, in the order in which they are called."""
    observers: list[Observer] = []
    for name, factory in _factories(context, rows):
        observer = call_disk(context.disk, f"opening {name}", factory)
        if isinstance(observer, FileWriter):
            observer = OnDisk(observer, context.disk, name)
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


def _factories(
    context: RunContext, rows: Sequence[Row]
) -> Iterator[tuple[str, Callable[[], FileWriter | Observer]]]:
    """Yield name and factory of each observer of this run; a factory runs in the thread of the disk."""
    config = context.config
    learner = context.parts.learner
    path = context.folder.path
    yield METRICS, partial(MetricsWriter, path / METRICS)
    last_step = max((int(row["global_step"]) for row in rows), default=0)
    seconds_since = context.stop.seconds_since
    yield ("the events of TensorBoard", partial(TensorBoard, path, last_step + 1, seconds_since))
    trace = context.parts.trace
    if trace is not None:
        yield TRACE, partial(MetricsWriter, path / TRACE, trace)
    if config.record_episodes != "none":
        yield (
            EPISODES,
            partial(
                EpisodeWriter,
                path,
                config,
                learner.ledger.actions_before,
                lambda: learner.reports,
                learner.episodes,
            ),
        )
    solved = solved_at(config.env_name)
    yield "notes on learning", partial(LearningNotes, config, context.actions, rows, solved)
    if config.prior is not None:
        yield "the note on a clone", partial(CloneNote, config, learner.iteration)
    if config.baseline is not None:
        yield "the note on a baseline", partial(BaselineNote, config, rows)
    title = f"{config.env_name}, seed {config.seed}"
    yield "learning_curve.png", lambda: plugin("learning_curve")(title)
