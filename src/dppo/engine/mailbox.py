"""Mailbox: passes items from any thread to the one that waits for them."""

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue with one reader, which a signal handler may leave by an exception at any moment.

    `queue.Queue` may then keep its lock, or raise RuntimeError. `SimpleQueue.get` with a time limit may wait forever:
    CPython takes a rest of the limit that is negative for no limit.
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
