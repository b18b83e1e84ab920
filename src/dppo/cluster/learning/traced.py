"""TracingTrainers: checksums of what each update is given and of its result, to find where two runs differ."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dppo.cluster.learning.trainers import Trainers
from dppo.cluster.plans import TrainerPlan
from dppo.ppo.exchange.records import PolicySnapshot, Segment, Update
from dppo.ppo.learning.batch import make_batch

# In the order in which a step makes them. Noise follows from the seed: it shows in the actions.
STEPWISE = ("obs", "masks", "values", "logprobs", "actions", "rewards", "terminated", "truncated", "valid")


class TracingTrainers:
    """Trainers that take checksums of each update; all else is left to those inside."""

    def __init__(self, trainers: Trainers, plan: TrainerPlan) -> None:
        self._trainers, self._plan = trainers, plan
        self.spec, self.weights, self.state = trainers.spec, trainers.weights, trainers.state
        self.load, self.close = trainers.load, trainers.close

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one update, and take its checksums, in the order of their causes."""
        update = self._trainers.update(segments, policy, reward_scale, iteration)
        ppo, length = self._plan.ppo, self._plan.sizes.sequence_length
        scales = [scale for scale in (policy.obs_scale, policy.value_scale) if scale is not None]
        of_policy = _checksum(policy.weights, *(getattr(scale, name) for scale in scales for name in scale.__slots__))
        self._latest = {"policy": of_policy}
        for name in STEPWISE:
            self._latest |= {f"{name}/{number}": _of_steps(one, name) for number, one in enumerate(segments)}
        for number, one in enumerate(segments):
            batch = make_batch([one], policy.obs_scale, reward_scale, ppo, length)
            self._latest[f"advantages/{number}"] = _checksum(batch.advantages)
        gradients = self.state()["exp_avg"]  # Adam's running mean of all of them
        self._latest |= {"gradients": _checksum(gradients), "weights": _checksum(self.weights())}
        return update

    def line(self, row: Mapping[str, float]) -> dict[str, Any]:
        """Return the checksums of the iteration of a row of metrics, by quantity and sampler: `rewards/3`."""
        return {"iteration": row["iteration"], **self._latest, "global_step": row["global_step"]}


def _of_steps(segment: Segment, name: str) -> str:
    """Return 16 bits of the checksum of a column up to each step, then all of it: [4 T + 8] digits."""
    column = getattr(segment, name)
    if column is None:
        return ""
    crc, digits, first = 0, "", 1 + len(column) - len(segment.values)  # of stacks of K frames, K are of the first step
    for step in (column[:first], *column[first:]):
        crc = zlib.crc32(step.tobytes(), crc)
        digits += f"{crc & 0xFFFF:04x}"
    return f"{digits}{crc:08x}"


def _checksum(*values: Any) -> str:
    return f"{zlib.crc32(b''.join(np.asarray(value).tobytes() for value in values)):08x}"
