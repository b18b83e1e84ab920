"""Repairs: an environment that fails ends the run, or is closed and made anew while the others go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import REMEDY
from dppo.envs.make import close_all
from dppo.errors import EnvFault, EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind

FIRST_STEPS = 100  # env steps of a run in which on_env_fault=auto raises, so that bugs are seen
WAITS_S = (1, 2, 4, 8, 16, 30)  # between attempts to make an environment again: a licence may not be free at once
MOST_BYTES = 1 << 24  # of the actions that a fault carries


@dataclass(frozen=True, slots=True)
class Repairs:
    """Decide what becomes of an environment that failed, and make it anew.

    Whether a fault ends the run depends on its place in the run alone: on the segment and the step.
    """

    make: Callable[[int], Any]
    """Creates the environment with this index; raises EnvironmentFault if its constructor does."""
    progress: ActivityRecord
    sampler_id: int
    raise_before: float = 0
    """Steps of each environment before which a fault ends the run; infinite: always."""
    most_in_a_row: int = FIRST_STEPS
    """Episodes of an environment that may fail at their reset, one after the other."""

    def incident(self, error: EnvironmentFault, log: EnvLog, replayed: np.ndarray | None = None) -> Incident:
        """Return the incident of a fault that the run goes on after; raise EnvironmentFault after any other.

        `replayed`: [n, *A] if it happened in a replay of these actions.
        """
        assert error.place is not None
        place = self._placed(error.place, log, replayed)
        in_segment = 0 if log.actions is None else len(log.actions)
        if log.index * in_segment + log.step < self.raise_before:
            raise EnvironmentFault(f"{error.message.rstrip('.')}. {REMEDY}", error.remote_traceback, place) from None
        kind = IncidentKind.BAD_STEP if place.error == "invalid" else IncidentKind.ENV_RAISED
        text = f"{error.message.rstrip('.')}. The environment is rebuilt, and starts a new episode."
        lost = max(0, place.step - 1) if replayed is None else 0  # else another incident has them
        return Incident(kind, text, env=place.env, lost_steps=lost, fault=place)

    def remade(self, env: Any, index: int, log: EnvLog) -> Any:
        """Close `env`, and return another one in its place; try for a minute while its constructor raises."""
        close_all([env])
        for wait_s in (*WAITS_S, 0):
            try:
                self.progress.enter(place_of(Phase.MAKE, self.sampler_id, index))
                return self.make(index)
            except EnvironmentFault as error:
                if not wait_s:
                    raise
                log.incidents.append(Incident(IncidentKind.ENV_RAISED, f"{error.message}.", index, fault=error.place))
                for _ in range(4 * wait_s):
                    self.progress.enter(place_of(Phase.MAKE, self.sampler_id, index))  # it is not hung
                    time.sleep(0.25)
        raise AssertionError("the last attempt returns or raises")

    def _placed(self, found: EnvFault, log: EnvLog, replayed: np.ndarray | None) -> EnvFault:
        """Add the place in the run, and the actions of the episode; those of earlier segments are not known here."""
        actions = None if replayed is None else replayed[: found.step]
        if replayed is None and log.actions is not None:
            end = log.step + 1 if found.step else 0
            actions = log.actions[max(0, end - found.step) : end, found.env]
        if actions is not None:
            actions = actions.copy() if actions.nbytes <= MOST_BYTES else None
        return replace(found, sampler_id=self.sampler_id, segment=log.index, actions=actions)
