"""One run from start to finish: connect, build, loop, report, save, stop."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its at-fork hooks must not be registered in the middle of a fork of Ray's
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dppo import run_folder
from dppo.assemble import model_spec, sampler_plan
from dppo.cluster.pool import ActorPool, make_pool
from dppo.cluster.recovery import ReplayLedger
from dppo.config import Config
from dppo.envs.make import check_env_id
from dppo.errors import CheckpointError, DppoError, SegmentsLost
from dppo.figures import iteration_row, mean_return
from dppo.learner import PPOLearner
from dppo.policy import model_state
from dppo.ppo.normalizer import Moments, Statistics
from dppo.records import checkpoint as checkpoints
from dppo.records.checkpoint import Checkpoint
from dppo.records.metrics import MetricsWriter
from dppo.records.plots import learning_curve
from dppo.records.progress import Progress, make_progress
from dppo.signals import StopRequested, StopSignals
from dppo.spaces import Spaces

STORE_PER_STEP = 64 * 1024  # bytes of Ray's object store per env step of a batch: room for images, twice over
COPIES = 8  # of the weights in the object store at a time: sent out, and with the optimiser's state twice over
STORE_LIMITS = 256 * 2**20, 4 * 2**30


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run_dir: Path
    checkpoint: Path
    """The last one written."""
    iterations: int
    global_step: int
    """Env steps, over all environments."""
    episodes: int
    episodic_return: float
    """Mean of the last (at most 100) episodes; nan if none ended."""
    wall_s: float
    """From the call of `train` to the last checkpoint."""
    training_s: float
    """From the first request for segments to the end of the last update."""
    weights_sha256: str
    """Fingerprint of the final weights."""
    metrics: list[dict[str, float]]
    """The rows of metrics.jsonl that this call wrote."""
    incidents: dict[str, int]
    """What went wrong and was dealt with, counted by kind."""
    stopped_by: str | None
    """Name of the signal that ended the run early, None if it ran to its end."""


def train(config: Config, *, resume: str | Path | None = None, progress: Progress | None = None) -> Result:
    """Train one policy, and leave a run's folder behind.

    Args:
        resume: the folder of a run (or one of its checkpoints) to go on from, exactly; `config` must be that run's but
            for settings that do not change what is learnt.
        progress: where to show it; default: as `config.progress` says.
    Raises:
        ConfigError: a setting, an environment or a cluster that cannot be; found before training starts.
        CheckpointError: nothing to resume from.
        EnvironmentFault: the environment raised; carries the user's traceback.
        ClusterError: Ray cannot be reached, or more was lost than may be.
        TrainingDiverged: a loss or gradient is not finite.
    """
    began = time.monotonic()
    check_env_id(config.env_id)
    start = run_folder.open_to_resume(config, Path(resume)) if resume is not None else None
    run_dir = start.run_dir if start else run_folder.create(config)
    progress = progress or make_progress(config.progress)
    with ExitStack() as stack:
        if start is None:
            stack.callback(run_folder.discard_unused, run_dir)
        stack.callback(progress.close)
        try:
            return _Run(config, run_dir, progress, began, stack).go(start)
        except StopRequested as stop:  # before there was anything to save
            raise stop.as_interruption() from None


class _Run:
    """The parts of one run, and the loop over them."""

    def __init__(self, config: Config, run_dir: Path, progress: Progress, began: float, stack: ExitStack) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self.began = began
        self.stack = stack
        self.hosting = config.hosting()
        self.rows: list[dict[str, float]] = []
        self.last_checkpoint: Path | None = None
        self.saved_iteration = -1

    def go(self, start: run_folder.Start | None) -> Result:
        with StopSignals() as stop:
            return self._go(start, stop)

    def _go(self, start: run_folder.Start | None, stop: StopSignals) -> Result:
        self._announce(start)
        pool, spaces, ledger = self._connect(stop)
        self.spaces = spaces
        self.learner = self._build_learner(pool, ledger, stop)
        if start is not None:
            self._go_on_from(start)
            run_folder.write_settings(self.config, self.run_dir)
        self.pool = pool
        self.metrics = MetricsWriter(
            self.run_dir, self.learner.iteration if start is not None else None, note=self.progress.note
        )
        self.stack.callback(self.metrics.close)
        self._loop(stop)
        self._save()
        return self._finish(stop)

    # ------------------------------------------------------------------ building

    def _announce(self, start: run_folder.Start | None) -> None:
        lines = [self.config.sizes_in_words(), self.config.hosting_in_words(), f"Run folder: {self.run_dir}"]
        if start is not None:
            lines.append(f"Going on from {start.checkpoint.name} at step {start.state['global_step']:,}.")
        title = f"dppo: PPO on {self.config.env_name}, seed {self.config.seed}"
        self.progress.start(title, lines, self.config.iterations * self.config.batch_size)
        for problem in start.damaged if start else ():
            self.progress.note(f"passed over a damaged checkpoint: {problem}")
        for change in start.close_changes if start else ():
            self.progress.note(
                f"{change}: from here on results differ from the uninterrupted run's, in rounding or order"
            )

    def _connect(self, stop: StopSignals) -> tuple[ActorPool, Spaces, ReplayLedger]:
        """Ray if need be, the actors, and what their environments look like."""
        config = self.config
        torch_import = threading.Thread(target=_import_torch, daemon=True)  # beside Ray, which mostly waits
        torch_import.start()
        self.stack.callback(torch_import.join)  # Python must not end in the middle of it
        if config.num_actors > 0:
            self._open_session()
        ledger = ReplayLedger(config.samplers, replay=config.replay)
        pool = make_pool(
            sampler_plan(config),
            self.hosting,
            ledger,
            num_actors=config.num_actors,
            cpus_per_actor=config.cpus_per_actor,
            resources=config.actor_resources,
            gpus_per_actor=config.actor_gpus,
            segment_timeout_s=config.segment_timeout_s,
            max_restarts=config.max_actor_restarts,
            by_reference=config.num_learners > 0,
            notify=self.progress.note,
        )
        self.stack.callback(pool.close)
        spaces = pool.describe(stop)
        if not spaces.deterministic and config.replay:
            ledger.replay = False
            self.progress.note(f"{config.env_name} says it is nondeterministic: lost samplers begin fresh episodes")
        torch_import.join()
        return pool, spaces, ledger

    def _open_session(self) -> None:
        from dppo.cluster.session import RaySession

        config = self.config
        low, high = STORE_LIMITS
        hidden = sum(inputs * units for inputs, units in pairwise(config.hidden_sizes))
        session = RaySession(
            address=config.address,
            num_actors=config.num_actors,
            cpus_per_actor=config.cpus_per_actor,
            resources=config.actor_resources | ({"GPU": config.actor_gpus} if config.actor_gpus else {}),
            num_learners=config.num_learners,
            learner_needs={"CPU": config.learner_cpus, "GPU": config.learner_gpus},
            store_bytes=min(high, max(low, config.batch_size * STORE_PER_STEP) + COPIES * 2 * 4 * hidden),
            dashboard=config.dashboard,
            notify=self.progress.note,
        )
        self.stack.callback(session.close)

    def _build_learner(self, pool: ActorPool, ledger: ReplayLedger, stop: StopSignals) -> PPOLearner:
        from dppo.cluster.trainers import make_trainers

        trainers = make_trainers(self.config, self.spaces, self.progress.note, stop.check)
        self.stack.callback(trainers.close)
        statistics = Statistics(
            obs=Moments.empty(self.spaces.obs_shape) if self.config.norm_obs else None,
            returns=Moments.empty(()) if self.config.norm_reward else None,
        )
        return PPOLearner(pool, trainers, ledger, statistics)

    def _go_on_from(self, start: run_folder.Start) -> None:
        model = model_state(self.spaces, model_spec(self.config, self.spaces))
        if start.state["model"] != model:
            name = next(key for key in model if start.state["model"].get(key) != model[key])
            raise CheckpointError(
                f"{start.checkpoint}: its {name} is {start.state['model'].get(name)}, that of "
                f"{self.config.env_name} is {model[name]}. Resume with the environment that the run began with."
            )
        self.learner.load(start.arrays, start.state)
        self.last_checkpoint, self.saved_iteration = start.checkpoint, self.learner.iteration

    # ------------------------------------------------------------------ the loop

    def _loop(self, stop: StopSignals) -> None:
        """Iterate until the steps are done or a signal asks to stop."""
        iterations = self.config.iterations
        self.training_began = self.training_ended = ended = saved = time.monotonic()
        steps_before = self.learner.global_step
        if self.learner.iteration >= iterations:
            return
        self.learner.begin()
        while self.learner.iteration < iterations:
            try:
                collected = self.learner.collect(stop)
            except StopRequested:
                return  # what was being collected is collected again, and equal, when the run is resumed
            except DppoError:
                self._save_if_possible()  # all iterations before this one are good
                raise
            try:
                iteration = self.learner.learn(collected, last=self.learner.iteration + 1 == iterations)
            except SegmentsLost as error:
                self.progress.note(f"{error}; they are made again")
                self.learner.begin_again(collected)
                continue
            row = iteration_row(
                iteration,
                self.learner,
                hosting=self.hosting,
                iteration_s=iteration.ended - ended,
                wall_s=iteration.ended - self.began,
                training_s=iteration.ended - self.training_began,
                steps_since_start=self.learner.global_step - steps_before,
                learning_rate=self.config.learning_rate_at(iteration.number - 1),
                actors_alive=self.pool.alive(),
            )
            self.training_ended = ended = iteration.ended
            self.rows.append(row)
            self.metrics.write(row)
            self.progress.iteration(row)
            for report in collected.reports:
                for incident in report.incidents:
                    self.progress.note(incident.message)
            if ended - saved >= self.config.checkpoint_interval_s:
                saved = ended
                self._save_if_possible()

    # ------------------------------------------------------------------ saving and ending

    def _save(self) -> None:
        """Write a checkpoint of the last finished iteration, unless it is there."""
        if self.learner.iteration == self.saved_iteration:
            return
        self.metrics.flush()  # no checkpoint shall be ahead of its rows
        arrays, state = self.learner.state()
        state |= {
            "config": run_folder.resolved(self.config),
            "versions": run_folder.versions(),
            "model": model_state(self.spaces, model_spec(self.config, self.spaces)),
        }
        score = mean_return(self.learner)
        self.last_checkpoint = checkpoints.save(
            self.run_dir / checkpoints.FOLDER,
            self.learner.iteration,
            Checkpoint(arrays, state),
            keep=self.config.keep_checkpoints,
            score=None if math.isnan(score) else score,
        )
        self.saved_iteration = self.learner.iteration

    def _save_if_possible(self) -> None:
        """In the middle of a run a full disk is no reason to stop: say so, and try again at the next interval."""
        try:
            self._save()
        except CheckpointError as error:
            self.learner.incidents["checkpoint_failed"] += 1
            self.progress.note(str(error))

    def _finish(self, stop: StopSignals) -> Result:
        assert self.last_checkpoint is not None
        wall_s = time.monotonic() - self.began
        self.metrics.flush()
        picture = self.run_dir / "learning_curve.png"
        try:
            learning_curve(self.metrics.history(), picture, f"{self.config.env_name}, seed {self.config.seed}")
        except OSError as error:  # a full disk is no reason to lose what was learnt
            self.progress.note(f"{picture}: could not be drawn ({error.strerror or error})")
        result = Result(
            run_dir=self.run_dir,
            checkpoint=self.last_checkpoint,
            iterations=self.learner.iteration,
            global_step=self.learner.global_step,
            episodes=self.learner.episodes,
            episodic_return=mean_return(self.learner),
            wall_s=wall_s,
            training_s=self.training_ended - self.training_began,
            weights_sha256=self.learner.weights_sha256(),
            metrics=self.rows,
            incidents=dict(self.learner.incidents),
            stopped_by=stop.received.name
            if stop.received and self.learner.iteration < self.config.iterations
            else None,
        )
        self.progress.finish(_in_words(result, picture))
        return result


def _in_words(result: Result, picture: Path) -> list[str]:
    """What to say at the end."""
    ending = f"Stopped by {result.stopped_by}" if result.stopped_by else "Done"
    if result.metrics:
        speed = f"in {result.wall_s:.1f} s ({result.metrics[-1]['charts/SPS']:,.0f} steps/s while training)."
    else:
        speed = "before: nothing was left to do."
    returns = f"Mean return of the last {min(result.episodes, 100)} episodes: {result.episodic_return:.1f}"
    lines = [
        f"{ending} after {result.global_step:,} steps and {result.episodes:,} episodes {speed}",
        returns if result.episodes else "No episode has ended yet.",
        f"Checkpoint: {result.checkpoint}",
        f"Picture: {picture}",
        f"Weights: sha256 {result.weights_sha256[:16]}",
    ]
    if result.incidents:
        counts = (f"{count} x {kind}" for kind, count in sorted(result.incidents.items()))
        lines.append(f"Dealt with: {', '.join(counts)}")
    if result.stopped_by:
        lines.append(f"Go on with: dppo train --resume {result.run_dir}")
    return lines


def _import_torch() -> None:
    import torch  # noqa: F401
