"""EnvFaults: counts the faults of environments that a run survives, and ends a run in which there are too many."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np

from dppo.config.parts.env import rate_above
from dppo.engine.collector import Collected
from dppo.engine.ledger import ReplayLedger
from dppo.errors import EnvFault, TooManyFaults, counted
from dppo.log import logger
from dppo.ppo.exchange.records import Incident, IncidentKind

# shortest time from which a rate is extrapolated: faults within a few seconds may be a burst
MIN_WATCHED_S = 60.0
LOGGED_EACH = 3  # faults of a kind that are logged one by one; later only the 4th, 8th, 16th ...


class EnvFaults:
    """Counts the faults of each iteration before it is learned from."""

    def __init__(
        self,
        ledger: ReplayLedger,
        setting: str = "unlimited",
        budget: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """Survive `budget`, a number of faults and the seconds for them; `setting` is the text of the user."""
        self._ledger = ledger
        self._allowed = setting
        self._max_faults, self._window_s = budget
        self._began = time.monotonic()
        self._times: deque[float] = deque()
        self._kinds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Faults by environment and kind, "sampler 3, env 0: ValueError in step", and the "steps lost": of abandoned
        episodes, without the steps that failed."""

    def checked(self, collected: Collected, *, is_repeated: bool = False) -> Collected:
        """Return `collected` with all actions of episodes that failed; raise TooManyFaults if these are too many.

        Faults of segments that are collected again happen again, and were counted: `is_repeated`.
        """
        if not any(_faulty(report.incidents) for report in collected.reports):
            return collected
        completed = self._completed_in(collected)
        if not is_repeated:
            self._check_budget([*chain(*(report.incidents for report in completed.reports))])
        return completed

    def _completed_in(self, collected: Collected) -> Collected:
        reports = []
        for report in collected.reports:
            incidents = [
                replace(incident, fault=self.completed(incident.fault))
                for incident in report.incidents
            ]
            reports.append(replace(report, incidents=tuple(incidents)))
        return replace(collected, reports=reports)

    def _check_budget(self, incidents: list[Incident]) -> None:
        now = time.monotonic()
        for incident in _faulty(incidents):
            self._times.append(now)
            while self._times[0] < now - self._window_s:
                self._times.popleft()
            if len(self._times) > self._max_faults:
                error = self._too_many(incident)
                error.other_incidents = [other for other in incidents if other is not incident]
                raise error

    def log(self, incident: Incident) -> None:
        """Log an incident, unless the like has often been logged; count it if it is a fault."""
        fault = incident.fault
        text = incident.message
        kind = ""
        if incident.kind is IncidentKind.PROGRAM_RESTARTED:
            kind = "restarts"
        elif fault is not None:
            kind = f"{fault.error} in {fault.phase}"
            text += " The environment is rebuilt, and starts a new episode."
            self.counts[f"sampler {fault.sampler_id}, env {fault.env}: {kind}"] += 1
            self.counts["steps lost"] += incident.lost_steps
        if kind:
            self._kinds[kind] += 1
            times = self._kinds[kind]
            if times > LOGGED_EACH:
                if times & (times - 1):  # no power of 2
                    return
                text += f" ({kind}: {times:,} so far)"
        logger.warning("%s", text)

    def completed(self, fault: EnvFault | None) -> EnvFault | None:
        """Return `fault` with the actions of earlier segments, which the ledger knows."""
        if fault is None or fault.actions is None or fault.complete:
            return fault
        earlier_actions = self._ledger.actions_before(
            fault.sampler_id, fault.segment, fault.env, fault.episode
        )
        if earlier_actions is None:
            return fault
        return replace(fault, actions=np.concatenate([earlier_actions, fault.actions]))

    def _too_many(self, last: Incident) -> TooManyFaults:
        assert last.fault is not None
        watched_s = min(self._window_s, self._times[-1] - self._began)
        rate = rate_above(3600 * len(self._times) / max(MIN_WATCHED_S, watched_s))
        error = TooManyFaults(
            f"env_faults={self._allowed}: {counted(len(self._times), 'fault')} of environments in {watched_s:.0f} s. "
            f"Correct the environment, or use `env_faults={rate}`. The last one: {last.message}",
            last.fault.traceback,
            last.fault,
        )
        error.allowing_rate = rate
        return error


def _faulty(incidents: Iterable[Incident]) -> list[Incident]:
    return [incident for incident in incidents if incident.fault]
