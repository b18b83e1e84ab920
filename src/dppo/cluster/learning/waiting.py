"""Waiting for calls to other processes: every wait ends, and says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

TICK_S = 0.5  # longest single wait
ASK_EVERY_S = 3.0  # how often a process is asked whether it runs
SILENT_S = 20.0  # one that has not answered for so long is stopped, or its node is gone
DEATH_TOLD_S = 2.0  # Ray tells of a death later than those notice it who were connected to the dead
FETCH_TIMEOUT_S = 120.0  # for what is ready but has to cross the network


def wait_for(calls: Sequence[ObjectRef[Any]], timeout_s: float, check: Callable[[], None]) -> list[Any]:
    """The answers of processes that may still be starting. Fails when: one fails, or time is up.

    Args:
        check: called now and then; may raise, to give up.
    """
    deadline, pending = time.monotonic() + timeout_s, list(calls)
    while pending:
        check()
        if time.monotonic() > deadline:
            raise GetTimeoutError
        ready, pending = ray.wait(pending, num_returns=1, timeout=TICK_S)
        ray.get(ready, timeout=FETCH_TIMEOUT_S)
    answers: list[Any] = ray.get(list(calls), timeout=FETCH_TIMEOUT_S)
    return answers


def wait_while_alive(
    ranks: Sequence[Any],
    calls: Sequence[ObjectRef[Any]],
    ask: Callable[[Any], ObjectRef[Any]],
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the answers to one call of each of `ranks`, however long they take.

    Fails when: one fails, dies, or falls silent.

    Args:
        ask: asks one of them to show that it runs.
        check: called now and then; may raise, to give up.
    """
    pending = list(calls)
    heard = [time.monotonic()] * len(ranks)
    asked: dict[ObjectRef[Any], int] = {}
    next_question = time.monotonic() + ASK_EVERY_S
    while pending:
        check()
        ready, pending = ray.wait(pending, num_returns=1, timeout=TICK_S)
        try:
            ray.get(ready, timeout=FETCH_TIMEOUT_S)
        except RayTaskError as error:
            raise _death_behind(error, calls) from None
        if time.monotonic() < next_question:
            continue
        next_question = time.monotonic() + ASK_EVERY_S
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for ref in answered:
            ray.get(ref, timeout=FETCH_TIMEOUT_S)
            heard[asked.pop(ref)] = time.monotonic()
        for rank, when in enumerate(heard):
            if time.monotonic() - when > SILENT_S:
                raise TimeoutError(f"fell silent: rank {rank} has not answered for {SILENT_S:.0f} s")
        for rank, handle in enumerate(ranks):
            if rank not in asked.values():
                asked[ask(handle)] = rank
    answers: list[Any] = ray.get(list(calls), timeout=FETCH_TIMEOUT_S)
    return answers


def _death_behind(error: RayTaskError, calls: Sequence[ObjectRef[Any]]) -> RayError:
    """The death of another process that made one fail in the middle of a sum; `error` itself where none died."""
    for call in ray.wait(list(calls), num_returns=len(calls), timeout=DEATH_TOLD_S)[0]:
        try:
            ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayActorError as death:
            return death
        except RayError:
            continue
    return error
