"""Waiting for calls to other processes: every wait ends, with a reason."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

TICK_S = 0.5  # longest single wait
ASK_EVERY_S = 3.0  # interval between two questions whether a process is running
SILENT_S = 20.0  # a process that has not answered for longer is stopped, or its node is gone
DEATH_REPORT_S = 2.0  # Ray reports a death later than the processes that were connected to the dead one notice it
FETCH_TIMEOUT_S = 120.0  # to transfer a finished result over the network


def wait_for(calls: Sequence[ObjectRef[Any]], check: Callable[[], None], timeout_s: float = math.inf) -> list[Any]:
    """Return the answers of processes that may still be starting.

    Fails when: a call fails, time is up, or `check` raises, which is called at least every `TICK_S`.
    """
    deadline, pending = time.monotonic() + timeout_s, list(calls)
    while pending:
        check()
        if time.monotonic() > deadline:
            raise GetTimeoutError
        ready, pending = ray.wait(pending, num_returns=1, timeout=TICK_S)
        ray.get(ready, timeout=FETCH_TIMEOUT_S)
    return ray.get(list(calls), timeout=FETCH_TIMEOUT_S)


def wait_while_alive(ranks: Sequence[Any], calls: Sequence[ObjectRef[Any]], check: Callable[[], None]) -> list[Any]:
    """Return the answers to one call of each of `ranks`, without a deadline.

    Fails when: a rank fails, dies or stops answering, or `check` raises, which is called at least every `TICK_S`.
    """
    heard = [time.monotonic()] * len(ranks)
    asked: dict[ObjectRef[Any], int] = {}
    next_question = time.monotonic() + ASK_EVERY_S

    def check_all() -> None:
        nonlocal next_question
        check()
        if time.monotonic() < next_question:
            return
        next_question = time.monotonic() + ASK_EVERY_S
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for ref in answered:
            ray.get(ref, timeout=FETCH_TIMEOUT_S)
            heard[asked.pop(ref)] = time.monotonic()
        for rank, handle in enumerate(ranks):
            if time.monotonic() - heard[rank] > SILENT_S:
                raise TimeoutError(f"stopped answering: rank {rank} has been silent for {SILENT_S:.0f} s")
            if rank not in asked.values():
                asked[handle.__ray_ready__.options(concurrency_group="life").remote()] = rank

    try:
        return wait_for(calls, check_all)
    except RayTaskError as error:
        raise death_behind(error, calls) from None


def death_behind(error: RayTaskError, calls: Sequence[ObjectRef[Any]]) -> RayError:
    """Return the death of another rank that made a sum fail; `error` itself if none died."""
    for call in ray.wait(list(calls), num_returns=len(calls), timeout=DEATH_REPORT_S)[0]:
        try:
            ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayActorError as death:
            return death
        except RayError:
            continue
    return error
