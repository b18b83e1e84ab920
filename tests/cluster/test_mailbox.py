"""Mailboxes: the wait for an item ends, and a signal handler may end it by an exception at any moment."""

import sys
import threading
from itertools import count
from types import FrameType
from typing import Any

import pytest

from dppo.engine.mailbox import Mailbox


class Interruption(BaseException):
    """Is raised by a handler of signals."""


def interrupted(call: Any, instruction: int) -> bool:
    """Let a call be interrupted before one of its instructions; return whether it had so many.

    The thread that calls it ends: where `except` is interrupted, CPython 3.11 keeps that exception as the context of
    all later ones of the thread.
    """
    left = instruction
    was_interrupted = False

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise Interruption
        return trace

    def call_with_trace() -> None:
        nonlocal was_interrupted
        sys.settrace(trace)
        try:
            call()
        except Interruption:
            was_interrupted = True
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=call_with_trace, daemon=True)
    thread.start()
    thread.join()
    return was_interrupted


@pytest.mark.parametrize("items", [0, 1])
def test_an_interruption_at_any_instruction_leaves_the_mailbox_in_order(items: int) -> None:
    for instruction in count():
        mailbox = Mailbox[int]()
        for item in range(items):
            mailbox.put(item)
        if not interrupted(mailbox.take, instruction):
            break
        writer = threading.Thread(target=mailbox.put, args=(7,), daemon=True)
        writer.start()
        writer.join(20)
        assert not writer.is_alive(), f"instruction {instruction}"
        assert mailbox.take(20.0)[-1:] == [7]
    assert instruction > 10


def test_an_interrupted_put_does_not_keep_others_from_putting() -> None:
    for instruction in count():
        mailbox = Mailbox[int]()
        if not interrupted(lambda mailbox=mailbox: mailbox.put(1), instruction):
            break
        mailbox.put(2)
        assert mailbox.take(20.0)[-1:] == [2]
    assert instruction > 5


def test_the_wait_for_an_item_ends() -> None:
    mailbox = Mailbox[int]()
    mailbox.put(1)
    mailbox.put(2)
    assert mailbox.take() == [1, 2]
    # the first item has been announced, and is taken
    assert mailbox.take(1e-9) == []
    assert mailbox.take(-1.0) == []
    assert mailbox.is_empty
    timer = threading.Timer(0.01, mailbox.put, (3,))
    timer.start()
    assert mailbox.take(60.0) == [3]
