"""The memory that the observations of a batch take, and that this machine has."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dppo.config.checks import describe_batch
from dppo.config.settings import Settings
from dppo.errors import ConfigError, counted

if TYPE_CHECKING:
    from dppo.spaces.spaces import Spaces

LARGE_BATCH = 256 * 10**6  # bytes
COPIES = 2  # of each observation or frame: in its segment, and in the batch; minibatches are cut one at a time
WEIGHT_COPIES = 4  # of each parameter: itself, its gradient, and two moments
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def batch_memory_in_words(config: Settings, spaces: Spaces, memory: int | None = None) -> str | None:
    """Return the memory that observations take while a batch is trained on, in one sentence; None if that is little.

    Raise ConfigError if it is more than this machine's `memory` in bytes (None: look), and this machine trains.
    """
    from dppo.spaces.spaces import is_image  # imports NumPy

    stack = config.frame_stack if is_image(spaces.of_network().obs) else 1
    each, copies, where = spaces.obs.itemsize // stack, COPIES, "once in segments and once in the batch"
    if stack > 1 and config.num_actors == 0:
        copies, where = stack + 1, f"in stacks of {stack} while they are collected and once in segments"
    rows = config.batch_size * config.reuse
    ahead = config.lag if config.num_actors else 0  # batches that actors have made, or make, meanwhile
    total = each * (copies * rows + ahead * config.batch_size)
    if ahead:
        where += f", and a policy lag of {ahead} keeps the segments of {counted(ahead, 'more batch', 'more batches')}"
    if total < LARGE_BATCH:
        return None
    memory = memory or memory_of_this_machine()
    facts = f"{rows:,} observations of {_bytes_in_words(each)} take {_bytes_in_words(total)}"
    if config.num_learners == 0 and memory is not None and total > memory:
        raise ConfigError(
            f"num_steps={config.num_steps} makes a batch ({describe_batch(config)}) that does not fit into memory: its "
            f"{facts}, {where}, and this machine has {_bytes_in_words(memory)}. Lower "
            f"`num_steps` or `num_samplers`."
        )
    shared = "" if config.num_learners <= 1 else f", shared by {config.num_learners} learners"
    older = _bytes_in_words(each * (rows - config.batch_size))
    stored = "" if config.reuse == 1 else f" Each checkpoint stores {older} of them for reuse."
    return f"Memory: {facts}, {where}{shared}.{stored}"


def check_layers(config: Settings, memory: int | None = None) -> None:
    """Raise ConfigError if the network's layers alone take more than this machine's `memory` in bytes (None: look)."""
    least = sum(inputs * units for inputs, units in pairwise((1, *config.hidden_sizes, config.image_features or 1)))
    least += config.memory_size**2 if config.memory != "none" else 0
    memory, needed = memory or memory_of_this_machine(), 4 * WEIGHT_COPIES * least
    if memory is not None and needed > memory:
        name = "hidden_sizes" if config.memory == "none" else "memory_size"
        found = f"{least:,} parameters, which take {_bytes_in_words(needed)} with gradients and the moments of Adam"
        fact = f"the network has more than {found}, and this machine has {_bytes_in_words(memory)}"
        raise ConfigError(f"{name}={getattr(config, name)}: {fact}. Use smaller layers.")


def memory_of_this_machine() -> int | None:
    """Return the bytes of memory that this process may use; None if that is not known."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):
        found.append(int(CGROUP_LIMIT.read_text()))  # "max" if there is no limit
    return min(found, default=None)


def _bytes_in_words(size: int) -> str:
    """Return a number of bytes as 28.2 kB, 3.7 GB."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
