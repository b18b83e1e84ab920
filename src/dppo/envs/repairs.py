"""Bring environments back: make one that failed anew, and set one that was lost to a state of its own."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import REMEDY, user_traceback
from dppo.envs.checks.returned import LASTING
from dppo.envs.episode import CheckedEnv
from dppo.envs.make import close_all
from dppo.envs.threads import EnvThread
from dppo.errors import EnvFault, EnvironmentFault
from dppo.plain_data import PLAIN, NotPlain, packed, unpacked
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.user_code import in_a_line

WRONG_FORM = " instead of ", "is not a boolean", "was among `agents`"  # in messages about results of a wrong form
FIRST_STEPS = 100  # env steps of a run in which on_env_fault=auto raises, so that bugs are seen
WAITS_S = (1, 2, 4, 8, 16, 30)  # between attempts to make an environment again: a licence may not be free at once
MOST_BYTES = 1 << 24  # of the actions that a fault carries, and of the state of an environment
NOTICEABLE, SEGMENTS = 0.1, 8  # share of the time in the environments, after so many segments, that is worth a line
NO_STATE = gym.Space, gym.Env, EnvSpec, ModuleType
PLAIN_STATE = (
    f"Return at most {MOST_BYTES >> 20} MiB of plain data ({PLAIN}), give a wrapper with other state both methods, or "
    f"use env_state=off, which replays instead."
)


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
    return f". {REMEDY}"


# ------------------------------------------------------------------ states of their own


def offers_state(env: Any) -> bool:
    """Return whether an environment, or a wrapper of it, has `get_state()` and `set_state(state)`."""
    return bool(_in_its_thread(env, _layers))


def _layers(env: Any) -> list[Any]:
    """Return the wrappers, outermost first, up to what has `get_state` and `set_state`; empty if nothing has."""
    layers = [env]
    while not _has_state(layers[-1]):
        if not isinstance(layers[-1], gym.Wrapper):
            return []
        layers.append(layers[-1].env)
    return layers


def _has_state(layer: Any) -> bool:
    try:  # the methods of these names that a simulator may have had before need not be meant
        inspect.signature(layer.get_state).bind()
        inspect.signature(layer.set_state).bind(None)
    except (AttributeError, TypeError, ValueError):
        return False
    return hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state")


def _state(env: Any) -> dict[str, Any]:
    """Return the state of an environment, and what may be state of the wrappers outside of it, outermost first.

    Gymnasium's wrappers also keep the arguments of their constructor, to be made again.
    """
    *wrappers, owner = _layers(env)
    state = {"get_state()": owner.get_state()}
    for at, wrapper in enumerate(wrappers):
        own = {name: value for name, value in vars(wrapper).items() if not isinstance(value, NO_STATE)}
        plain = {name: value for name, value in own.items() if name != "_saved_kwargs" and not callable(value)}
        state[f"{type(wrapper).__name__}{' ' * at}"] = plain
    return state


def _set_state(env: Any, state: Any, *attributes: dict[str, Any]) -> None:
    *wrappers, owner = _layers(env)
    owner.set_state(state)
    for wrapper, own in zip(wrappers, attributes, strict=True):
        vars(wrapper).update(own)


def _in_its_thread(env: Any, call: Callable[[Any], Any]) -> Any:
    return env.call(call) if isinstance(env, EnvThread) else call(env)


class OwnStates:
    """Takes the states of the environments of a sampler at the end of each segment, and sets them to rebuild it."""

    def __init__(self, owner: str, obs: np.dtype[Any]) -> None:
        """Take note of the prefix of messages, "sampler 3 (mysim:make)", and of the dtype of an observation."""
        self._owner, self._row = owner, np.empty((), obs)
        self._seconds = self._of_seconds = 0.0
        self._taken, self._said = 0, False

    def take(self, envs: Sequence[CheckedEnv], log: EnvLog) -> np.ndarray | None:
        """Return the states as packed bytes [n]; None, with an incident, if that fails in a later segment.

        Raise EnvironmentFault if it fails in the first segment of the run.
        """
        began, states = time.perf_counter(), list[bytes]()
        try:
            for one in envs:
                self._row[...] = one.last_obs
                state = packed({"obs": self._row.tobytes(), **_in_its_thread(one.env, _state)})
                if len(state) > MOST_BYTES:
                    raise NotPlain(f"has {len(state):,} bytes")
                states.append(state)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            plain = isinstance(error, NotPlain)
            what = f"{self._owner}, env {len(states)}: its state {error if plain else f'raised {in_a_line(error)}'}"
            if log.index == 0:
                raise EnvironmentFault(f"{what}. {PLAIN_STATE}", "" if plain else user_traceback(error)) from None
            self._say(f"{what}. If its actor is lost, the episode is replayed.", log)
            return None
        self._seconds, self._taken = self._seconds + time.perf_counter() - began, self._taken + 1
        log.seconds += time.perf_counter() - began
        self._of_seconds += log.seconds
        share = self._seconds / self._of_seconds
        if share > NOTICEABLE and self._taken >= SEGMENTS:
            each = f"{1e3 * self._seconds / self._taken:.1f} ms a segment for {sum(map(len, states)):,} bytes"
            self._say(f"{self._owner}: get_state takes {each}, {share:.0%} of its time. Raise `num_steps`.", log)
        return np.frombuffer(packed(states), np.uint8)

    def _say(self, message: str, log: EnvLog) -> None:  # once
        if not self._said:
            log.incidents.append(Incident(IncidentKind.OWN_STATE, message))
        self._said = True

    def of(self, carry: SamplerCarry) -> list[bytes]:
        """Return the state of each environment; none if `carry` has none."""
        return [] if carry.states is None else unpacked(carry.states.tobytes())

    def put(self, env: CheckedEnv, state: bytes, carry: SamplerCarry, at: int) -> str:
        """Bring environment `at` to its state between two segments; return what is wrong then, "" if nothing is."""
        try:
            obs, *wanted = unpacked(state).values()
            _in_its_thread(env.env, lambda own: _set_state(own, *wanted))
            row = np.frombuffer(obs, self._row.dtype).reshape(self._row.shape)
            found = packed({"obs": obs, **_in_its_thread(env.env, _state)})
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            return f"its state could not be set: {in_a_line(error)}"
        env.episode, env.last_obs = int(carry.episodes[at]), row
        env.episode_return, env.length = float(carry.episode_returns[at]), int(carry.episode_lengths[at])
        return "" if found == state else "get_state does not return what set_state has been given"
