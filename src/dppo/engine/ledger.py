"""ReplayLedger: the data from which every sampler can be rebuilt. Pure: no Ray, no clock."""

import json
import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from dppo.plain_data import unpacked
from dppo.ppo.exchange.records import Rebuild, SamplerCarry, SegmentReport
from dppo.ppo.networks.network import NetworkSpec

MOST_BYTES = 1 << 24  # of actions that are reported with a fault

Pieces = tuple[np.ndarray, ...]


class _Moment(NamedTuple):
    """One sampler between two segments."""

    carry: SamplerCarry
    actions: tuple[Pieces, ...]
    """For each environment, the actions since its reset, one piece per segment."""


class ReplayLedger:
    """Keeps the carry of each sampler and the actions of its open episodes, by the index of the next segment.

    Collectors record segments when they arrive. With policy lag K, segments up to i + K may have arrived during the
    update on segment i: the moments before and after each of these are kept, so that any can be collected again.
    """

    def __init__(self, num_samplers: int, *, replay: bool, policy_lag: int = 0, sets_states: bool = False) -> None:
        self.replays = replay  # False if a rebuilt sampler starts new episodes
        self._sets_states = sets_states  # those that environments have themselves, without a replay
        self._kept = policy_lag + 2
        self._moments: list[dict[int, _Moment]] = [{} for _ in range(num_samplers)]  # [sampler][index]

    def record(self, report: SegmentReport) -> None:
        """Record a received segment; one that was collected again replaces the first."""
        moments, last = self._moments[report.sampler_id], report.index + 1
        before, carry = moments.get(report.index), report.carry
        actions: list[Pieces] = []
        for env, new in enumerate(report.open_actions):
            goes_on = before is not None and before.carry.episodes[env] == carry.episodes[env]
            # With a state of its own, an endless episode needs no actions, but they can show what led to a fault.
            goes_on &= carry.states is None or carry.episode_lengths[env] * new[:1].nbytes <= MOST_BYTES
            actions.append((*before.actions[env], new) if before is not None and goes_on else (new,))
        moments[last] = _Moment(carry, tuple(actions))
        for index in [index for index in moments if not last - self._kept < index <= last]:
            del moments[index]

    def rebuild(self, sampler_id: int, index: int) -> Rebuild | None:
        """Return how to bring `sampler_id` to the start of segment `index`; None for the start of the run."""
        moment = self._moments[sampler_id].get(index)
        if moment is None:
            assert index == 0, f"segment {index} of sampler {sampler_id} can no longer be collected again"
            return None
        replays = self.replays and not self._is_set(moment.carry)
        return Rebuild(moment.carry, tuple(map(_in_one, moment.actions)) if replays else ())

    def actions_before(self, sampler_id: int, index: int, env: int, episode: int) -> np.ndarray | None:
        """Return the actions [n, *A] of an episode before segment `index`; None if it started later, or if too many."""
        moment = self._moments[sampler_id].get(index)
        if moment is None or moment.carry.episodes[env] != episode:
            return None
        return _in_one(moment.actions[env]) if sum(one.nbytes for one in moment.actions[env]) <= MOST_BYTES else None

    def open_steps(self, sampler_id: int, index: int) -> float:
        """Return the env steps to replay to rebuild a sampler before segment `index`; infinite if replay is off."""
        moment = self._moments[sampler_id].get(index)
        steps = 0 if moment is None or self._is_set(moment.carry) else int(moment.carry.episode_lengths.sum())
        return steps if self.replays or not steps else math.inf

    def _is_set(self, carry: SamplerCarry) -> bool:
        return self._sets_states and carry.states is not None

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Return the state of all samplers before segment `index` as named arrays, for a checkpoint."""
        arrays = {}
        for sampler, moments in enumerate(self._moments):
            moment = moments.get(index)
            if moment is None:
                assert index == 0, f"the state before segment {index} is no longer kept"
                continue
            for field in fields(moment.carry):
                if getattr(moment.carry, field.name) is not None:
                    arrays[f"{sampler}.{field.name}"] = getattr(moment.carry, field.name)
            for env, pieces in enumerate(moment.actions):
                arrays[f"{sampler}.actions.{env}"] = _in_one(pieces)
        return arrays

    def load(self, arrays: dict[str, np.ndarray], index: int) -> None:
        """Restore the result of `arrays(index)`."""
        for sampler, moments in enumerate(self._moments):
            moments.clear()
            if f"{sampler}.episodes" not in arrays:
                continue
            named = {field.name: f"{sampler}.{field.name}" for field in fields(SamplerCarry)}
            carry = SamplerCarry(**{name: arrays[key] for name, key in named.items() if key in arrays})
            actions = tuple((arrays[f"{sampler}.actions.{env}"],) for env in range(len(carry.episodes)))
            moments[index] = _Moment(carry, actions)

    def check(self, index: int, envs: int, spec: NetworkSpec) -> None:
        """Raise ValueError if the state before segment `index` does not fit samplers of `envs` environments each."""
        action = np.dtype((spec.distribution.action_dtype(spec.dtype), spec.distribution.action_shape))
        for sampler, moment in enumerate(moments.get(index) for moments in self._moments if index):
            columns = [getattr(moment.carry, field.name) for field in fields(SamplerCarry)[:5]] if moment else []
            fits = "".join(one.dtype.kind for one in columns) == "ififu" and {one.shape for one in columns} == {(envs,)}
            if moment is not None and fits:
                fits = min(moment.carry.episodes.min(), moment.carry.episode_lengths.min()) >= 0
                fits &= not spec.state_size or getattr(moment.carry.memory, "shape", None) == (envs, spec.state_size)
                states = moment.carry.states
                fits &= states is None or list(map(type, unpacked(states.tobytes()))) == envs * [bytes]
                fits &= _are_proofs(moment.carry.proofs, envs, action)
                found = {(one.ndim, np.dtype((one.dtype, one.shape[1:]))) for one in map(_in_one, moment.actions)}
                fits &= found == {(1 + len(action.shape), action)}
            if moment is not None and moment.carry.options is not None:
                options = json.loads(moment.carry.options.tobytes())
                fits &= len(options) == envs and all(one is None or isinstance(one, dict) for one in options)
            if not fits:
                raise ValueError(f"the state of sampler {sampler} is missing or does not fit")


def _are_proofs(proofs: np.ndarray | None, envs: int, action: np.dtype[Any]) -> bool:
    """Return whether these are proofs of the states of so many environments, as `OwnStates.take` packs them."""
    if proofs is None:
        return True
    found = unpacked(proofs.tobytes())
    if not isinstance(found, list) or len(found) != envs:
        return False
    kinds = [bytes, int, float, int, np.ndarray]
    for proof in found:
        if proof is None:
            continue
        if not isinstance(proof, list) or len(proof) != 6 or list(map(type, proof[:5])) != kinds:
            return False
        _, episode, _, length, actions, options = proof
        fits = actions.ndim == 1 + len(action.shape) and np.dtype((actions.dtype, actions.shape[1:])) == action
        if not fits or min(episode, length) < 0 or not isinstance(options, dict | None):
            return False
    return True


def _in_one(pieces: Pieces) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
