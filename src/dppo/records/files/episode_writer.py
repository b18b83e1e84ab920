"""EpisodeWriter: an observer that records training episodes in episodes.jsonl."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo import streams
from dppo.config import Config
from dppo.errors import DppoError
from dppo.log import logger
from dppo.ppo.exchange.records import Episode, SegmentReport
from dppo.records.files.disk import write_file
from dppo.records.files.episodes import packed, read_episodes
from dppo.records.files.run_files import EPISODES, read_run_file
from dppo.records.metrics.reading import Row
from dppo.records.metrics.writer import MetricsWriter
from dppo.records.observer import Result
from dppo.records.outside import FileWriter
from dppo.streams import Stream

MAX_FILE_BYTES = 2**26
MAX_ACTIONS_MB = 16  # limit of the ledger for the actions of an unfinished episode
# Reports whose episodes are written together, which saves CPU time if iterations are short.
REPORTS_AT_ONCE = 64

ActionsBefore = Callable[[int, int, int, int], np.ndarray | None]
"""The type of `ReplayLedger.actions_before`."""


class _PendingReport(NamedTuple):
    """A report whose episodes have not been written."""

    row: Row
    report: SegmentReport
    earlier_actions: list[np.ndarray | None]
    """Actions of each finished episode in earlier segments; None if there are none."""


class _Place(NamedTuple):
    """The place of an episode in a run."""

    sampler_id: int
    env: int
    episode: int


class EpisodeWriter(FileWriter):
    """Writes the episodes to record, before each checkpoint and every few iterations, through `MetricsWriter`."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        actions_before: ActionsBefore,
        reports: Callable[[], Sequence[SegmentReport]],
        episodes: int,
    ) -> None:
        """Open the file, to append to it.

        Args:
            reports: returns the reports of the last iteration.
            episodes: number of episodes that have finished since the start of the run.
        """
        self._file = MetricsWriter(run_dir / EPISODES, dict)
        self._every = config.recorded_every
        self._seed = config.seed
        self._actions_before = actions_before
        self._reports = reports
        self._num_finished = episodes
        self._iteration = -1.0
        self._warned = False
        finished = (episode.episode_return for episode in read_episodes(run_dir) if episode.number)
        self._best = max(finished, default=-math.inf)
        self._pending: deque[_PendingReport] = deque()

    def snapshot(self, row: Row) -> bool | None:
        """Store the reports of an iteration with the actions of earlier segments; return whether to write them."""
        if row["iteration"] == self._iteration:  # a second row, which adds an evaluation
            return None
        self._iteration = row["iteration"]
        for report in self._reports():
            earlier = [
                self._actions_before(report.sampler_id, report.index, episode.env, episode.index)
                for episode in report.episodes
            ]
            self._pending.append(_PendingReport(row, report, earlier))
        return len(self._pending) >= REPORTS_AT_ONCE or None

    def write(self, snapshot: bool = True) -> None:
        """Write the pending episodes to record, and those that ended with a fault.

        Args:
            snapshot: the result of `snapshot`, which has stored the reports itself.
        """
        # A fixed number, as `snapshot` may append reports meanwhile in another thread.
        for _ in range(len(self._pending)):
            self._write_report(self._pending.popleft())
        with suppress(OSError):
            if self._file.path.stat().st_size > MAX_FILE_BYTES:
                self._drop_older_half()

    def _write_report(self, pending: _PendingReport) -> None:
        report = pending.report
        for episode, earlier_actions, last_actions in zip(
            report.episodes, pending.earlier_actions, report.ended_actions, strict=True
        ):
            self._num_finished += 1
            if self._is_recorded(episode):
                actions = last_actions
                if earlier_actions is not None:
                    actions = np.concatenate([earlier_actions, last_actions])
                self._add_episode(pending.row, report.sampler_id, episode, actions)
            self._best = max(self._best, episode.episode_return)
        self._add_faults(pending.row, report)

    def flush(self) -> None:
        """Wait until all episodes so far would survive a power cut."""
        self.write()
        self._file.flush()

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write what is left, and close the file."""
        self.write()
        self._file.on_end(result, error)

    def _is_recorded(self, episode: Episode) -> bool:
        """Return whether to record an episode: every n-th one, or each one better than all before."""
        if self._every:
            return self._num_finished % self._every == 0
        return episode.episode_return > self._best

    def _add_episode(
        self, row: Row, sampler_id: int, episode: Episode, actions: np.ndarray
    ) -> None:
        """Append a finished episode, unless it was so long that the ledger has not kept all of its actions."""
        if len(actions) == episode.length:
            facts = {
                "number": self._num_finished,
                "checksum": episode.checksum,
                "episode_return": episode.episode_return,
            }
            if not episode.is_single:
                facts["alone"] = False
            if episode.explored:  # training returns leave it out
                facts["explored"] = True
            place = _Place(sampler_id, episode.env, episode.index)
            self._add(row, place, actions, facts, episode.options)
        elif not self._warned:
            self._warned = True
            logger.warning(
                f"episode {self._num_finished} is not recorded: the actions of its {episode.length:,} steps have more "
                f"than {MAX_ACTIONS_MB} MB. Other episodes of this size are not recorded either"
            )

    def _add_faults(self, row: Row, report: SegmentReport) -> None:
        """Append the episodes that ended with a fault, if all of their actions are known."""
        for incident in report.incidents:
            fault = incident.fault
            if fault is not None and fault.complete:
                facts = {"error": f"{fault.error} in {fault.phase}"}
                place = _Place(report.sampler_id, fault.env, fault.episode)
                self._add(row, place, fault.actions, facts, fault.options)

    def _add(
        self,
        row: Row,
        place: _Place,
        actions: np.ndarray,
        facts: dict[str, Any],
        options: dict[str, Any] | None,
    ) -> None:
        """Append an episode; `facts` are its further columns."""
        line: dict[str, Any] = {
            "iteration": row["iteration"],
            "global_step": row["global_step"],
            **place._asdict(),
            "seed": streams.integer(self._seed, Stream.EPISODES, *place),
            "length": len(actions),
            **facts,
        }
        if options:
            line["options"] = options
        line["packed"] = packed(actions)
        self._file.on_iteration(line)

    def _drop_older_half(self) -> None:
        path = self._file.path
        self._file.on_end(None, None)
        try:
            newer_half = read_run_file(path)[-MAX_FILE_BYTES // 2 :]
            _, _, complete_lines = newer_half.partition(b"\n")
            write_file(path, complete_lines)
            self._file = MetricsWriter(path, dict)
            logger.info(
                f"{path}: at {MAX_FILE_BYTES // 2**20} MB, its older half is dropped. Record fewer to keep more."
            )
        except (OSError, DppoError) as error:
            self._reports = tuple  # `snapshot` gets no more reports
            logger.warning("%s: no further episodes are recorded: %s", path, error)
