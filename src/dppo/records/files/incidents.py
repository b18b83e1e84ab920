"""Incidents of a run, each in a folder: what happened, and what is needed to play the episode again."""

import json
import time
from pathlib import Path

from dppo.config import Config
from dppo.config.trust import code_named_by
from dppo.errors import ClusterError, EnvironmentFault
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.records.files.disk import cause, make_folder, write_file
from dppo.records.files.run_folder import versions
from dppo.records.observer import Observer
from dppo.records.result import Result

FILE = "incident.json"
MOST, MOST_NUMBERS = 50, 2**18  # folders of a run; numbers in the actions of one
SAID = 3  # folders that are named as they are written, besides that of the end
LOST = (IncidentKind.ACTOR_LOST, IncidentKind.ACTOR_HUNG)


class IncidentWriter(Observer):
    """Writes incidents/001, 002, ... for each environment that fails, and each actor that dies or hangs."""

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
                write_file(folder / FILE, json.dumps(values | {"time": time.strftime("%F %T %z")}).encode())
                report = f"{incident.message}\n\n{values.get('traceback', incident.details)}"
                write_file(folder / "report.txt", report.encode())
                if number <= self._said:
                    again = "" if actions is None else f": dppo replay {folder}{self._trust}"
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
