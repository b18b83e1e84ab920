"""Mailbox: passes items from any thread to the one that waits for them."""

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue with one reader, which works on after a signal handler has raised an exception in any of its methods.

    Items that an interrupted `take` has removed are lost. After such an exception, `queue.Queue` may keep its lock, so
    that all later calls wait forever. `SimpleQueue.get` with a time limit may wait forever, too: CPython takes a
    negative remainder of the limit for no limit.
    """

    def __init__(self) -> None:
        self._items = deque[T]()
        self._no_news = threading.Lock()  # released when an item is put

    @property
    def is_empty(self) -> bool:
        return not self._items

    def put(self, item: T) -> None:
        self._items.append(item)
        with suppress(RuntimeError):  # it is released already
            self._no_news.release()

    def take(self, wait_s: float = 0.0) -> list[T]:
        """Return all items, in their order; wait up to `wait_s` for the first."""
        until = time.monotonic() + wait_s
        while not self._items:
            if not self._no_news.acquire(timeout=max(0.0, until - time.monotonic())):
                break
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
