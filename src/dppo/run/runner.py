"""One training run from start to finish: build the parts, iterate, report, save, stop."""

import concurrent.futures.thread  # noqa: F401  its at-fork hooks must not be registered in the middle of a fork of Ray's
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from signal import SIGINT

from dppo.config import Config, plain_settings
from dppo.config.arguments import with_answers
from dppo.errors import CheckpointError, CheckpointNotWritten, EnvironmentFault
from dppo.log import logger
from dppo.plugins import plugin
from dppo.ppo.exchange.records import Incident, IncidentKind, SegmentReport
from dppo.process_state.borders import dppo_computes, forget_notes
from dppo.records import run_lines
from dppo.records.bottleneck import MIN_ADVICE_S, TimeSplit, bottleneck_line, times_line
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files import run_folder
from dppo.records.files.episodes import EpisodeWriter, IncidentWriter
from dppo.records.files.run_folder import RunFolder
from dppo.records.instance_lines import instances_line
from dppo.records.metrics.writer import MetricsWriter
from dppo.records.notes import LearningNotes
from dppo.records.observer import Observer, Result
from dppo.records.observers import Observers
from dppo.records.outside import OnDisk, OutsideThread
from dppo.records.terminal.plain import make_display
from dppo.run import outputs
from dppo.run.building import Parts, build
from dppo.run.evaluations import Evaluations, chosen_of
from dppo.run.iteration_row import MeasuredRow, iteration_row, mean_return
from dppo.run.learner import Iteration
from dppo.signals import StopRequested, StopSignals
from dppo.spaces.actions import actions_from_json

MIN_EPISODES = 20  # a checkpoint has a score from here on: fewer may be luck, and the best one is kept for ever


@with_answers
@dppo_computes()
def train(
    config: Config,
    *,
    resume: str | Path | None = None,
    branch: bool = False,
    observers: Sequence[Observer] = (),
) -> Result:
    """Train one policy and write a run folder.

    Args:
        config: all settings, checked: `dppo.Config(env_id=...)`.
        resume: the folder of a run, or one of its checkpoints, to continue exactly, in that folder. `config` must equal
            that run's, except for settings that do not change the result; `run_dir` may be left out. "auto": the run in
            `config.run_dir`, or a new one there.
        branch: start a new run in `config.run_dir` instead, with the weights, the optimizer state and the normalizers
            of `resume`. Counters start at zero and episodes start anew. The network's shape and the normalization
            must stay the same; other settings may change.
        observers: watch the run, and may stop it. They are called in addition to the display of `config.progress`.

    Returns:
        The result, also of a run that a signal or an observer stopped.

    Raises:
        ConfigError: an invalid setting, environment or cluster, detected before training starts.
        CheckpointError: there is no good checkpoint to resume from.
        CheckpointNotWritten: a checkpoint could not be written, for example because the disk is full.
        EnvironmentFault: the environment raised; carries the user's traceback.
        ClusterError: Ray cannot be reached, or too many processes were lost.
        TrainingDiverged: a loss or gradient is not finite.
        OutOfMemory, GPUFailed: an update does not fit into memory, or its GPU has failed.
    """
    began = time.monotonic()
    outputs.check_is_config(config)
    forget_notes()
    outputs.check_code(config)
    display = make_display(config.progress)
    notify = outputs.shown_at_once(display)
    stop = StopSignals(lambda text: watching.note(text))  # noqa: PLW0108  it is made below
    watching = Observers(display, [*observers, *plugin("trackers")(config, notify, stop.seconds_since)])
    disk = OutsideThread("the disk of the run folder", notify=notify, since_signal=stop.seconds_since)
    with ExitStack() as stack:
        folder = stack.enter_context(outputs.opened(run_folder.open_run(config, resume, branch=branch), disk))
        try:
            with stop:
                incidents = IncidentWriter(folder.path, config)  # a constructor may fail before training
                watching.add_file(OnDisk(incidents, disk, "incidents"))
                watching.prepare(run := outputs.described(config, folder), outputs.starting_line(config))
                stop.add_check(watching.start_if_due)
                parts = build(config, folder, stop, stack, watching.progress)
                parts.learner.env_options = partial(getattr, run.options, "now")
                watching.start()
                run.options.fixed = False
                return Run(config, folder, watching, parts, disk, began).go(stop)
        except StopRequested as request:  # before training started: there is nothing to save
            interrupted = KeyboardInterrupt() if request.signal is SIGINT else SystemExit(128 + request.signal)
            watching.end(None, interrupted)  # as Python ends by default
            raise interrupted from None
        except BaseException as error:
            watching.end(None, error)
            raise


class Run:
    """Drives the parts of one run: iterates, reports, saves, ends."""

    def __init__(
        self, config: Config, folder: RunFolder, watching: Observers, parts: Parts, disk: OutsideThread, began: float
    ) -> None:
        self.config = config
        self.folder = folder
        self.watching = watching
        self.parts = parts
        self.learner = parts.learner
        self.disk = disk
        self.began = began
        self.resumed_at, self.steps_before = parts.learner.iteration, parts.learner.global_step
        self.flushed: list[MetricsWriter | EpisodeWriter] = []
        self.reports: list[SegmentReport] = []  # of the last iteration
        self.last_checkpoint = folder.start.path.absolute() if folder.start else folder.path
        self.save_failed = False
        self.saved_iteration = self.resumed_at if folder.start and folder.start.newest else -1
        self.training_began = self.ended = self.saved = time.monotonic()
        self.time_split = TimeSplit()
        self.row_of = MeasuredRow(config.info_keys) if config.info_keys else iteration_row
        self.evaluations: Evaluations | None = None

    def go(self, stop: StopSignals) -> Result:
        """Train until all steps are done or a stop is requested; write a checkpoint in any case."""
        self._save()  # before the first segment and before rows are cut off, so that a kill at any time can be resumed
        numerics = self.parts.numerics.own.summary()
        writing = partial(self.folder.write_settings, self.config, numerics, self.parts.choices)
        outputs.saved(self.disk, "writing config.yaml", writing)
        try:
            self._open_files(stop)
            stopped_by = self._iterate(stop)
            if self.evaluations is not None and self.evaluations.finish():
                self.saved_iteration = -1  # write the checkpoint with the results
                if self.evaluations.state()["open"] and stop.received is not None:
                    stopped_by = stop.received.name
            self._save(last=True)
        except BaseException as error:
            if isinstance(error, EnvironmentFault):
                error.place = self.learner.env_faults.completed(error.place)
                error.message += instances_line(self.config, error.place)
            self._save_after(error)
            self.watching.end(self._result(type(error).__name__), error)
            raise
        result = self._result(stopped_by)
        self.watching.end(result, None)
        return result

    def _open_files(self, stop: StopSignals) -> None:
        """Open the files of the run, and add them to the observers; begin evaluations again that were not over."""
        parts, resumed_at = self.parts, self.resumed_at if self.folder.start else None
        opening = partial(
            outputs.open_row_files, self.folder.path, resumed_at, self.config, parts, lambda: self.reports
        )
        files = outputs.saved(self.disk, "opening metrics.jsonl", opening)
        self.flushed = files.flushed
        if parts.players is not None:
            beginning = partial(Evaluations, self, parts.players, stop)
            self.evaluations = outputs.saved(self.disk, "reading evaluations", beginning)
        for observer in outputs.file_observers(files, self.folder.path, self.disk, stop.seconds_since):
            self.watching.add_file(observer)
        self.watching.add_file(LearningNotes(self.config, actions_from_json(parts.model["actions"]), files.rows))
        curve = plugin("learning_curve")(f"{self.config.env_name}, seed {self.config.seed}")
        self.watching.add_file(OnDisk(curve, self.disk, "learning_curve.png"))

    def _iterate(self, stop: StopSignals) -> str | None:
        """Iterate until all steps are done; return the name of the signal or observer that stopped the run early."""
        self.training_began = self.ended = self.saved = time.monotonic()
        try:
            for iteration in self.learner.run(self.config.iterations, stop):
                stopped_by = self._report(iteration)
                if stopped_by is not None and iteration.number < self.config.iterations:
                    return stopped_by
        except StopRequested as request:
            name, number = request.signal.name, self.learner.iteration + 1  # a resumed run makes it anew, equally
            logger.warning("%s: iteration %d is dropped, those before it are saved", name, number)
            return name
        return None

    def _report(self, iteration: Iteration) -> str | None:
        """Report an iteration to the observers, save if it is time; return the observer that asks to stop."""
        iteration_s, self.ended = iteration.ended - self.ended, iteration.ended
        of_call = {"time/wall_s": self.ended - self.began, "time/training_s": self.ended - self.training_began}
        of_call["charts/SPS"] = (self.learner.global_step - self.steps_before) / of_call["time/training_s"]
        row = self.row_of(iteration, self.learner, iteration_s, of_call)
        if iteration.number > self.resumed_at + 1:
            self.time_split = self.time_split.plus(row)
        self.reports = iteration.collected.reports
        if iteration.number == self.resumed_at + 1 and any(report.carry.states is not None for report in self.reports):
            logger.info("%s", run_lines.own_state_line(self.config))
        episodes = [episode for report in self.reports for episode in report.episodes]
        for observer in self.watching:
            for incident in iteration.incidents:  # already logged
                observer.on_incident(incident)
            for episode in episodes:
                observer.on_episode(episode)
        stopped_by = self.watching.iteration(row)
        if self.evaluations is not None:
            stopped_by = self.evaluations.stopped_by or stopped_by
        if self.ended - self.saved >= self.config.checkpoint_interval_s:
            self.saved = self.ended
            self._save_if_possible()
        return stopped_by

    def _save(self, *, last: bool = False) -> None:
        """Write a checkpoint of the last finished iteration, unless it exists; the `last` may replace older ones."""
        if self.learner.iteration == self.saved_iteration:
            return
        arrays, state = self.learner.state()
        state |= {
            "config": plain_settings(self.config),
            **run_folder.of_this_process(),
            "numerics": asdict(self.parts.numerics),
            "branched_from": self.folder.branched_from,
            "model": self.parts.model,
        }
        evaluations = self.folder.start.checkpoint.state.get("evaluations") if self.folder.start else None
        evaluations = evaluations if self.evaluations is None else self.evaluations.state()
        state |= {} if evaluations is None else {"evaluations": evaluations}
        write = partial(
            checkpoints.save,
            self.folder.path / checkpoints.FOLDER,
            self.learner.iteration,
            checkpoints.Checkpoint(arrays, state),
            keep=self.config.keep_checkpoints,
            score=mean_return(self.learner.recent) if len(self.learner.recent) >= MIN_EPISODES else None,
            chosen=chosen_of(evaluations),
            make_room=last,
        )
        self.last_checkpoint = outputs.saved(self.disk, "writing a checkpoint", partial(self._after_rows, write))
        self.save_failed, self.saved_iteration = False, self.learner.iteration
        for observer in self.watching:
            observer.on_checkpoint(self.last_checkpoint)

    def _after_rows(self, write: Callable[[], Path]) -> Path:
        """Write a checkpoint, which must not be ahead of its rows; in the thread of the disk."""
        for file in self.flushed:
            file.flush()
        return write()

    def _save_if_possible(self) -> None:
        """Save; if that fails, log it and go on: the next interval tries again."""
        try:
            self._save()
        except CheckpointError as error:
            incident = Incident(IncidentKind.CHECKPOINT_FAILED, str(error))
            self.learner.count(incident)
            if self.evaluations is not None:
                self.evaluations.not_saved(self.learner.iteration)
            if not self.save_failed:
                logger.warning("%s Further failures are counted, not reported.", error)
            self.save_failed = True
            for observer in self.watching:
                observer.on_incident(incident)

    def _save_after(self, error: BaseException) -> None:
        """Save the last finished iteration after `error`; a failure to do so must not hide it."""
        if isinstance(error, CheckpointNotWritten):
            return
        try:
            self._save(last=True)
        except Exception as problem:
            logger.warning("iteration %d was not saved: %s", self.learner.iteration, problem)

    def _notes(self, *, advise: bool) -> Iterator[str]:
        if self.evaluations is not None:
            yield from self.evaluations.notes()
        yield from self.parts.collector.notes()
        if advise and self.parts.core_use is not None:
            yield from self.parts.core_use.notes()
        for observer in self.watching:
            yield from observer.closing_notes()

    def _result(self, stopped_by: str | None) -> Result:
        learner, training_s = self.learner, self.ended - self.training_began
        advise = training_s >= MIN_ADVICE_S
        return Result(
            env_name=self.config.env_name,
            run_dir=self.folder.path,
            checkpoint=self.last_checkpoint,
            iterations=learner.iteration,
            resumed_at=self.resumed_at,
            global_step=learner.global_step,
            episodes=learner.episodes,
            episodic_return=mean_return(learner.recent),
            wall_s=time.monotonic() - self.began,
            training_s=training_s,
            steps_per_s=(learner.global_step - self.steps_before) / training_s if training_s > 0 else math.nan,
            weights_sha256=learner.weights_sha256(),
            incidents=dict(learner.incidents),
            env_faults=dict(learner.env_faults.counts),
            stopped_by=stopped_by,
            model_name=self.config.model_name,
            wrapper_names=self.config.wrapper_names,
            times=times_line(self.time_split, self.config, self.parts.epochs, advise=advise),
            bottleneck=bottleneck_line(self.time_split, self.config) if advise else "",
            notes=tuple(self._notes(advise=advise)),
            config=self.config,
        )
