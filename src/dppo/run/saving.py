"""RunCheckpoints: writes the checkpoints of a run when they are due, and one at the end in any case."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dppo.config import plain_settings
from dppo.errors import CheckpointError, CheckpointNotWritten
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.row_sums import RowSums
from dppo.records.files.run_files import CHECKPOINTS
from dppo.records.files.run_folder import describe_process
from dppo.run import needed_states
from dppo.run.best_evaluation import evaluated_checkpoints
from dppo.run.evaluations import Evaluations
from dppo.run.iteration_row import mean_return
from dppo.run.outputs import call_disk
from dppo.run.parts import RunContext
from dppo.run.sources import stored_sources
from dppo.run.state import RunState

# fewest episodes of a score: a score of fewer may be luck, and the best checkpoint is kept for ever
MIN_EPISODES = 20


class RunCheckpoints:
    """Writes the state of a run to its folder."""

    def __init__(self, context: RunContext) -> None:
        self._config = context.config
        self._folder = context.folder
        self._parts = context.parts
        self._learner = context.parts.learner
        self._observers = context.observers
        self._disk = context.disk
        self.evaluations: Evaluations | None = None  # once they have been read
        self.row_sums: RowSums | None = None  # once the files with rows are open
        folder = context.folder
        self.last_path = folder.path
        self._sources = stored_sources(self._config)
        self._keep = checkpoints.Keep(*self._config.run.kept_checkpoints)
        self._saved_iteration = -1
        if folder.start is not None:
            self.last_path = folder.start.path.absolute()
            if folder.start.newest and self._is_described_by(folder.resumed_from):
                self._saved_iteration = self._learner.iteration
        self._has_failed = False
        self._saved_at = time.monotonic()

    def save(self, *, last: bool = False, overwrite: bool = False) -> None:
        """Write a checkpoint of the last finished iteration, unless it exists.

        Args:
            last: older checkpoints may be deleted to make room for it.
            overwrite: also if it exists: evaluations have ended since.
        """
        if self._learner.iteration == self._saved_iteration and not overwrite:
            return
        state = RunState.capture(self._learner)
        evaluations = self._evaluations_state()
        values = state.values | self._description()
        if evaluations is not None:
            values["evaluations"] = evaluations
        score = None
        if len(self._learner.recent) >= MIN_EPISODES:
            score = mean_return(self._learner.recent)
        folder = self._folder.path / CHECKPOINTS
        evaluated = evaluated_checkpoints(evaluations)
        write = partial(
            checkpoints.save,
            folder,
            self._learner.iteration,
            checkpoints.Checkpoint(state.arrays, values),
            keep=self._keep,
            score=score,
            evaluated=evaluated,
        )
        if last:
            write = partial(checkpoints.making_room, write, folder, evaluated)
        files = needed_states.names_in(state.arrays["samplers"])
        if files:
            name = checkpoints.file_name(self._learner.iteration)
            write = partial(needed_states.write_with_names, write, self._folder.path, name, files)
        self.last_path = call_disk(
            self._disk, "writing a checkpoint", partial(self._after_rows, write, values)
        )
        self._has_failed = False
        self._saved_iteration = self._learner.iteration
        for observer in self._observers:
            observer.on_checkpoint(self.last_path)

    def save_if_due(self, *, now: bool) -> None:
        """Save if the last checkpoint is old enough, or `now`; if that fails, log it: the next interval tries again.

        An iteration that `keep_checkpoints` keeps is saved in any case.
        """
        is_kept = self._keep.includes(self._learner.iteration)
        is_old = time.monotonic() - self._saved_at >= self._config.checkpoint_interval_s
        if not (now or is_kept or is_old):
            return
        self._saved_at = time.monotonic()
        try:
            self.save()
        except CheckpointError as error:
            self._count_failure(error)

    def _count_failure(self, error: CheckpointError) -> None:
        incident = Incident(IncidentKind.CHECKPOINT_FAILED, str(error))
        self._learner.count(incident)
        if self.evaluations is not None:
            self.evaluations.drop_unsaved(self._learner.iteration)
        if not self._has_failed:
            logger.warning("%s Further failures are counted, not reported.", error)
        self._has_failed = True
        for observer in self._observers:
            observer.on_incident(incident)

    def save_after(self, error: BaseException) -> None:
        """Save the last finished iteration after `error`; a failure to do so must not hide it."""
        if isinstance(error, CheckpointNotWritten):
            return
        try:
            self.save(last=True)
        except Exception as problem:
            logger.warning("iteration %d was not saved: %s", self._learner.iteration, problem)

    def _after_rows(self, write: Callable[[], Path], values: dict[str, Any]) -> Path:
        """Write a checkpoint, which must not be ahead of its rows, with their sums; in the thread of the disk."""
        self._observers.flush_files()
        if self.row_sums is not None:
            values["rows"] = self.row_sums.now()
        elif self._folder.start is not None:
            values["rows"] = self._folder.resumed_from.get("rows", {})
        return write()

    def _evaluations_state(self) -> Any:
        """Return the state of the evaluations; before they have been read, or without any, the one stored before."""
        if self.evaluations is not None:
            return self.evaluations.state()
        return self._folder.resumed_from.get("evaluations")

    def _is_described_by(self, stored: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint has these settings, versions and machine, as config.yaml is about to have."""
        description = json.loads(json.dumps(self._description()))
        return bool(description == {name: stored.get(name) for name in description})

    def _description(self) -> dict[str, Any]:
        """Return what describes the run: needed to open the checkpoint, not to compute the next iteration."""
        return {
            "config": plain_settings(self._config),
            **describe_process(),
            "numerics": asdict(self._parts.numerics),
            "branched_from": self._folder.branched_from,
            "model": self._parts.model,
            **self._sources,
        }
