"""What it takes to lose an actor and nothing else. Pure: no Ray, no clock, no waiting."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from dppo.ppo.segment import Rebuild, SamplerCarry, SegmentReport

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


class ReplayLedger:
    """What every sampler can be rebuilt from: its carry, and the actions of its open episodes.

    The learner records each segment that it accepts. So the ledger always describes the moment between two
    iterations, which is where a lost sampler, or a resumed run, starts again.
    """

    def __init__(self, num_samplers: int, *, replay: bool) -> None:
        """Args:
        replay: false gives up open episodes instead, where a replay is unwanted or cannot be trusted.
        """
        self.replay = replay
        self._carries: list[SamplerCarry | None] = [None] * num_samplers
        self._actions: list[list[list[np.ndarray]]] = [[] for _ in range(num_samplers)]  # [sampler][env][piece]

    def record(self, report: SegmentReport) -> None:
        """Take note of a segment: it is part of the run from now on."""
        sampler, before = report.sampler_id, self._carries[report.sampler_id]
        pieces = self._actions[sampler]
        for env, actions in enumerate(report.open_actions):
            if before is None:
                pieces.append([actions])
            elif before.episodes[env] == report.carry.episodes[env]:
                pieces[env].append(actions)
            else:
                pieces[env] = [actions]
        self._carries[sampler] = report.carry

    def rebuild(self, sampler_id: int) -> Rebuild | None:
        """How to bring `sampler_id` to where its last recorded segment left it; None if it never made one."""
        carry = self._carries[sampler_id]
        if carry is None:
            return None
        if not self.replay:
            return Rebuild(carry, ())
        return Rebuild(carry, tuple(np.concatenate(pieces) for pieces in self._actions[sampler_id]))

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as named arrays, for a checkpoint."""
        arrays = {}
        for sampler, carry in enumerate(self._carries):
            if carry is None:
                continue
            for field in fields(carry):
                arrays[f"{sampler}.{field.name}"] = getattr(carry, field.name)
            for env, pieces in enumerate(self._actions[sampler]):
                arrays[f"{sampler}.actions.{env}"] = np.concatenate(pieces)
        return arrays

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Become the ledger that gave `arrays`."""
        for sampler in range(len(self._carries)):
            if f"{sampler}.episodes" not in arrays:
                continue
            carry = SamplerCarry(**{field.name: arrays[f"{sampler}.{field.name}"] for field in fields(SamplerCarry)})
            self._carries[sampler] = carry
            self._actions[sampler] = [[arrays[f"{sampler}.actions.{env}"]] for env in range(len(carry.episodes))]


class RestartBudget:
    """How often an actor may be replaced in a row, and how long to wait before: 0, 1, 2, 4 ... 30 seconds."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._in_a_row: dict[int, int] = {}

    def spend(self, actor_id: int) -> float | None:
        """Seconds to wait before replacing `actor_id`; None when it has been replaced too often in a row."""
        spent = self._in_a_row.get(actor_id, 0)
        if spent >= self.max_restarts:
            return None
        self._in_a_row[actor_id] = spent + 1
        return 0.0 if spent == 0 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (spent - 1))

    def delivered(self, actor_id: int) -> None:
        """`actor_id` made a segment: it works."""
        self._in_a_row.pop(actor_id, None)
