"""Repairs: an environment that failed is made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dppo.attempts import WAITS_S, attempted
from dppo.envs.activity import Phase, place_of
from dppo.envs.checks.faults import REMEDY
from dppo.envs.checks.returned import OLD_API, ONE_REWARD
from dppo.envs.closing import close_all
from dppo.envs.episode import CheckedEnv, GroupSettings
from dppo.errors import EnvFault, EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind

# texts in messages about results of a wrong form
WRONG_FORM = (" instead of ", "is not a boolean", "was among `agents`")
UNKNOWN_OPTIONS = "unexpected keyword argument 'options'"  # of a reset
FIRST_STEPS = 100  # env steps of a run in which on_env_fault=auto raises, so that bugs are seen
MAX_BYTES = 1 << 24  # of the actions that a fault carries


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """The faults of environments that a run survives, chosen by their places in the run alone."""

    raise_before: float = 0
    """Steps of each environment before which a fault ends the run; infinite: always."""
    max_in_a_row: int = FIRST_STEPS
    """Episodes of an environment that may fail at their reset, one after the other."""


@dataclass(frozen=True, slots=True)
class Repairs:
    """Decide what becomes of an environment that failed, and make it again."""

    policy: FaultPolicy
    settings: GroupSettings
    make: Callable[[int], Any]
    """Creates the environment with this index; raises EnvironmentFault if its constructor does."""

    def repair(
        self,
        checked: CheckedEnv,
        error: EnvironmentFault,
        log: EnvLog,
        replayed: np.ndarray | None = None,
    ) -> None:
        """Close an environment that failed, and put another one in its place; raise EnvironmentFault to end the run.

        Try for a minute while the constructor raises. `replayed`: [n, *A] if it failed in a replay of these actions.
        """
        log.incidents.append(self._incident(error, log, replayed))
        failed = checked.env
        checked.env = None
        close_all([failed])

        def note(constructor: EnvironmentFault, _: float) -> None:
            text = f"{constructor.message}."
            log.incidents.append(
                Incident(IncidentKind.ENV_RAISED, text, checked.index, fault=constructor.place)
            )

        def make_again() -> None:
            show()
            checked.take(self.make(checked.index))

        making = place_of(Phase.MAKE, self.settings.sampler_id, checked.index)
        show = partial(self.settings.progress.make, making)
        attempted(make_again, EnvironmentFault, note, show, WAITS_S)

    def _incident(
        self, error: EnvironmentFault, log: EnvLog, replayed: np.ndarray | None
    ) -> Incident:
        """Return the incident of a fault that the run survives; raise EnvironmentFault for any other.

        The incident holds the actions of the episode; actions of earlier segments are not known here.
        """
        assert error.place is not None
        actions = _actions_up_to(error.place, log, replayed)
        place = replace(
            error.place, sampler_id=self.settings.sampler_id, segment=log.index, actions=actions
        )
        message = error.message.rstrip(".")
        segment_length = 0 if log.actions is None else len(log.actions)
        if log.index * segment_length + log.step < self.policy.raise_before:
            remedy = _remedy(message, place, is_first=log.index == 0 and log.step == 0)
            raise EnvironmentFault(f"{message}{remedy}", error.remote_traceback, place) from None
        kind = IncidentKind.of_fault(place)
        # the lost steps of a replay are in another incident
        lost_steps = max(0, place.step - 1) if replayed is None else 0
        return Incident(kind, f"{message}.", env=place.env, lost_steps=lost_steps, fault=place)


def _actions_up_to(place: EnvFault, log: EnvLog, replayed: np.ndarray | None) -> np.ndarray | None:
    """Return a copy of the actions of an episode up to its fault; None if they are not known, or too many."""
    if replayed is not None:
        actions = replayed[: place.step]
    elif log.actions is not None:
        # a fault in a reset has no actions
        end = log.step + 1 if place.step else 0
        actions = log.actions[max(0, end - place.step) : end, place.env]
    else:
        return None
    if actions.nbytes <= MAX_BYTES:
        return actions.copy()
    return None


def _remedy(message: str, place: EnvFault, *, is_first: bool) -> str:
    """Return what to do about a fault that ends the run; a new environment does not help where each one fails.

    Args:
        is_first: the fault is in the first reset or step of a run.
    """
    if OLD_API.ends(message) or ONE_REWARD.ends(message):
        return ""
    if place.error == "TypeError" and UNKNOWN_OPTIONS in message:
        return ". `set_env` sets options of `reset`. Give `reset` the parameter `options`, or leave `set_env` out."
    is_wrong_form = place.error == "invalid" and any(words in message for words in WRONG_FORM)
    if is_first or is_wrong_form:
        return ". Correct the environment."
    return f". {REMEDY}"
