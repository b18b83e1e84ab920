"""Environments with `get_state` and `set_state` are brought back to a state by these methods, if that is proven.

Packages have methods of these names that mean something else, or that leave something out. So a replay comes first,
unless `env_state=own` asks for states. If the replay does not lead to the recorded state, the state from before the
last segment is set, and the actions of that segment are repeated. If they lead to the recorded observation, return and
state, the environment is where it was.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from dppo.envs.checks.faults import user_traceback
from dppo.envs.episode import CheckedEnv
from dppo.envs.threads import EnvThread
from dppo.errors import EnvironmentFault
from dppo.plain_data import PLAIN, NotPlain, packed, unpacked
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind, SamplerCarry
from dppo.signals import INTERRUPTIONS
from dppo.user_code import in_a_line

if TYPE_CHECKING:
    from dppo.envs.state_files import StateFiles, StatePlace

MAX_BYTES = 1 << 24  # largest state of an environment
NOTICEABLE = 0.1  # share of the time in the environments that is worth a line
NOTICEABLE_BYTES = 1 << 20  # size of copied files of a state that is worth a line
SEGMENTS = 8  # number of segments after which the share is measured well enough
NO_STATE = gym.Space, gym.Env, EnvSpec, ModuleType, Path
PLAIN_STATE = (
    f"Return at most {MAX_BYTES >> 20} MiB of plain data ({PLAIN}) and paths below scratch_dir or state_folder, give a "
    f"wrapper with other state both methods, or use env_state=off, which replays instead."
)


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
    for index, wrapper in enumerate(wrappers):
        state[f"{type(wrapper).__name__}{' ' * index}"] = {
            name: value
            for name, value in vars(wrapper).items()
            if name != "_saved_kwargs" and not isinstance(value, NO_STATE) and not callable(value)
        }
    return state


def _set_state(env: Any, state: Any, *attributes: dict[str, Any]) -> None:
    *wrappers, owner = _layers(env)
    owner.set_state(state)
    for wrapper, values in zip(wrappers, attributes, strict=True):
        vars(wrapper).update(values)


def _in_its_thread(env: Any, call: Callable[[Any], Any]) -> Any:
    if isinstance(env, EnvThread):
        return env.call(call)
    return call(env)


class EpisodeState(NamedTuple):
    """The state that an environment has returned, and the position in its open episode."""

    state: bytes
    episode: int
    episode_return: float
    length: int


class SegmentStart(NamedTuple):
    """An environment at the start of a segment, from which the actions of the segment lead to its end."""

    env: Any
    """The instance; if there is another one at the end of the segment, that state is not proven."""
    state: EpisodeState


class Proof(NamedTuple):
    """A state of an environment and the actions that led from it, in one segment, to the next state."""

    start: EpisodeState
    actions: np.ndarray
    """[T, *A]"""
    options: Any
    """Options of the resets in the segment."""


@dataclass(eq=False)
class OwnStates:
    """Takes the states of the environments of a sampler at the end of each segment, and sets them to rebuild it."""

    owner: str
    """Prefix of messages: "sampler 3 (mysim:make)"."""
    obs: np.dtype[Any]
    """Dtype of an observation as it is stored."""
    demanded: bool
    """True with env_state=own: states are set without a replay before, and one that cannot be taken is an error."""
    place: StatePlace | None = None
    """Place of the files of states; None: paths are refused."""
    sampler_id: int = 0
    _starts: list[SegmentStart] = field(default_factory=list)
    _unusable: bool = False
    _reported: bool = False
    _copies_reported: bool = False
    _files: StateFiles | None = None
    """Once a state has held a path."""
    _num_taken: int = 0
    _seconds: float = 0.0
    """Time that taking states took, in all segments."""
    _env_seconds: float = 0.0
    """Time in the environments, in all segments."""

    def begin(self, envs: Sequence[CheckedEnv], segment: int) -> None:
        """Take the states at the start of a segment, if they are to be proven."""
        if self.demanded or self._unusable:
            return
        try:
            self._starts = [_start(checked, self._packed(checked, segment)) for checked in envs]
        except INTERRUPTIONS:
            raise
        except BaseException:  # `take` reports it
            self._starts = []

    def take(self, envs: Sequence[CheckedEnv], log: EnvLog) -> dict[str, np.ndarray]:
        """Return packed states and proofs of them, under their names in `SamplerCarry`; nothing after a failure.

        A failure is an incident; an EnvironmentFault in the first segment of the run, if states are demanded.
        """
        if self._unusable:
            return {}
        began = time.perf_counter()
        moment = log.index + 1
        states: list[bytes] = []
        try:
            for checked in envs:
                states.append(self._packed(checked, moment))
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            self._starts = []
            self._report_failure(error, len(states), log)
            return {}
        arrays = {"states": np.frombuffer(packed(states), np.uint8)}
        if not self.demanded:
            proofs = [self._proof(checked, log) for checked in envs]
            arrays["proofs"] = np.frombuffer(packed(proofs), np.uint8)
            self._starts = [
                _start(checked, state) for checked, state in zip(envs, states, strict=True)
            ]
        if self._files is not None:
            self._files.collect(moment)
            self._report_copies(self._files.copied_bytes, log)
            names = self._files.names(moment)
            if names:
                arrays["files"] = np.frombuffer("\n".join(names).encode(), np.uint8)
        self._measure(time.perf_counter() - began, log)
        return arrays

    def _report_copies(self, copied: int, log: EnvLog) -> None:
        if copied >= NOTICEABLE_BYTES and self.sampler_id == 0 and not self._copies_reported:
            self._copies_reported = True
            message = (
                f"{self.owner}: {copied:,} bytes are copied for each state, because the file system of the run folder "
                f"is another one than that of the path from get_state. Set TMPDIR or `state_folder` to a folder there: "
                f"files below it are kept without a copy."
            )
            log.incidents.append(Incident(IncidentKind.OWN_STATE, message))

    def _packed(self, checked: CheckedEnv, moment: int) -> bytes:
        state = packed(self._current(checked), lambda path: self._state_files().keep(path, moment))
        if len(state) > MAX_BYTES:
            raise NotPlain(f"has {len(state):,} bytes")
        return state

    def _current(self, checked: CheckedEnv) -> dict[str, Any]:
        row = np.empty((), self.obs)
        row[...] = checked.last_obs
        return {"obs": row.tobytes(), **_in_its_thread(checked.env, _state)}

    def _kept_path(self, name: str) -> Path:
        return self._state_files().kept(name)

    def _state_files(self) -> StateFiles:
        if self._files is None:
            from dppo.envs.state_files import StateFiles

            if self.place is None:
                raise NotPlain("holds a path, and there is no run folder to keep its files")
            self._files = StateFiles(self.place, self.sampler_id)
        return self._files

    def _proof(self, checked: CheckedEnv, log: EnvLog) -> list[Any] | None:
        """Return how this environment came from the state at the start of the segment to this one, as plain data.

        None if the first state is missing, or the instance has changed: it was made again, or is on standby.
        """
        if not self._starts or log.actions is None:
            return None
        start = self._starts[checked.index]
        if start.env is not checked.env:
            return None
        return [*start.state, np.ascontiguousarray(log.actions[:, checked.index]), log.options]

    def _report_failure(self, error: BaseException, env: int, log: EnvLog) -> None:
        is_plain = isinstance(error, NotPlain)
        problem = str(error) if is_plain else f"raised {in_a_line(error)}"
        message = f"{self.owner}, env {env}: its state {problem}"
        if log.index > 0:
            self._report_once(f"{message}. If its actor is lost, the episode is replayed.", log)
            return
        if self.demanded:
            trace = "" if is_plain else user_traceback(error)
            raise EnvironmentFault(f"{message}. {PLAIN_STATE}", trace) from None
        self._unusable = True  # its methods do not get and set the state
        if self.sampler_id == 0 or self._files is not None:  # other samplers are alike, not hosts
            self._report_once(
                f"{message}. It is not used: episodes are replayed. {PLAIN_STATE}", log
            )

    def _measure(self, seconds: float, log: EnvLog) -> None:
        self._seconds += seconds
        self._num_taken += 1
        log.seconds += seconds
        self._env_seconds += log.seconds
        share = self._seconds / self._env_seconds
        if share > NOTICEABLE and self._num_taken >= SEGMENTS:
            cost = f"{1e3 * self._seconds / self._num_taken:.1f} ms a segment"
            self._report_once(
                f"{self.owner}: get_state takes {cost}, {share:.0%} of its time. Raise `num_steps`.",
                log,
            )

    def report_unproven(self, problem: str, log: EnvLog) -> None:
        """Report that the state of an environment does not bring it back."""
        self._report_once(
            f"{self.owner}: get_state and set_state do not restore the environment ({problem}). They are not used: "
            f"episodes are replayed. Return all that later steps depend on, or use env_state=off.",
            log,
        )

    def _report_once(self, message: str, log: EnvLog) -> None:
        if not self._reported:
            log.incidents.append(Incident(IncidentKind.OWN_STATE, message))
        self._reported = True

    def is_in(self, checked: CheckedEnv, state: bytes) -> bool:
        """Return whether the state of an environment, by `get_state`, equals a state."""
        try:
            return self._equals(self._current(checked), state)
        except INTERRUPTIONS:
            raise
        except BaseException:
            return False

    def _equals(self, current: dict[str, Any], state: bytes) -> bool:
        """Return whether a state is the packed one: files by their content, wherever they are."""
        paths: list[Path] = []
        data = packed(current, partial(_blank, paths))
        if not paths:
            return data == state
        from dppo.envs.linked import are_equal

        kept_paths: list[Path] = []
        kept_data = packed(unpacked(state, self._kept_path), partial(_blank, kept_paths))
        return data == kept_data and all(map(are_equal, paths, kept_paths))

    def lost_files(self, state: bytes) -> str:
        """Return which file of a state is missing or was changed; "" if all can be used."""
        from dppo.envs.state_files import StateLost

        try:
            unpacked(state, self._kept_path)
        except StateLost as error:
            return str(error)
        return ""

    def report_lost(self, problem: str, log: EnvLog) -> None:
        """Report that an episode is replayed, because files of its state cannot be used."""
        self._report_once(f"{self.owner}: {problem}. The episode is replayed.", log)

    def put(self, checked: CheckedEnv, stored: EpisodeState) -> str:
        """Bring an environment to the `stored` state between two segments; return the problem, or ""."""
        problem = self._set(checked, stored.state)
        checked.episode = stored.episode
        checked.episode_return = stored.episode_return
        checked.length = stored.length
        return problem

    def _set(self, checked: CheckedEnv, state: bytes) -> str:
        try:
            obs, *parts = unpacked(state, self._kept_path).values()
            _in_its_thread(checked.env, lambda env: _set_state(env, *parts))
            row: np.ndarray = np.frombuffer(obs, self.obs.base).reshape(self.obs.shape)
            state_after = {"obs": obs, **_in_its_thread(checked.env, _state)}
            is_set = self._equals(state_after, state)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            return f"its state could not be set: {in_a_line(error)}"
        checked.last_obs = row
        checked.find_masks()
        if is_set:
            return ""
        return "get_state does not return what set_state has been given"


def _blank(paths: list[Path], path: Path) -> str:
    """Record a path, and return the name that stands for every path in the state."""
    paths.append(path)
    return ""


def _start(checked: CheckedEnv, state: bytes) -> SegmentStart:
    return SegmentStart(
        checked.env, EpisodeState(state, checked.episode, checked.episode_return, checked.length)
    )


def states_in(carry: SamplerCarry) -> list[EpisodeState]:
    """Unpack the environments' own states from `carry`; none if it has none."""
    if carry.states is None:
        return []
    columns = (carry.episodes, carry.episode_returns, carry.episode_lengths)
    lists = (column.tolist() for column in columns)
    states = unpacked(carry.states.tobytes())
    return [EpisodeState(*values) for values in zip(states, *lists, strict=True)]


def proofs_in(carry: SamplerCarry) -> list[Proof | None]:
    """Return the proof of the state of each environment; None for environments without one."""
    if carry.proofs is None:
        return [None] * len(carry.episodes)
    proofs: list[Proof | None] = []
    for values in unpacked(carry.proofs.tobytes()):
        if values is None:
            proofs.append(None)
        else:
            *state_values, actions, options = values
            proofs.append(Proof(EpisodeState(*state_values), actions, options))
    return proofs
