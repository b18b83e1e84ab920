"""Recorded episodes of a run: a line of episodes.jsonl for each, with what is needed to play it again."""

from __future__ import annotations

import base64
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dppo import streams
from dppo.config import Config
from dppo.errors import CheckpointError, DppoError
from dppo.files import read_file
from dppo.log import logger
from dppo.ppo.exchange.records import Rebuild, SegmentReport
from dppo.records.files.disk import cause, remedy, write_file
from dppo.records.metrics.reading import EPISODES, parsed
from dppo.records.metrics.writer import MetricsWriter
from dppo.records.observer import Observer
from dppo.records.result import Result
from dppo.streams import Stream

MOST_BYTES = 2**26  # of the file
LARGEST = 2**28  # bytes of a file, or of the actions of one episode, that are read
LONGEST = 2**24  # bytes of the actions of an episode that is recorded
INTEGERS = ("sampler_id", "env", "episode", "seed", "length", "number", "checksum", "global_step")
AT_ONCE = 16  # iterations whose episodes are written at once


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode that can be played again, also one up to its fault."""

    sampler_id: int
    env: int
    episode: int
    seed: int
    length: int
    packed: Mapping[str, Any]
    """Its actions, see `packed`."""
    number: int | None = None
    """1, 2, ... among the finished episodes of the run; None if it ended with a fault."""
    episode_return: float = math.nan
    checksum: int = 0
    global_step: int = 0
    """Env steps of the run at the end of its last iteration."""
    error: str = ""
    options: dict[str, Any] | None = None
    """Of its reset."""

    @property
    def name(self) -> str:
        """Return its sampler, environment and index."""
        return f"{self.sampler_id}/{self.env}/{self.episode}"

    def actions(self) -> np.ndarray:
        """Return its actions [length, *A], as sampled; raise one of several errors if they are damaged."""
        dtype = {"int64": np.int64, "float32": np.float32, "float64": np.float64}[self.packed["dtype"]]
        data = zlib.decompressobj().decompress(base64.b64decode(self.packed["actions"]), LARGEST)
        return np.frombuffer(data, dtype).reshape(self.length, *self.packed["shape"])


def packed(actions: np.ndarray) -> dict[str, Any]:
    """Return actions [n, *A] as JSON values."""
    data = zlib.compress(np.ascontiguousarray(actions).tobytes(), 1)
    return {"dtype": str(actions.dtype), "shape": actions.shape[1:], "actions": base64.b64encode(data).decode()}


class Ledger(Protocol):
    """The part of the `ReplayLedger` that is needed here."""

    def rebuild(self, sampler_id: int, index: int) -> Rebuild | None: ...  # noqa: D102

    def actions_before(self, sampler_id: int, index: int, env: int, episode: int) -> np.ndarray | None: ...  # noqa: D102


class EpisodeWriter(Observer):
    """Writes the episodes that are to be recorded, before each checkpoint and every few iterations.

    See `MetricsWriter` for kills and full disks.
    """

    def __init__(
        self,
        run_dir: Path,
        resumed_at: int | None,
        config: Config,
        ledger: Ledger,
        reports: Callable[[], Sequence[SegmentReport]],
    ) -> None:
        """Cut off the lines after iteration `resumed_at`, as those episodes are played anew, and append.

        Args:
            ledger: knows the actions of open episodes; `reports` returns those of the last iteration.
        """
        self._file = MetricsWriter(run_dir, resumed_at, EPISODES, dict)
        self._every, self._seed, self._reports = config.recorded_every, config.seed, reports
        self._iteration, self._said = -1.0, False
        self._best = max((one.episode_return for one in read_episodes(run_dir) if one.number), default=-math.inf)
        self._pending: list[tuple[dict[str, float], Sequence[SegmentReport]]] = []
        self._open: dict[tuple[int, int], tuple[int, list[np.ndarray]]] = {}  # index and actions of open episodes
        for sampler in range(config.num_samplers):
            known = ledger.rebuild(sampler, resumed_at or 0)
            for env, episode in enumerate([] if known is None else known.carry.episodes.tolist()):
                actions = ledger.actions_before(sampler, resumed_at or 0, env, episode)
                self._open[sampler, env] = episode, [] if actions is None else [actions]

    def on_iteration(self, row: dict[str, float]) -> None:
        """Keep the reports of an iteration, until there are a few."""
        if row["iteration"] == self._iteration:  # it has further rows, of evaluations
            return
        self._iteration = row["iteration"]
        self._pending.append((row, self._reports()))
        if len(self._pending) >= AT_ONCE:
            self._write()

    def _write(self) -> None:
        for row, reports in self._pending:
            number = int(row["charts/episodes"]) - sum(len(report.episodes) for report in reports)
            for report in reports:
                self._append(row, report, number)
                number += len(report.episodes)
        self._pending.clear()
        with suppress(OSError):
            if self._file.path.stat().st_size > MOST_BYTES:
                self._drop_oldest()

    def _append(self, row: dict[str, float], report: SegmentReport, number: int) -> None:
        """Append the episodes of a report, of which the first one has the next number, and those that failed."""
        sampler, found = report.sampler_id, list[tuple[int, int, np.ndarray, dict[str, Any]]]()
        for one, last in zip(report.episodes, report.ended_actions, strict=True):
            number += 1
            episode, pieces = self._open.pop((sampler, one.env), (-1, []))
            if number % self._every == 0 if self._every else one.episode_return > self._best:
                actions = np.concatenate([*(pieces if episode == one.index else []), last])
                facts: dict[str, Any] = {"number": number, "checksum": one.checksum}
                facts["episode_return"] = one.episode_return
                facts |= {"options": one.options} if one.options else {}
                if len(actions) == one.length:
                    found.append((one.env, one.index, actions, facts))
                elif not self._said:  # its actions have more than LONGEST bytes
                    self._said = True
                    megabytes = f"the actions of its {one.length:,} steps have more than {LONGEST >> 20} MB"
                    logger.warning("episode %d is not recorded: %s; later ones like it neither", number, megabytes)
            self._best = max(self._best, one.episode_return)
        for fault in (one.fault for one in report.incidents if one.fault is not None and one.fault.complete):
            error: dict[str, Any] = {"error": f"{fault.error} in {fault.phase}"}
            error |= {"options": fault.options} if fault.options else {}
            found.append((fault.env, fault.episode, fault.actions, error))
        for env, (index, new) in enumerate(zip(report.carry.episodes, report.open_actions, strict=True)):
            episode, pieces = self._open.get((sampler, env), (-1, []))
            goes_on = episode == index and report.carry.episode_lengths[env] * new[:1].nbytes <= LONGEST
            self._open[sampler, env] = int(index), [*(pieces if goes_on else []), new]
        for env, index, actions, facts in found:
            seed = streams.integer(self._seed, Stream.EPISODES, sampler, env, index)
            place = dict(zip(INTEGERS, (sampler, env, index, seed, len(actions)), strict=False))
            counters: dict[str, Any] = {name: row[name] for name in ("iteration", "global_step")}
            self._file.on_iteration(counters | place | facts | {"packed": packed(actions)})

    def _drop_oldest(self) -> None:
        path = self._file.path
        self._file.on_end(None, None)
        try:
            write_file(path, read_file(path)[-MOST_BYTES // 2 :].partition(b"\n")[2])
            self._file = MetricsWriter(path.parent, sys.maxsize, EPISODES, dict)
            logger.info("%s: at %d MB, its older half is dropped. Record fewer to keep more.", path, MOST_BYTES >> 20)
        except (OSError, DppoError) as error:
            self._reports = tuple  # none, from here on
            logger.warning("%s: no further episodes are recorded: %s", path, error)

    def flush(self) -> None:
        """Wait until all episodes so far would survive a power cut."""
        self._write()
        self._file.flush()

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write what is left, and close the file."""
        self._write()
        self._file.on_end(result, error)


def read_episodes(run_dir: Path) -> list[RecordedEpisode]:
    """Return the recorded episodes of a run, perhaps a stranger's, the oldest first; skip damaged lines.

    Raise CheckpointError if their file is not a regular one, or too large.
    """
    try:
        data, found = read_file(run_dir / EPISODES, LARGEST), list[RecordedEpisode]()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{run_dir / EPISODES}: {cause(error)} {remedy(error)}") from None
    for _, row in parsed(data):
        with suppress(KeyError, OverflowError, TypeError, ValueError):
            line: Any = row
            facts: dict[str, Any] = {name: int(np.uint64(line[name])) for name in INTEGERS if name in line}
            facts["episode_return"] = float(line.get("episode_return", math.nan))
            facts["options"] = options if isinstance(options := line.get("options"), dict) else None
            found.append(RecordedEpisode(packed=line["packed"], error=str(line.get("error", "")), **facts))
    return found
