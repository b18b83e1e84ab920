"""IncidentWriter: a folder for each environment that fails, each actor that dies or hangs, and the end of a run."""

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.config.trust import code_named_by
from dppo.errors import (
    ClusterError,
    ControllerFault,
    EnvFault,
    EnvironmentFault,
    GPUFailed,
    OutOfMemory,
    TrainingDiverged,
)
from dppo.invocation import command
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.records.files.disk import cause, make_folder, write_file
from dppo.records.files.run_files import INCIDENT, json_in
from dppo.records.files.run_folder import versions
from dppo.records.observer import Result
from dppo.records.outside import FileWriter

MAX_INCIDENTS = 50  # folders of incidents in a run
MAX_LOGGED = 3  # incidents whose folders are named as they are written, besides the incident that ends the run
MAX_NUMBERS = 2**18  # largest number of elements in the actions of an incident
ENDS = (ControllerFault, GPUFailed, OutOfMemory, TrainingDiverged)
"""Other errors that end a run; a full disk could not hold an incident."""
LOST = (IncidentKind.ACTOR_LOST, IncidentKind.ACTOR_HUNG)


class IncidentWriter(FileWriter):
    """Writes incidents/001, 002, ..."""

    takes_incidents = True

    def __init__(self, run_dir: Path, config: Config, *, is_resumed: bool) -> None:
        self._folder = run_dir / "incidents"
        self._is_resumed = is_resumed
        self._flags = list[str]()
        if code_named_by({"env_id": config.env_name, "wrappers": config.wrapper_names}):
            self._flags.append("--trust")
        self._max_logged = MAX_LOGGED

    def on_incident(self, incident: Incident) -> None:
        """Write an incident that the run has recovered from, if there is room; log where."""
        if incident.fault is None and incident.kind not in LOST:
            return
        if incident.fault is None or incident.message not in self._messages_before:
            self._add(incident)

    @cached_property
    def _messages_before(self) -> set[str]:
        """Messages that were written before a resume: the run repeats faults of iterations that were not saved."""
        if not self._is_resumed:
            return set()
        paths = self._folder.glob(f"*/{INCIDENT}")
        return {str(json_in(path).get("message")) for path in paths}

    def _add(self, incident: Incident, ended_after: int | None = None) -> None:
        try:
            make_folder(self._folder)
            names = (path.name for path in self._folder.iterdir())
            number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)
            if number <= MAX_INCIDENTS or ended_after is not None:
                self._write(number, incident, ended_after)
        except OSError as error:
            logger.warning("%s: %s The incident is not written.", self._folder, cause(error))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write the incident that has ended the run; a new run that did not start leaves no folder."""
        if result is None and not self._is_resumed:
            return
        self._max_logged = MAX_INCIDENTS
        ended_after = None
        if result is not None:
            ended_after = result.iterations
        if isinstance(error, EnvironmentFault):
            kind = IncidentKind.of_fault(error.place)
            self._add(Incident(kind, str(error), fault=error.place), ended_after)
        elif isinstance(error, ClusterError):
            self._add(Incident(IncidentKind.ACTOR_LOST, str(error)), ended_after)
        elif isinstance(error, ENDS):
            self._add(Incident(IncidentKind.RUN_FAILED, str(error)), ended_after)

    def _write(self, number: int, incident: Incident, ended_after: int | None) -> None:
        folder = self._folder / f"{number:03d}"
        folder.mkdir()
        facts: dict[str, Any] = {"actions": None}
        if incident.fault is not None:
            facts = _facts(incident.fault)
        facts |= {"kind": incident.kind, "message": incident.message, "versions": versions()}
        facts["time"] = time.strftime("%F %T %z")
        facts["ended_after"] = ended_after  # iterations, if it has ended the run
        write_file(folder / INCIDENT, json.dumps(facts).encode())
        report = f"{incident.message}\n\n{facts.get('traceback', incident.details)}"
        write_file(folder / "report.txt", report.encode())
        if number <= self._max_logged:
            text = f"{incident.kind.value}: see {folder}"
            if facts["actions"] is not None:
                text += f": {command('replay', folder, *self._flags)}"
            logger.warning(text)


def _facts(fault: EnvFault) -> dict[str, Any]:
    """Return a fault as JSON values; its actions only if its episode can be played again."""
    facts = {name: getattr(fault, name) for name in fault.__slots__}
    facts["actions"] = None
    if fault.complete:
        facts["dtype"] = str(fault.actions.dtype)
        if fault.actions.size <= MAX_NUMBERS:
            facts["actions"] = fault.actions.tolist()
    return facts
