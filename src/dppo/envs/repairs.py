"""Repairs: an environment that failed is made anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import REMEDY
from dppo.envs.checks.returned import LASTING
from dppo.envs.episode import CheckedEnv
from dppo.envs.make import close_all
from dppo.errors import EnvFault, EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind

WRONG_FORM = " instead of ", "is not a boolean", "was among `agents`"  # in messages about results of a wrong form
UNKNOWN_OPTIONS = "unexpected keyword argument 'options'"  # of a reset
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

    def repair(self, one: CheckedEnv, error: EnvironmentFault, log: EnvLog, replayed: np.ndarray | None = None) -> None:
        """Close an environment that failed, and put another one in its place; raise EnvironmentFault to end the run.

        Try for a minute while the constructor raises. `replayed`: [n, *A] if it failed in a replay of these actions.
        """
        log.incidents.append(self._incident(error, log, replayed))
        (failed, one.env), env = (one.env, None), one.index
        close_all([failed])
        for wait_s in (*WAITS_S, 0):
            try:
                self.progress.enter(place_of(Phase.MAKE, self.sampler_id, env))
                return one.take(self.make(env))
            except EnvironmentFault as again:
                if not wait_s:
                    raise
                log.incidents.append(Incident(IncidentKind.ENV_RAISED, f"{again.message}.", env, fault=again.place))
                for _ in range(4 * wait_s):
                    self.progress.enter(place_of(Phase.MAKE, self.sampler_id, env))  # it is not hung
                    time.sleep(0.25)
        return None

    def _incident(self, error: EnvironmentFault, log: EnvLog, replayed: np.ndarray | None) -> Incident:
        """Return the incident of a fault that the run goes on after; raise EnvironmentFault after any other.

        It holds the actions of the episode; those of earlier segments are not known here.
        """
        found = error.place
        assert found is not None
        actions = None if replayed is None else replayed[: found.step]
        if replayed is None and log.actions is not None:
            end = log.step + 1 if found.step else 0
            actions = log.actions[max(0, end - found.step) : end, found.env]
        if actions is not None:
            actions = actions.copy() if actions.nbytes <= MOST_BYTES else None
        place = replace(found, sampler_id=self.sampler_id, segment=log.index, actions=actions)
        in_segment, message = 0 if log.actions is None else len(log.actions), error.message.rstrip(".")
        if log.index * in_segment + log.step < self.raise_before:
            raise EnvironmentFault(f"{message}{_remedy(message, place)}", error.remote_traceback, place) from None
        kind = IncidentKind.BAD_STEP if place.error == "invalid" else IncidentKind.ENV_RAISED
        text = f"{message}. The environment is rebuilt, and starts a new episode."
        lost = max(0, place.step - 1) if replayed is None else 0  # else another incident has them
        return Incident(kind, text, env=place.env, lost_steps=lost, fault=place)


def _remedy(message: str, place: EnvFault) -> str:
    """Return what to do about a fault that ends the run; a new environment does not help where each one fails."""
    if message.endswith(LASTING):
        return ""
    if place.error == "invalid" and any(words in message for words in WRONG_FORM):
        return ". Correct the environment."
    if place.error == "TypeError" and UNKNOWN_OPTIONS in message:
        return ". `set_env` sets options of `reset`. Give `reset` the parameter `options`, or leave `set_env` out."
    return f". {REMEDY}"
