"""Trace: checksums of each update, which `dppo diff` compares."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dppo.hosts.plans import TrainerPlan
from dppo.learners.staged import RunStage
from dppo.learners.trainers import Trainers
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment
from dppo.ppo.learning.advantages import generalized_advantages
from dppo.ppo.learning.batch import in_sequences, transitions_of

# In the order in which a step makes them. Noise follows from the seed: it shows in the actions.
COLUMNS = (
    "obs",
    "masks",
    "values",
    "logprobs",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "valid",
)


class Trace(RunStage):
    """Takes checksums of each update, in the order of their causes."""

    def __init__(self, plan: TrainerPlan) -> None:
        self._plan = plan
        # of the last update; empty before any update, and once a row has them
        self._checksums: dict[str, str] = {}

    @contextmanager
    def around(self, experience: Experience, trainers: Trainers) -> Iterator[Experience]:
        """Take the checksums of an update once it is done."""
        yield experience
        checksums = {"policy": _policy_checksum(experience.policy)}
        for column in COLUMNS:
            for number, segment in enumerate(experience.segments):
                checksums[f"{column}/{number}"] = _column_checksum(segment, column)
        if self._plan.ppo.algo == "ppo":
            for number, segment in enumerate(experience.segments):
                checksums[f"advantages/{number}"] = self._advantage_checksum(
                    segment, experience.reward_scale
                )
        checksums["gradients"] = _gradient_checksum(trainers.learned_state())
        checksums["weights"] = _checksum(trainers.weights())
        self._checksums = checksums

    def _advantage_checksum(self, segment: Segment, reward_scale: float | None) -> str:
        ppo = self._plan.ppo
        advantages = generalized_advantages(
            transitions_of([segment], reward_scale, ppo),
            segment.values,
            segment.next_values,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
        )
        return _checksum(in_sequences(advantages, self._plan.sizes.sequence_length))

    def line(self, row: Mapping[str, float]) -> dict[str, Any]:
        """Return the checksums of the iteration of a row of metrics, by quantity and sampler: `rewards/3`.

        Rows that repeat this one, for evaluations that have ended, have none.
        """
        if not self._checksums:
            return {}
        checksums = self._checksums
        self._checksums = {}
        return {"iteration": row["iteration"], **checksums, "global_step": row["global_step"]}


def _policy_checksum(policy: PolicySnapshot) -> str:
    values: list[Any] = [policy.weights]
    for scale in (policy.obs_scale, policy.value_scale):
        if scale is not None:
            values += [getattr(scale, name) for name in scale.__slots__]
    # the bytes of None would be its address, which each process has its own of
    return _checksum(*(value for value in values if value is not None))


def _gradient_checksum(state: Mapping[str, np.ndarray]) -> str:
    """Return the checksum of Adam's running mean of all gradients, of the policy and of critics if there are any."""
    means = [array for name, array in state.items() if name.rpartition(".")[2] == "exp_avg"]
    return _checksum(*means)


def _column_checksum(segment: Segment, name: str) -> str:
    """Return 16 bits of the checksum of a column up to each step, then all of it: [4 T + 8] digits."""
    column = getattr(segment, name)
    if column is None:
        return ""
    # of stacks of K frames, K belong to the first step
    first = 1 + len(column) - len(segment.values)
    crc = 0
    digits = ""
    for step in (column[:first], *column[first:]):
        crc = zlib.crc32(step.tobytes(), crc)
        digits += f"{crc & 0xFFFF:04x}"
    return f"{digits}{crc:08x}"


def _checksum(*values: Any) -> str:
    return f"{zlib.crc32(b''.join(np.asarray(value).tobytes() for value in values)):08x}"
