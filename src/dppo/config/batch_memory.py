"""Memory for the observations of a batch: printed where it is large, refused where this machine has less."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dppo.config import Config
from dppo.config.checks import batch_in_words
from dppo.errors import ConfigError
from dppo.spaces.spaces import Spaces

LARGE = 256 * 10**6  # bytes
COPIES = 2  # of each observation: in its segment, and in the batch; minibatches are cut one at a time
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def batch_memory_in_words(config: Config, spaces: Spaces, memory: int | None = None) -> str | None:
    """Return the memory that observations take while a batch is trained on, in one sentence; None if that is little.

    Args:
        memory: bytes that this machine has; None: look.

    Raises:
        ConfigError: it is more than this machine has, and this machine trains.
    """
    each = spaces.obs.itemsize
    total = COPIES * each * config.batch_size
    if total < LARGE:
        return None
    memory = memory or memory_of_this_machine()
    facts = f"{config.batch_size:,} observations of {_in_words(each)} take {_in_words(total)}"
    if config.num_learners == 0 and memory is not None and total > memory:
        raise ConfigError(
            f"num_steps={config.num_steps} makes a batch ({batch_in_words(config)}) that does not fit into memory: its "
            f"{facts}, once in segments and once in the batch, and this machine has {_in_words(memory)}. Lower "
            f"`num_steps` or `num_samplers`."
        )
    shared = "" if config.num_learners <= 1 else f", shared by {config.num_learners} learners"
    return f"Memory: {facts}, once in segments and once in the batch{shared}."


def memory_of_this_machine() -> int | None:
    """Return the bytes of memory that this process may use; None if that is not known."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):
        found.append(int(CGROUP_LIMIT.read_text()))  # "max" if there is no limit
    return min(found, default=None)


def _in_words(size: int) -> str:
    """Return a number of bytes as 28.2 kB, 3.7 GB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
