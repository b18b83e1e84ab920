"""One training run from start to finish: build the parts, iterate, report, save, stop."""

import concurrent.futures.thread  # noqa: F401  its at-fork hooks must not be registered in the middle of a fork of Ray's
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT

from dppo.config import Config
from dppo.config.arguments import with_answers
from dppo.errors import EnvironmentFault, TooManyFaults
from dppo.log import logger
from dppo.plugins import plugin
from dppo.ppo.exchange.records import Incident
from dppo.process_state.borders import dppo_computes, separate_run
from dppo.records.bottleneck import (
    MIN_ADVICE_S,
    TimeSplit,
    bottleneck_line,
    times_line,
    times_of,
    usual_rows,
)
from dppo.records.files import run_folder
from dppo.records.files.incidents import IncidentWriter
from dppo.records.files.row_sums import RowSums
from dppo.records.instance_lines import instances_line
from dppo.records.metrics.reading import SAMPLED_ROWS, Row
from dppo.records.notes import LearningNotes
from dppo.records.observer import Observer, Result
from dppo.records.observer_checks import checked_observers
from dppo.records.observers import Observers
from dppo.records.outside import OnDisk, OutsideThread
from dppo.records.run_lines import own_state_line
from dppo.records.terminal.plain import make_display
from dppo.run import outputs
from dppo.run.building import build
from dppo.run.evaluation_pace import EvaluationPace
from dppo.run.evaluations import Evaluations
from dppo.run.file_observers import cut_row_files, file_observers
from dppo.run.iteration_row import TrainingTimes, mean_return, row_maker
from dppo.run.learner import Iteration
from dppo.run.needed_states import states_of_run
from dppo.run.outputs import call_disk
from dppo.run.parts import RunContext
from dppo.run.saving import RunCheckpoints
from dppo.signals import StopRequested, StopSignals, as_ending

TIMED_ROWS = SAMPLED_ROWS  # last iterations from which the usual times of an iteration follow, as in a report


@with_answers
@dppo_computes()
def train(
    config: Config,
    *,
    resume: Result | str | Path | None = None,
    branch: bool = False,
    observers: Sequence[Observer] = (),
) -> Result:
    """Train one policy and write a run folder.

    Args:
        config: all settings, checked: `dppo.Config(env_id=...)`.
        resume: the folder of a run, one of its checkpoints, or its result, to continue exactly, in that folder.
            `config` must equal that run's, except for settings that do not change the result; `run_dir` may be left
            out. "auto": the run in `config.run_dir`, or a new one there.
        branch: start a new run in `config.run_dir` instead, with the weights, the optimizer state and the normalizers
            of `resume`. Counters start at zero, and environments are reset. The network's shape and the normalization
            must stay the same; other settings may change.
        observers: objects that watch the run and may stop it, in addition to the display of `config.progress`.

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
    outputs.check_is_config(config)
    outputs.check_resume(resume, branch)
    if isinstance(resume, Result):
        resume = resume.run_dir
    return _run(config, resume, branch, checked_observers(observers))


@separate_run()
def _run(
    config: Config, resume: str | Path | None, branch: bool, observers: Sequence[Observer]
) -> Result:
    """Open the run folder, build the parts and train; the observers are ended however that ends."""
    times = TrainingTimes()
    outputs.check_code(config)
    display = make_display(config.progress)
    notify = outputs.notifier(display)
    stop = StopSignals(lambda text: watching.note(text))  # noqa: PLW0108  `watching` is created below
    watching = Observers(
        display, [*observers, *plugin("trackers")(config, notify, stop.seconds_since)]
    )
    disk = OutsideThread(
        "the disk of the run folder", notify=notify, since_signal=stop.seconds_since
    )
    with ExitStack() as stack:
        opening = run_folder.open_run(config, resume, branch=branch)
        folder = stack.enter_context(outputs.open_run_folder(opening, disk))
        stack.enter_context(states_of_run(config, folder.path, disk))
        try:
            with stop:
                # opened before environments are made, because a constructor may fail
                is_resumed = folder.start is not None
                incidents = IncidentWriter(folder.path, config, is_resumed=is_resumed)
                watching.add_file(OnDisk(incidents, disk, "incidents"))
                info = outputs.describe_run(config, folder)
                watching.prepare(info, outputs.starting_line(config))
                stop.add_check(watching.start_if_due)
                parts = build(config, folder, stop, stack, watching.progress)
                parts.learner.env_options = lambda: info.options.now
                context = RunContext(config, folder, watching, parts, disk, stop)
                lines = outputs.describe_run(config, folder, context.actions).lines
                watching.describe(replace(info, lines=lines))
                watching.start()
                info.options.fixed = False
                return Run(context, times).train()
        except StopRequested as request:
            # training has not started, so there is nothing to save
            if request.signal is not SIGINT:
                name = request.signal.name
                watching.note(f"{name}: stopped before the first iteration; nothing was saved")
            interrupted = as_ending(request)
            watching.end(None, interrupted)
            raise interrupted from None
        except BaseException as error:
            watching.end(None, error)
            raise


class Run:
    """Drives the parts of one run: iterates, reports, saves, ends."""

    def __init__(self, context: RunContext, times: TrainingTimes) -> None:
        self.context = context
        self.config = context.config
        self.folder = context.folder
        self.observers = context.observers
        self.parts = context.parts
        self.learner = context.parts.learner
        self.stop = context.stop
        self.checkpoints = RunCheckpoints(context)
        self.evaluations: Evaluations | None = None
        self.resumed_at = self.learner.iteration
        self.times = times
        self.settled = deque[Row](maxlen=TIMED_ROWS)
        """Times of the last iterations of this call, without the first, which makes the environments."""
        self.row_of = row_maker(self.config.info_keys)

    def train(self) -> Result:
        """Train until all steps are done or a stop is requested; write a checkpoint in any case."""
        # Save before rows are cut off and before training, so that a run can be resumed whenever it is killed.
        self.checkpoints.save()
        self._write_settings()
        try:
            self._open_files()
            if self.evaluations is not None:
                self.evaluations.play_baseline()
            stopped_by = self._iterate()
            self._report_open_incidents()
            stopped_by = self._finish_evaluations() or stopped_by
            self.checkpoints.save(last=True)
        except BaseException as error:
            if isinstance(error, EnvironmentFault):
                self._complete(error)
            self._report_open_incidents()
            self.checkpoints.save_after(error)
            if isinstance(error, TooManyFaults):  # once the counts are saved without them
                self._report_incidents(self.learner.count_unlearned(error.other_incidents))
            self.observers.end(self._result(type(error).__name__, failed=True), error)
            raise
        result = self._result(stopped_by)
        self.observers.end(result, None)
        return result

    def _write_settings(self) -> None:
        numerics = self.parts.numerics.own.summary()
        write = partial(self.folder.write_settings, self.config, numerics, self.parts.choices)
        call_disk(self.context.disk, "writing config.yaml", write)

    def _open_files(self) -> None:
        """Open the files of the run, and restart unfinished evaluations; add both to the observers."""
        disk = self.context.disk
        last_iteration = self.folder.resumed_from.get("iteration")
        cut = partial(cut_row_files, self.folder.path, last_iteration)
        rows = call_disk(disk, "opening metrics.jsonl", cut)
        if self.parts.players is not None:
            pace = EvaluationPace(self.config, self.times.called_at)
            begin = partial(Evaluations, self.context, self.parts.players, rows, pace)
            self.evaluations = call_disk(disk, "reading evaluations", begin)
            self.checkpoints.evaluations = self.evaluations
            self.observers.add_file(self.evaluations)
        for observer in file_observers(self.context, rows):
            self.observers.add_file(observer)
        self.checkpoints.row_sums = RowSums(self.folder.path)

    def _iterate(self) -> str | None:
        """Iterate until all steps are done; return the name of the signal or observer that stopped the run early."""
        self.times.begin(self.learner.global_step)
        try:
            for iteration in self.learner.run(self.config.iterations, self.stop):
                stopped_by = self._report(iteration)
                has_new_evaluation = self.evaluations is not None and self.evaluations.take_begun()
                self.checkpoints.save_if_due(now=has_new_evaluation)
                if stopped_by is not None and iteration.number < self.config.iterations:
                    return stopped_by
        except StopRequested as request:
            # A resumed run repeats the dropped iteration, with the same result.
            signal_name = request.signal.name
            number = self.learner.iteration + 1
            saved = ", those before it are saved" if number > 1 else ""
            logger.warning("%s: iteration %d is dropped%s", signal_name, number, saved)
            unplayed = "" if self.evaluations is None else self.evaluations.describe_open()
            if unplayed:
                logger.warning("%s: a resumed run plays the %s again", signal_name, unplayed)
            return signal_name
        return None

    def _report(self, iteration: Iteration) -> str | None:
        """Report an iteration to the observers; return the name of the observer that asks to stop."""
        row = self.row_of(iteration, self.learner, self.times)
        is_first = iteration.number == self.resumed_at + 1
        reports = iteration.collected.reports
        if not is_first:
            self.settled.append(times_of(row))
        elif any(report.carry.states is not None for report in reports):
            logger.info("%s", own_state_line(self.config))
        episodes = [episode for report in reports for episode in report.episodes]
        for observer in self.observers:
            for incident in iteration.incidents:  # these have been logged
                observer.on_incident(incident)
            for episode in episodes:
                observer.on_episode(episode)
        stopped_by = self.observers.iteration(row)
        if self.evaluations is not None:
            self.evaluations.check()
            self.times.leave_out(self.evaluations.take_waited_s())
            stopped_by = self.evaluations.stopped_by or stopped_by
        return stopped_by

    def _report_open_incidents(self) -> None:
        """Report the incidents of the iteration that was interrupted: they may be why the run was ended."""
        self._report_incidents(self.learner.take_open_incidents())

    def _report_incidents(self, incidents: Sequence[Incident]) -> None:
        for incident in incidents:
            for observer in self.observers:
                try:
                    observer.on_incident(incident)
                except Exception as problem:
                    # of a user's observer: the run has ended, and its reason counts
                    logger.warning("%s.on_incident raised %r", type(observer).__qualname__, problem)

    def _finish_evaluations(self) -> str | None:
        """Wait for evaluations; return the name of the signal that ended the wait, or None."""
        if self.evaluations is None or not self.evaluations.finish():
            return None
        # again, with the results of the evaluations
        self.checkpoints.save(last=True, overwrite=True)
        if self.stop.received is not None and self.evaluations.state()["open"]:
            return self.stop.received.name
        return None

    def _complete(self, fault: EnvironmentFault) -> None:
        """Add earlier actions, and advice on the number of environments, to the fault that ends the run."""
        fault.place = self.learner.env_faults.completed(fault.place)
        fault.message += instances_line(self.config, fault.place)

    def _result(self, stopped_by: str | None, *, failed: bool = False) -> Result:
        """Return the result of the run as it is now; `stopped_by` is the name of the reason if it ended early."""
        learner = self.learner
        training_s = self.times.training_s
        advise = training_s >= MIN_ADVICE_S
        bottleneck = ""
        split = TimeSplit.of(usual_rows(self.settled))
        settled_s = (learner.iteration - self.resumed_at - 1) * split.iteration_s
        advise_times = settled_s >= MIN_ADVICE_S
        if advise_times:
            bottleneck = bottleneck_line(split, self.config)
        return Result(
            env_name=self.config.env_name,
            run_dir=self.folder.path,
            checkpoint=self.checkpoints.last_path,
            iterations=learner.iteration,
            resumed_at=self.resumed_at,
            global_step=learner.global_step,
            episodes=learner.episodes,
            episodic_return=mean_return(learner.recent),
            recent_episodes=len(learner.recent),
            wall_s=time.monotonic() - self.times.called_at,
            training_s=training_s,
            steps_per_s=self.times.steps_per_s(learner.global_step),
            weights_sha256=learner.weights_sha256(),
            incidents=dict(learner.incidents),
            env_faults=dict(learner.env_faults.counts),
            stopped_by=stopped_by,
            model_name=self.config.model_name,
            wrapper_names=self.config.wrapper_names,
            times=times_line(split, self.config, self.parts.epochs, advise=advise_times),
            bottleneck=bottleneck,
            notes=tuple(self._notes(advise=advise, failed=failed)),
            baseline=None if self.evaluations is None else self.evaluations.comparison(),
            config=self.config,
        )

    def _notes(self, *, advise: bool, failed: bool) -> Iterator[str]:
        """Yield the notes to print at the end of the run; `advise` includes advice on its speed.

        A run that `failed` gets no advice on learning, which would hide the reason.
        """
        if self.evaluations is not None:
            yield from self.evaluations.notes()
        yield from self.parts.collector.notes()
        if advise and self.parts.core_use is not None:
            yield from self.parts.core_use.notes()
        for observer in self.observers:
            if failed and isinstance(observer, LearningNotes):
                continue
            try:
                yield from observer.closing_notes()
            except Exception as error:
                # of a user's observer: the run has ended, and its reason counts
                yield f"{type(observer).__qualname__}.closing_notes raised {error!r}"
