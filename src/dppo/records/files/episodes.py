"""Episodes that can be played again: a line of episodes.jsonl for each that is recorded, a folder for each incident."""

import base64
import json
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo import streams
from dppo.config import Config
from dppo.config.trust import code_named_by, resume_command
from dppo.errors import CheckpointError, ClusterError, DppoError, EnvironmentFault
from dppo.files import read_file
from dppo.invocation import command
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind, SegmentReport
from dppo.records.files.disk import cause, make_folder, remedy, write_file
from dppo.records.files.run_folder import settings_to_resume, versions
from dppo.records.metrics.reading import EPISODES, parsed
from dppo.records.metrics.writer import MetricsWriter
from dppo.records.observer import Result
from dppo.records.outside import FileWriter
from dppo.streams import Stream

INCIDENT = "incident.json"
MOST_BYTES = 2**26  # of the file of episodes
LARGEST = 2**28  # bytes of a file, or of the actions of one episode, that are read
LONGEST = 2**24  # bytes of the actions of an open episode, as the ledger keeps them
INTEGERS = ("sampler_id", "env", "episode", "seed", "length", "number", "checksum", "global_step")
AT_ONCE = 64  # reports whose episodes are written at once, which saves CPU time in short iterations
MOST, MOST_NUMBERS = 50, 2**18  # incidents of a run; numbers in the actions of one
SAID = 3  # incidents that are named as they are written, besides that of the end
LOST = (IncidentKind.ACTOR_LOST, IncidentKind.ACTOR_HUNG)


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
    alone: bool = True
    """False for a row of an environment that steps several: it cannot be played again."""

    @property
    def name(self) -> str:
        """Return its sampler, environment and index."""
        return f"{self.sampler_id}/{self.env}/{self.episode}"

    def actions(self) -> np.ndarray:
        """Return its actions [length, *A], as sampled; raise one of several errors if they are damaged."""
        dtype = {"int64": np.int64, "float32": np.float32, "float64": np.float64}[self.packed["dtype"]]
        data = zlib.decompressobj().decompress(base64.b64decode(self.packed["actions"]), LARGEST)
        return np.frombuffer(data, dtype).reshape(self.length, *self.packed["shape"])


SEVERAL_ROWS = "an environment that steps several rows at once, and an episode of one depends on the actions of all"


def nothing_recorded(run: Path) -> str:
    """Return why a run has no recorded episodes, and what to do."""
    settings = settings_to_resume(run, read_only=True)
    recorded = settings.get("record_episodes", "all")
    if recorded != "all":
        return f"{run}: has no recorded episodes, with record_episodes={recorded}. Train with `record_episodes=all`."
    command = resume_command(str(settings.get("env_id")), run, settings.get("model"), settings.get("wrappers", ()))
    longer = 2 * int(settings.get("total_timesteps", 0))
    faults = f" Faults are played by their folder, such as {run}/incidents/001." if (run / "incidents").exists() else ""
    fact = f"{run}: has no recorded episodes: none has finished yet"
    return f"{fact}. Train longer: {command} --total-timesteps {longer}.{faults}"


def packed(actions: np.ndarray) -> dict[str, Any]:
    """Return actions [n, *A] as JSON values."""
    data = zlib.compress(np.ascontiguousarray(actions).tobytes(), 1)
    return {"dtype": str(actions.dtype), "shape": actions.shape[1:], "actions": base64.b64encode(data).decode()}


class EpisodeWriter(FileWriter):
    """Writes the episodes to be recorded before each checkpoint and every few iterations, through `MetricsWriter`."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        actions_before: Callable[[int, int, int, int], np.ndarray | None],
        reports: Callable[[], Sequence[SegmentReport]],
        episodes: int,
    ) -> None:
        """Open the file, to append to it.

        Args:
            actions_before: `ReplayLedger.actions_before`.
            reports: returns the reports of the last iteration.
            episodes: number of episodes that have finished since the start of the run.
        """
        self._file = MetricsWriter(run_dir / EPISODES, dict)
        self._every, self._seed = config.recorded_every, config.seed
        self._actions_before, self._reports, self._number = actions_before, reports, episodes
        self._iteration, self._said = -1.0, False
        self._best = max((one.episode_return for one in read_episodes(run_dir) if one.number), default=-math.inf)
        self._pending = deque[tuple[dict[str, float], SegmentReport, list[np.ndarray | None]]]()

    def snapshot(self, row: dict[str, float]) -> bool | None:
        """Keep the reports of an iteration, and the actions of earlier segments; return True once there are a few."""
        if row["iteration"] == self._iteration:  # it has further rows, of evaluations
            return None
        self._iteration = row["iteration"]
        for of in self._reports():
            earlier = [self._actions_before(of.sampler_id, of.index, one.env, one.index) for one in of.episodes]
            self._pending.append((row, of, earlier))
        return True if len(self._pending) >= AT_ONCE else None

    def write(self, snapshot: bool = True) -> None:
        """Write the episodes that were kept, and those that failed."""
        for _ in range(len(self._pending)):
            row, report, before = self._pending.popleft()
            for one, earlier, last in zip(report.episodes, before, report.ended_actions, strict=True):
                self._number += 1
                if self._number % self._every == 0 if self._every else one.episode_return > self._best:
                    actions = last if earlier is None else np.concatenate([earlier, last])
                    facts = {"number": self._number, "checksum": one.checksum, "episode_return": one.episode_return}
                    if not one.alone:
                        facts["alone"] = False
                    if len(actions) == one.length:
                        self._add(row, (report.sampler_id, one.env, one.index), actions, facts, one.options)
                    elif not self._said:  # the ledger has no more of them
                        self._said = True
                        megabytes = f"the actions of its {one.length:,} steps have more than {LONGEST >> 20} MB"
                        text = "episode %d is not recorded: %s; later ones like it neither"
                        logger.warning(text, self._number, megabytes)
                self._best = max(self._best, one.episode_return)
            for fault in (one.fault for one in report.incidents if one.fault is not None and one.fault.complete):
                error = {"error": f"{fault.error} in {fault.phase}"}
                self._add(row, (report.sampler_id, fault.env, fault.episode), fault.actions, error, fault.options)
        with suppress(OSError):
            if self._file.path.stat().st_size > MOST_BYTES:
                self._drop_oldest()

    def _add(
        self, row: dict[str, float], of: tuple[int, int, int], actions: np.ndarray, facts: Any, options: Any
    ) -> None:
        """Append the episode `of` sampler, environment and index."""
        place = zip(INTEGERS, (*of, streams.integer(self._seed, Stream.EPISODES, *of), len(actions)), strict=False)
        line = {name: row[name] for name in ("iteration", "global_step")} | dict(place) | facts
        self._file.on_iteration(line | ({"options": options} if options else {}) | {"packed": packed(actions)})

    def _drop_oldest(self) -> None:
        path = self._file.path
        self._file.on_end(None, None)
        try:
            write_file(path, read_file(path)[-MOST_BYTES // 2 :].partition(b"\n")[2])
            self._file = MetricsWriter(path, dict)
            logger.info("%s: at %d MB, its older half is dropped. Record fewer to keep more.", path, MOST_BYTES >> 20)
        except (OSError, DppoError) as error:
            self._reports = tuple  # none, from here on
            logger.warning("%s: no further episodes are recorded: %s", path, error)

    def flush(self) -> None:
        """Wait until all episodes so far would survive a power cut."""
        self.write()
        self._file.flush()

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write what is left, and close the file."""
        self.write()
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
            facts["alone"] = line.get("alone") is not False
            found.append(RecordedEpisode(packed=line["packed"], error=str(line.get("error", "")), **facts))
    return found


class IncidentWriter(FileWriter):
    """Writes incidents/001, 002, ... for each environment that fails, and each actor that dies or hangs."""

    takes_incidents = True

    def __init__(self, run_dir: Path, config: Config) -> None:
        named = code_named_by({"env_id": config.env_name, "wrappers": config.wrapper_names})
        self._folder, self._trust, self._said = run_dir / "incidents", " --trust" if named else "", SAID

    def on_incident(self, incident: Incident) -> None:
        """Write an incident that the run has recovered from, if there is room; log where."""
        fault, folder = incident.fault, self._folder
        if fault is None and incident.kind not in LOST:
            return
        values = {name: getattr(fault, name) for name in (() if fault is None else fault.__slots__)}
        actions = values.get("actions") if fault is not None and fault.complete else None
        if actions is not None:
            values["dtype"], actions = str(actions.dtype), actions.tolist() if actions.size <= MOST_NUMBERS else None
        values |= {"kind": incident.kind, "message": incident.message, "actions": actions, "versions": versions()}
        try:
            make_folder(folder)
            number = 1 + max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)
            if number <= MOST:
                folder /= f"{number:03d}"
                folder.mkdir()
                write_file(folder / INCIDENT, json.dumps(values | {"time": time.strftime("%F %T %z")}).encode())
                report = f"{incident.message}\n\n{values.get('traceback', incident.details)}"
                write_file(folder / "report.txt", report.encode())
                if number <= self._said:
                    again = "" if actions is None else f": {command('replay', folder)}{self._trust}"
                    logger.warning("see %s%s", folder, again)
        except OSError as error:
            logger.warning("%s: %s The incident is not written.", folder, cause(error))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write the incident that has ended the run."""
        self._said = MOST
        if isinstance(error, EnvironmentFault):
            self.on_incident(Incident(IncidentKind.ENV_RAISED, str(error), fault=error.place))
        elif isinstance(error, ClusterError) and result is not None:
            self.on_incident(Incident(IncidentKind.ACTOR_LOST, str(error)))
