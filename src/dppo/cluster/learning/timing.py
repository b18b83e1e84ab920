"""The time that learning takes, measured and in words: are several learners faster than one?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from dppo.cluster.plans import TrainerPlan
from dppo.ppo.networks.network import NetworkSpec

REPEATS = 5  # of each measurement, to take the median


def usual_seconds(work: Callable[[], None], most_s: float = math.inf) -> float:
    """Return the median time of `work`, in seconds; stop repeating it after `most_s`."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < most_s:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def worth_in_words(plan: TrainerPlan, spec: NetworkSpec, alone_ms: float, shared_ms: float, summing_ms: float) -> str:
    """Describe the measured times, and say whether several learners are faster than one."""
    facts = (
        f"{plan.learners.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a "
        f"minibatch of {plan.sizes.minibatch_rows:,} rows takes {shared_ms:.1f} ms, {summing_ms:.1f} ms of it for the "
        f"sum; one learner takes {alone_ms:.1f} ms"
    )
    if shared_ms < 0.95 * alone_ms:
        return f"{facts}. They are {alone_ms / shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay off here; num_learners=0 is faster."
