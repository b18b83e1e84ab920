"""Several trainings in one process: the one that has opened Ray would end it for the others."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dppo.errors import ConfigError

_lock = threading.Lock()
_owners: list[int] = []  # the thread of the training that has opened Ray


def is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextmanager
def claimed() -> Iterator[None]:
    """Context of a training with actors; raise ConfigError if one in another thread of this process has opened Ray.

    A Ray that the user has opened is shared, because none of them ends it.
    """
    me = threading.get_ident()
    with _lock:
        if _owners and me not in _owners:
            raise ConfigError(
                "num_actors: another training in this process has started Ray, and stops it when it ends. Train one "
                "after the other or in processes of their own, or call ray.init() first, which all of them then share."
            )
        opens = not _owners and not is_connected()
        if opens:
            _owners.append(me)
    try:
        yield
    finally:
        if opens:
            _owners.remove(me)
