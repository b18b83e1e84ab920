"""Waiting for processes that share an update: each wait ends, and a process that died is noticed."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from dppo.errors import DppoError, TrainingDiverged
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.failures import FETCH_TIMEOUT_S

TICK_S = 0.5  # longest single wait
ASK_EVERY_S = 3.0  # from an answer until a process is asked again whether it is running
SILENT_S = 20.0  # a process that has not answered for longer is stopped, or its node is gone
DEATH_REPORT_S = 2.0  # Ray reports a death later than the processes that were connected to the dead one notice it


@calls_ray
def wait_for(
    calls: Sequence[ObjectRef[Any]],
    check: Callable[[], None],
    timeout_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Return the answers of processes that may still be starting.

    Fails when: a call fails, time is up, or `check` raises, which is called at least every `TICK_S`.
    """
    deadline = clock() + timeout_s
    pending = list(calls)
    try:
        while pending:
            check()
            if clock() > deadline:
                raise GetTimeoutError
            ready, pending = ray.wait(pending, num_returns=1, timeout=TICK_S)
            ray.get(ready, timeout=FETCH_TIMEOUT_S)
        return ray.get(list(calls), timeout=FETCH_TIMEOUT_S)
    except RayTaskError as error:
        raise _death_behind(error, calls) from None


@calls_ray
def wait_while_alive(
    ranks: Sequence[Any],
    calls: Sequence[ObjectRef[Any]],
    check: Callable[[], None],
    clock: Callable[[], float],
) -> list[Any]:
    """Return the answers to one call of each of `ranks`, without a deadline.

    Fails when: a rank fails, dies or stops answering, or `check` raises, which is called at least every `TICK_S`. The
    silence of a rank is measured by `clock`.
    """
    heard_at = [clock()] * len(ranks)
    pings: dict[ObjectRef[Any], int] = {}  # questions whether a rank is running, and the rank

    @calls_ray
    def take_answers() -> None:
        if not pings:
            return
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=0)
        for ping in answered:
            ray.get(ping, timeout=FETCH_TIMEOUT_S)
            heard_at[pings.pop(ping)] = clock()

    @calls_ray
    def check_all() -> None:
        check()
        take_answers()
        for rank, handle in enumerate(ranks):
            silent_s = clock() - heard_at[rank]
            if silent_s > SILENT_S:
                raise TimeoutError(
                    f"stopped answering: rank {rank} has been silent for {SILENT_S:.0f} s"
                )
            if silent_s > ASK_EVERY_S and rank not in pings.values():
                pings[handle.__ray_ready__.options(concurrency_group="life").remote()] = rank

    return wait_for(calls, check_all)


def pause(seconds: float, check: Callable[[], None]) -> None:
    """Wait for this number of seconds, unless `check` raises."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        check()
        time.sleep(min(TICK_S, max(0.0, ends_at - time.monotonic())))


@calls_ray
def _death_behind(error: RayTaskError, calls: Sequence[ObjectRef[Any]]) -> RayError:
    """Return the death of another rank that made a sum fail; `error` itself if none died."""
    finished, _ = ray.wait(list(calls), num_returns=len(calls), timeout=DEATH_REPORT_S)
    for call in finished:
        try:
            ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayActorError as death:
            return death
        except RayError:
            continue
    return error


def raise_faults(answers: list[Any]) -> None:
    """Raise the fault of a rank, if any. A divergence concerns all ranks, and each describes its own rows."""
    faults = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, DppoError)}
    for error in faults.values():
        if len(faults) > 1 and isinstance(error, TrainingDiverged):
            raise TrainingDiverged(
                "\n".join(f"Learner {rank}: {fault}" for rank, fault in faults.items())
            )
        raise error
