"""The start of a run: check the code that it names, open its folder and its files in the thread of its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from dppo.config import Config
from dppo.config.memory import check_layers
from dppo.envs.make import wrapper_of
from dppo.envs.names import check_env_id
from dppo.errors import CheckpointNotWritten, ConfigError, counted
from dppo.log import logger
from dppo.ppo.exchange.records import SegmentReport
from dppo.ppo.networks.network import model_class
from dppo.records import run_lines
from dppo.records.files.episodes import EpisodeWriter
from dppo.records.files.run_folder import RunFolder
from dppo.records.metrics.reading import EPISODES, FILE, TRACE, read_metrics
from dppo.records.metrics.tensorboard import TensorBoard
from dppo.records.metrics.writer import MetricsWriter
from dppo.records.observer import Display, EnvOptions, Observer, RunInfo
from dppo.records.outside import ENDING_S, NoAnswer, OnDisk, OutsideThread
from dppo.run.building import Parts
from dppo.user_code import check_current_folder

T = TypeVar("T")


def check_is_config(config: object) -> None:
    """Raise ConfigError if this is not a Config."""
    if not isinstance(config, Config):
        env_id = repr(config) if isinstance(config, str) else "..."
        raise ConfigError(f"config={config!r}: must be a dppo.Config. Use dppo.Config(env_id={env_id}).")


def check_code(config: Config) -> None:
    """Raise ConfigError if the environment, a wrapper or the network cannot be imported, or does not fit in memory."""
    check_current_folder()
    check_env_id(config.env_id)
    for wrapper in config.wrappers:
        wrapper_of(wrapper)
    check_layers(config)
    if config.model is not None:
        model_class(config.model)


def described(config: Config, folder: RunFolder) -> RunInfo:
    """Return what observers are told about a run that is about to start."""
    lines = [run_lines.sizes_line(config), run_lines.hosting_line(config), f"Run folder: {folder.path}"]
    start = folder.start
    if start is not None:
        lines.append(f"Resuming from {start.path.stem} at step {start.checkpoint.state['global_step']:,}.")
    if folder.origin is not None:
        lines.append(run_lines.branch_line(folder.origin))
    return RunInfo(
        config=config,
        run_dir=folder.path,
        title=f"dppo: PPO on {config.env_name}, seed {config.seed}",
        lines=tuple(lines),
        total_steps=config.iterations * config.batch_size,
        resumed_at=start.checkpoint.state["iteration"] if start is not None else None,
        options=EnvOptions(start.checkpoint.state.get("env_options") if start else None, fixed=start is not None),
    )


def starting_line(config: Config) -> str:
    """Return what a run waits for before it is ready."""
    if not config.num_actors:
        return f"Creating {config.env_name} ..."
    return f"Starting {'Ray actors' if config.elastic else counted(config.most_actors, 'Ray actor')} ..."


def shown_at_once(display: Display) -> Callable[[str], None]:
    """Return a function that logs a line, and shows it at once, even while the run is not ready."""

    def notify(text: str) -> None:
        display.note(text)
        logger.warning("%s", text, extra={"shown": True})

    return notify


@contextmanager
def opened(folder: AbstractContextManager[RunFolder], disk: OutsideThread) -> Iterator[RunFolder]:
    """Open a run folder in the thread of its disk, and unlock it there in the end; close the thread."""
    inside = ExitStack()
    try:
        try:
            run_folder = disk.call("opening the run folder", partial(inside.enter_context, folder))
        except NoAnswer as error:
            raise ConfigError(f"run_dir: {error}. Check the disk, or use another folder.") from None
        disk.place = f"the disk of {run_folder.path}"
        yield run_folder
    finally:
        try:
            disk.call("unlocking the run folder", inside.close, ENDING_S)
        except NoAnswer as error:
            logger.warning("%s; run.lock stays there, and locks nobody out", error)
        disk.close()


def saved(disk: OutsideThread, what: str, function: Callable[[], T]) -> T:
    """Return the result of a call to the disk; raise CheckpointNotWritten if the disk does not answer."""
    try:
        return disk.call(what, function)
    except NoAnswer as error:
        raise CheckpointNotWritten(
            f"the checkpoint could not be written: {error}.\nEarlier checkpoints are untouched. Check the disk."
        ) from None


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The files that get lines in each iteration."""

    metrics: MetricsWriter
    trace: MetricsWriter | None
    episodes: EpisodeWriter | None
    rows: Sequence[dict[str, float]]
    """The rows of metrics before this call."""

    @property
    def flushed(self) -> list[MetricsWriter | EpisodeWriter]:
        """Return the files that a checkpoint must not be ahead of."""
        return [self.metrics] if self.episodes is None else [self.metrics, self.episodes]


def open_row_files(
    path: Path,
    resumed_at: int | None,
    config: Config,
    parts: Parts,
    reports: Callable[[], Sequence[SegmentReport]],
) -> RowFiles:
    """Open the files in the run folder `path`, and cut off the lines after iteration `resumed_at`.

    `reports` returns those of the last iteration. Raises a DppoError if a file cannot be written.
    """
    metrics = MetricsWriter(path, resumed_at)
    for name in (TRACE, EPISODES):
        if (path / name).exists():  # its lines of iterations that this run makes anew
            MetricsWriter(path, resumed_at, name).on_end(None, None)
    trace = None if parts.trace is None else MetricsWriter(path, resumed_at, TRACE, parts.trace)
    episodes = None
    if config.record_episodes != "none":
        known = parts.ledger.actions_before, reports, parts.learner.episodes
        episodes = EpisodeWriter(path, resumed_at, config, *known)
    return RowFiles(metrics, trace, episodes, read_metrics(path))


def file_observers(
    files: RowFiles, path: Path, disk: OutsideThread, since_signal: Callable[[], float]
) -> list[Observer]:
    """Return the observers that write the files of the run folder `path`, in threads."""
    found: list[Observer] = [OnDisk(files.metrics, disk, FILE)]
    found.append(TensorBoard(path, files.metrics.last_step + 1, since_signal))
    if files.trace is not None:
        found.append(OnDisk(files.trace, disk, TRACE))
    if files.episodes is not None:
        found.append(OnDisk(files.episodes, disk, EPISODES))
    return found
