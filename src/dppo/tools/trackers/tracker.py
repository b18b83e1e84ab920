"""Send the rows of a run to experiment trackers, in a thread for each."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dppo.config import Config
from dppo.errors import ConfigError
from dppo.log import logger
from dppo.records.files.disk import write_file
from dppo.records.files.run_files import json_in
from dppo.records.metrics.writer import plain
from dppo.records.observer import Observer, Result, RunInfo
from dppo.records.outside import NoAnswer, OutsideThread, never
from dppo.signals import StopRequested
from dppo.tools.trackers import FAILED, FINISHED, KILLED, Backend, backend
from dppo.user_code import in_a_line

CLOSE_S = 30.0  # longest wait for the last rows at the end of a run
CHECK_S = 20.0  # longest wait for a tracker before the run starts
IDS_FILE = "trackers.json"  # in the folder of a run: the run's id in each tracker
WRITING_IDS = threading.Lock()
VALID_ID = re.compile(r"[\w-]{1,64}")


def trackers(
    config: Config,
    notify: Callable[[str], object] = logger.warning,
    since_signal: Callable[[], float] = never,
) -> list[Observer]:
    """Return the trackers that `config` asks for; raise ConfigError if one is not installed, or refuses to work.

    `notify` and `since_signal` as for `OutsideThread`.
    """
    names = list(dict.fromkeys(config.track))
    backends = {name: backend(name) for name in names}
    ids = dict[str, str]()
    observers = list[Observer]()
    for name in names:
        place = f"the server of {name}"
        thread = partial(OutsideThread, place, notify=notify, since_signal=since_signal)
        checking = thread()
        _check(name, backends[name], checking)
        checking.close()
        observers.append(Tracker(name, backends[name], thread(), ids))
    return observers


def _check(name: str, kind: type[Backend], thread: OutsideThread) -> None:
    """Raise ConfigError if a tracker refuses to work, before anything of the run has started."""
    try:
        thread.call("connecting", kind.check, CHECK_S)
    except NoAnswer:
        problem = f"{kind.server()} does not answer within {CHECK_S:.0f} s"
    except (Exception, SystemExit) as error:  # a tracker's package may raise anything
        problem = f"{kind.server()} refuses: {in_a_line(error, 500)}"
    else:
        return
    raise ConfigError(f"track={name}: {problem}. {kind.remedy}")


def earlier_ids(run: RunInfo) -> dict[str, str]:
    """Return the ids of a run that is resumed; none if the file is damaged, perhaps by another program."""
    if run.resumed_at is None:
        return {}
    ids = json_in(run.run_dir / IDS_FILE).items()
    return {name: str(run_id) for name, run_id in ids if VALID_ID.fullmatch(str(run_id))}


@dataclass(eq=False)
class Tracker(Observer):
    """Sends rows to a tracker, in a thread. No error of it ends the run: it is logged, and nothing more is sent."""

    name: str
    kind: type[Backend]
    thread: OutsideThread
    ids: dict[str, str]
    """The ids of this call by tracker, which all trackers of the run share."""
    _run: Backend | None = field(default=None, init=False)
    _problem: str = field(default="", init=False)

    def closing_notes(self) -> list[str]:
        """Add a line to the end of the run if something was not sent."""
        if self._problem:
            return [f"Tracking: {self._problem}"]
        return []

    def _try(self, call: Callable[..., object], *args: object) -> None:
        """Make a call in the thread; log its error, and call no more."""
        if self._problem:
            return
        try:
            call(*args)
        except (Exception, SystemExit) as error:
            self._run = None
            self._problem = (
                f"nothing more is sent to {self.name} ({error!r}); metrics.jsonl is complete"
            )
            logger.warning("%s", self._problem)

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of the tracker, or continue the resumed run's."""
        self.thread.post("beginning a run", partial(self._try, self._begin, run))

    def _begin(self, run: RunInfo) -> None:
        earlier = earlier_ids(run)
        self._run = self.kind(run, earlier.get(self.name))
        with WRITING_IDS:
            self.ids[self.name] = self._run.id
            write_file(run.run_dir / IDS_FILE, json.dumps(earlier | self.ids).encode())
        logger.info("%s: %s", self.name, self._run.place)

    def on_iteration(self, row: dict[str, float]) -> None:
        """Send the row; do not wait for that."""
        if not self._problem:
            send = partial(self._try, self._send, plain(row))
            self.thread.post("sending rows", send, 0)

    def _send(self, row: dict[str, float | None]) -> None:
        if self._run is not None:
            self._run.send(row)

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """End the tracker's run, as finished, failed, or killed by a signal."""
        state = _state_of(result, error)
        end = partial(self._try, self._end, state)
        if not self.thread.post("ending the run", end, CLOSE_S):
            logger.warning(
                "%s does not answer: the last rows were not sent; metrics.jsonl is complete",
                self.name,
            )
        self.thread.close()

    def _end(self, state: str) -> None:
        if self._run is not None:
            self._run.end(state)


def _state_of(result: Result | None, error: BaseException | None) -> str:
    stopped_by = (result.stopped_by if result else None) or ""
    is_interrupted = isinstance(error, KeyboardInterrupt | SystemExit | StopRequested)
    if is_interrupted or stopped_by.startswith("SIG"):
        return KILLED
    return FINISHED if error is None else FAILED
