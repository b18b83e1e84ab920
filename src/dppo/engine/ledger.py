"""ReplayLedger: the data from which every sampler can be rebuilt. Pure: no Ray, no clock."""

import json
import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from dppo.errors import GIVEN_UP
from dppo.plain_data import unpacked
from dppo.ppo.exchange.records import FatalStep, Rebuild, SamplerCarry, SegmentReport
from dppo.ppo.networks.network import NetworkSpec

MAX_ACTION_BYTES = 1 << 24  # largest actions of an episode that are reported with a fault

Pieces = tuple[np.ndarray, ...]


class _Moment(NamedTuple):
    """One sampler between two segments."""

    carry: SamplerCarry
    actions: tuple[Pieces, ...]
    """For each environment, the actions since its reset, one piece per segment."""


class ReplayLedger:
    """Stores the carry of each sampler and the actions of its open episodes, by the index of the next segment.

    Collectors record segments when they arrive. With policy lag K, segments up to i + K may have arrived during the
    update on segment i: the moments before and after each of these are stored, so that any can be collected again.
    """

    def __init__(
        self, num_samplers: int, *, replay: bool, policy_lag: int = 0, sets_states: bool = False
    ) -> None:
        self.replays = replay
        """False if a rebuilt sampler starts new episodes."""
        # True if environments set the states that they gave, without a replay
        self._sets_states = sets_states
        self._stored = policy_lag + 2  # moments of each sampler
        # [sampler][index]
        self._moments: list[dict[int, _Moment]] = [{} for _ in range(num_samplers)]
        # by sampler and index of the segment: a segment that is made again leaves them out at once
        self._given_up: dict[tuple[int, int], tuple[FatalStep, ...]] = {}

    def record(self, report: SegmentReport) -> None:
        """Record a received segment; one that was collected again replaces the first."""
        if report.incidents:
            self._record_given_up(report)
        moments = self._moments[report.sampler_id]
        last = report.index + 1
        moments[last] = _Moment(report.carry, _continued(moments.get(report.index), report))
        # The stored moments are consecutive, because the segments of a sampler arrive in order.
        moments.pop(last - self._stored, None)
        while moments.pop(last + 1, None):
            last += 1

    def _record_given_up(self, report: SegmentReport) -> None:
        faults = [incident.fault for incident in report.incidents if incident.fault is not None]
        steps = tuple(
            FatalStep(fault.env, fault.episode, fault.step)
            for fault in faults
            if fault.error == GIVEN_UP
        )
        if steps:
            self._given_up[report.sampler_id, report.index] = steps

    def given_up(self, sampler_id: int, index: int) -> tuple[FatalStep, ...]:
        """Return the steps that segment `index` of a sampler leaves out, as they were given up when it was made."""
        return self._given_up.get((sampler_id, index), ())

    @property
    def has_given_up(self) -> bool:
        """True if some segment leaves out a step."""
        return bool(self._given_up)

    def given_up_before(self, index: int) -> list[list[int]]:
        """Return the steps that were given up before segment `index`, for a checkpoint."""
        return sorted(
            [sampler, segment, *step]
            for (sampler, segment), steps in self._given_up.items()
            for step in steps
            if segment < index
        )

    def load_given_up(self, stored: list[list[int]]) -> None:
        """Restore the result of `given_up_before`; raise TypeError or ValueError if it is damaged."""
        self._given_up.clear()
        for sampler, segment, *step in stored:
            place = (int(sampler), int(segment))
            env, episode, number = map(int, step)
            steps = self._given_up.get(place, ())
            self._given_up[place] = (*steps, FatalStep(env, episode, number))

    def rebuild(self, sampler_id: int, index: int) -> Rebuild | None:
        """Return how to bring `sampler_id` to the start of segment `index`; None for the start of the run."""
        moment = self._moments[sampler_id].get(index)
        if moment is None:
            assert index == 0, (
                f"segment {index} of sampler {sampler_id} can no longer be collected again"
            )
            return None
        # The files of a state may not be where the sampler is rebuilt: then the episode is replayed.
        is_set = self._is_set(moment.carry) and moment.carry.files is None
        if not self.replays or is_set:
            return Rebuild(moment.carry, ())
        return Rebuild(moment.carry, tuple(map(_joined, moment.actions)))

    def actions_before(
        self, sampler_id: int, index: int, env: int, episode: int
    ) -> np.ndarray | None:
        """Return the actions [n, *A] of an episode before segment `index`; None if it started later, or if too many."""
        moment = self._moments[sampler_id].get(index)
        if moment is None or moment.carry.episodes[env] != episode:
            return None
        pieces = moment.actions[env]
        if sum(piece.nbytes for piece in pieces) > MAX_ACTION_BYTES:
            return None
        return _joined(pieces)

    def open_steps(self, sampler_id: int, index: int) -> float:
        """Return the env steps to replay to rebuild a sampler before segment `index`; infinite if replay is off."""
        moment = self._moments[sampler_id].get(index)
        if moment is None or self._is_set(moment.carry):
            return 0
        steps = int(moment.carry.episode_lengths.sum())
        if self.replays or not steps:
            return steps
        return math.inf

    def _is_set(self, carry: SamplerCarry) -> bool:
        return self._sets_states and carry.states is not None

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Return the state of all samplers before segment `index` as named arrays, for a checkpoint."""
        arrays = {}
        for sampler, moments in enumerate(self._moments):
            moment = moments.get(index)
            if moment is None:
                assert index == 0, f"the state before segment {index} is no longer stored"
                continue
            for name in CARRY_FIELDS:
                array = getattr(moment.carry, name)
                if array is not None:
                    arrays[f"{sampler}.{name}"] = array
            for env, pieces in enumerate(moment.actions):
                arrays[f"{sampler}.actions.{env}"] = _joined(pieces)
        return arrays

    def load(self, arrays: dict[str, np.ndarray], index: int) -> None:
        """Restore the result of `arrays(index)`."""
        for sampler, moments in enumerate(self._moments):
            moments.clear()
            if f"{sampler}.episodes" not in arrays:
                continue
            stored = {
                name: arrays[f"{sampler}.{name}"]
                for name in CARRY_FIELDS
                if f"{sampler}.{name}" in arrays
            }
            carry = SamplerCarry(**stored)
            actions = (arrays[f"{sampler}.actions.{env}"] for env in range(len(carry.episodes)))
            moments[index] = _Moment(carry, tuple((pieces,) for pieces in actions))

    def check(self, index: int, envs: int, spec: NetworkSpec) -> None:
        """Raise ValueError if the state before segment `index` does not fit samplers of `envs` environments each."""
        if not index:
            return
        action = np.dtype(
            (spec.distribution.action_dtype(spec.dtype), spec.distribution.action_shape)
        )
        memory_shape = None
        if spec.state_size:
            memory_shape = (envs, spec.state_size)
        for sampler, moments in enumerate(self._moments):
            moment = moments.get(index)
            if moment is None or not _fits(moment, envs, memory_shape, action):
                raise ValueError(f"the state of sampler {sampler} is missing or does not fit")


CARRY_FIELDS = [field.name for field in fields(SamplerCarry)]
REQUIRED_FIELDS = CARRY_FIELDS[:5]
# kinds of NumPy's dtypes, in the order of REQUIRED_FIELDS
REQUIRED_KINDS = ["i", "f", "i", "f", "u"]


def _continued(last_moment: _Moment | None, report: SegmentReport) -> tuple[Pieces, ...]:
    """Return the actions of each open episode: with the earlier ones, if it was open before the segment."""
    if last_moment is None:
        return tuple((new_actions,) for new_actions in report.open_actions)
    carry = report.carry
    actions: list[Pieces] = []
    episodes = zip(last_moment.carry.episodes.tolist(), carry.episodes.tolist(), strict=True)
    for env, (episode_before, episode) in enumerate(episodes):
        new_actions = report.open_actions[env]
        goes_on = episode_before == episode
        if goes_on and carry.states is not None:
            # With a state of its own, an endless episode needs no actions, but they can show what led to a fault.
            goes_on = bool(carry.episode_lengths[env] * new_actions[:1].nbytes <= MAX_ACTION_BYTES)
        actions.append((*last_moment.actions[env], new_actions) if goes_on else (new_actions,))
    return tuple(actions)


def _fits(
    moment: _Moment,
    num_envs: int,
    memory_shape: tuple[int, int] | None,
    action_dtype: np.dtype[Any],
) -> bool:
    """Return whether a moment, which may come from a stranger's checkpoint, fits a sampler of these sizes."""
    carry = moment.carry
    columns = [getattr(carry, name) for name in REQUIRED_FIELDS]
    kinds = [column.dtype.kind for column in columns]
    if kinds != REQUIRED_KINDS or any(column.shape != (num_envs,) for column in columns):
        return False
    if min(carry.episodes.min(), carry.episode_lengths.min()) < 0:
        return False
    if memory_shape is not None and getattr(carry.memory, "shape", None) != memory_shape:
        return False
    return (
        _are_states(carry.states, num_envs)
        and _are_proofs(carry.proofs, num_envs, action_dtype)
        and all(_are_actions(_joined(pieces), action_dtype) for pieces in moment.actions)
        and _are_options(carry.options, num_envs)
    )


def _are_states(states: np.ndarray | None, num_envs: int) -> bool:
    return states is None or list(map(type, unpacked(states.tobytes()))) == num_envs * [bytes]


def _are_options(options: np.ndarray | None, num_envs: int) -> bool:
    if options is None:
        return True
    values = json.loads(options.tobytes())
    return len(values) == num_envs and all(isinstance(value, dict | None) for value in values)


def _are_proofs(proofs: np.ndarray | None, num_envs: int, action_dtype: np.dtype[Any]) -> bool:
    """Return whether these are proofs of the states of `num_envs` environments, as `OwnStates.take` packs them."""
    if proofs is None:
        return True
    values = unpacked(proofs.tobytes())
    if not isinstance(values, list) or len(values) != num_envs:
        return False
    return all(proof is None or _is_proof(proof, action_dtype) for proof in values)


def _is_proof(proof: Any, action_dtype: np.dtype[Any]) -> bool:
    kinds = [bytes, int, float, int, np.ndarray]
    if not isinstance(proof, list) or len(proof) != 6 or list(map(type, proof[:5])) != kinds:
        return False
    _, episode, _, length, actions, options = proof
    return (
        _are_actions(actions, action_dtype)
        and min(episode, length) >= 0
        and isinstance(options, dict | None)
    )


def _are_actions(actions: np.ndarray, action_dtype: np.dtype[Any]) -> bool:
    """Return whether `actions` is an array [n, *A]; `action_dtype` has the shape A."""
    return (
        actions.ndim == 1 + len(action_dtype.shape)
        and np.dtype((actions.dtype, actions.shape[1:])) == action_dtype
    )


def _joined(pieces: Pieces) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces)
