"""ReplayLedger: what every sampler can be rebuilt from. Pure: no Ray, no clock."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from dppo.ppo.segment import Rebuild, SamplerCarry, SegmentReport

Pieces = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class _Moment:
    """One sampler between two segments."""

    carry: SamplerCarry
    actions: tuple[Pieces, ...]
    """For each environment, the actions since its reset, one piece a segment."""


class ReplayLedger:
    """Keeps, for each sampler, its carry and the actions of its open episodes, by the index of the next segment.

    The learner records segments when it receives them. The moments before the last two segments are kept, so that
    either can be made again: while segment i is learnt from, segment i + 1 may already be on its way.
    """

    KEPT = 2

    def __init__(self, num_samplers: int, *, replay: bool) -> None:
        """Args:
        replay: false gives up open episodes instead, where a replay is unwanted or cannot be trusted.
        """
        self._replay = replay
        self._moments: list[dict[int, _Moment]] = [{} for _ in range(num_samplers)]  # [sampler][index]

    def give_up_replay(self) -> None:
        """Rebuild samplers with fresh episodes from here on."""
        self._replay = False

    def record(self, report: SegmentReport) -> None:
        """Record a segment that was received, also if it was made again."""
        moments = self._moments[report.sampler_id]
        before = moments.get(report.index)
        actions: list[Pieces] = []
        for env, new in enumerate(report.open_actions):
            goes_on = before is not None and before.carry.episodes[env] == report.carry.episodes[env]
            actions.append((*before.actions[env], new) if before is not None and goes_on else (new,))
        moments[report.index + 1] = _Moment(report.carry, tuple(actions))
        for index in [index for index in moments if index > report.index + 1 or index <= report.index + 1 - self.KEPT]:
            del moments[index]

    def rebuild(self, sampler_id: int, index: int) -> Rebuild | None:
        """Return how to bring `sampler_id` to where segment `index` begins; None if that is where the run began."""
        moment = self._moments[sampler_id].get(index)
        if moment is None:
            assert index == 0, f"segment {index} of sampler {sampler_id} can no longer be made again"
            return None
        if not self._replay:
            return Rebuild(moment.carry, ())
        return Rebuild(moment.carry, tuple(_in_one(pieces) for pieces in moment.actions))

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Return the moment before segment `index` of all samplers as named arrays, for a checkpoint."""
        arrays = {}
        for sampler, moments in enumerate(self._moments):
            moment = moments.get(index)
            if moment is None:
                assert index == 0, f"the moment before segment {index} is no longer kept"
                continue
            for field in fields(moment.carry):
                arrays[f"{sampler}.{field.name}"] = getattr(moment.carry, field.name)
            for env, pieces in enumerate(moment.actions):
                arrays[f"{sampler}.actions.{env}"] = _in_one(pieces)
        return arrays

    def load(self, arrays: dict[str, np.ndarray], index: int) -> None:
        """Continue from what `arrays(index)` gave."""
        for sampler, moments in enumerate(self._moments):
            moments.clear()
            if f"{sampler}.episodes" not in arrays:
                continue
            carry = SamplerCarry(**{field.name: arrays[f"{sampler}.{field.name}"] for field in fields(SamplerCarry)})
            actions = tuple((arrays[f"{sampler}.actions.{env}"],) for env in range(len(carry.episodes)))
            moments[index] = _Moment(carry, actions)


def _in_one(pieces: Pieces) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
