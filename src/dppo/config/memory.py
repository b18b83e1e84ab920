"""The memory that the observations of a batch take, and that this machine has."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dppo.config.checks import describe_batch
from dppo.config.settings import Settings
from dppo.errors import ConfigError, counted

if TYPE_CHECKING:
    from dppo.spaces.spaces import Spaces

LARGE_BATCH = 256 * 10**6  # bytes
LARGE_REPLAY = 50 * 10**6  # bytes, which are also written in each checkpoint
MOST_REPLAY_ROWS = 1_000_000  # default of `replay_rows`; 102 MB for HalfCheetah
COPIES = 2  # copies of each observation or frame: in its segment and in the batch; minibatches are cut one at a time
WEIGHT_COPIES = 4  # arrays for each parameter: itself, its gradient, and two moments
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class BatchObservations:
    """The memory of observations while a batch is trained on."""

    rows: int
    row_bytes: int
    total_bytes: int
    places: str
    """The places of all copies, in words."""

    @property
    def in_words(self) -> str:
        """Number, size and places of the observations."""
        row = _describe_bytes(self.row_bytes)
        return f"{self.rows:,} observations of {row} take {_describe_bytes(self.total_bytes)}, {self.places}"


def batch_memory_in_words(
    config: Settings, spaces: Spaces, machine_bytes: int | None = None
) -> str | None:
    """Return the memory that observations take while a batch is trained on, in one sentence; None if that is little.

    Raise ConfigError if it is more than the `machine_bytes` of this machine (None: look), and this machine trains.
    """
    machine_bytes = machine_bytes or memory_of_this_machine()
    batch = _observations_of_batch(config, spaces)
    if config.algo == "sac":
        return _replay_in_words(config, spaces, batch.total_bytes, machine_bytes)
    if batch.total_bytes < LARGE_BATCH:
        return None
    if config.num_learners == 0 and machine_bytes is not None and batch.total_bytes > machine_bytes:
        raise ConfigError(
            f"num_steps={config.num_steps} makes a batch ({describe_batch(config)}) that does not fit into memory: its "
            f"{batch.in_words}, and this machine has {_describe_bytes(machine_bytes)}. Lower `num_steps` or "
            f"`num_samplers`."
        )
    line = f"Memory: {batch.in_words}"
    if config.num_learners > 1:
        line += f", shared by {config.num_learners} learners"
    if config.stored_iterations > 1:
        older = _describe_bytes(batch.row_bytes * (batch.rows - config.batch_size))
        purpose = "the clone of the prior"
        if config.reuse >= config.collected_by_prior:
            purpose = "reuse"
        line += f". Each checkpoint stores {older} of them for {purpose}"
    return f"{line}."


def _observations_of_batch(config: Settings, spaces: Spaces) -> BatchObservations:
    from dppo.spaces.spaces import is_image  # imports NumPy

    stack = config.frame_stack if is_image(spaces.of_network().obs) else 1
    row_bytes = spaces.obs.itemsize // stack
    copies = COPIES
    places = "once in segments and once in the batch"
    if stack > 1 and config.num_actors == 0:
        copies = stack + 1
        places = f"in stacks of {stack} while they are collected and once in segments"
    rows = config.batch_size * config.stored_iterations
    # batches that actors have made, or make, meanwhile
    batches_ahead = config.lag if config.num_actors else 0
    if batches_ahead:
        batches = counted(batches_ahead, "more batch", "more batches")
        places += f", and a policy lag of {batches_ahead} keeps the segments of {batches}"
    total_bytes = row_bytes * (copies * rows + batches_ahead * config.batch_size)
    return BatchObservations(rows, row_bytes, total_bytes, places)


def replay_rows_of(config: Settings) -> int:
    """Return the env steps that soft actor-critic keeps: by default all of the run, up to a limit."""
    if config.replay_rows is not None:
        return config.replay_rows
    return min(config.total_steps, MOST_REPLAY_ROWS)


def _replay_in_words(
    config: Settings, spaces: Spaces, batch_bytes: int, machine_bytes: int | None
) -> str | None:
    """Return a sentence about the memory and disk of the replay buffer in addition to a batch; None if they are small.

    Raise ConfigError if it is more than `machine_bytes`, and this machine trains.
    """
    rows = replay_rows_of(config)
    buffer_bytes = rows * replay_row_bytes(config, spaces)
    total = batch_bytes + buffer_bytes
    facts = f"{rows:,} kept env steps take {_describe_bytes(buffer_bytes)}, and once more while a checkpoint is written"
    if config.num_learners > 0:
        share = _describe_bytes(buffer_bytes // config.num_learners)
        facts += f"; each of {counted(config.num_learners, 'learner')} keeps its {share} of them"
    if machine_bytes is not None and total + buffer_bytes > machine_bytes:
        raise ConfigError(
            f"replay_rows={rows}: {facts}, and this machine has {_describe_bytes(machine_bytes)}. Use a "
            f"smaller `replay_rows`."
        )
    if total < LARGE_REPLAY:
        return None
    newest, every = config.kept_checkpoints
    num_checkpoints = newest + 1 + (config.iterations // every if every else 0)  # one is the best
    disk = _describe_bytes(num_checkpoints * buffer_bytes)
    return (
        f"Memory: {facts}. Each checkpoint stores them: up to {disk} of disk for {num_checkpoints} checkpoints. A "
        f"smaller `replay_rows` keeps fewer."
    )


def replay_row_bytes(config: Settings, spaces: Spaces) -> int:
    """Return the bytes of an env step in the replay buffer.

    They are observation, action, its log-probability, reward in float64, and two flags.
    """
    number_bytes = 4 if config.dtype == "float32" else 8
    return spaces.obs.itemsize + (spaces.actions.width + 1) * number_bytes + 8 + 2


def check_replay_disk(config: Settings, spaces: Spaces, folder: Path) -> None:
    """Raise ConfigError if the disk of `folder` has no room for two checkpoints with the env steps that are kept."""
    rows = replay_rows_of(config)
    checkpoint = rows * replay_row_bytes(config, spaces)
    free_bytes = shutil.disk_usage(folder).free
    if 2 * checkpoint > free_bytes:
        raise ConfigError(
            f"replay_rows={rows}: a checkpoint stores them, {_describe_bytes(checkpoint)}, and the disk of {folder} "
            f"has room for {_describe_bytes(free_bytes)}. Use a smaller `replay_rows`, or another `run_dir`."
        )


def check_layers(config: Settings, machine_bytes: int | None = None) -> None:
    """Raise ConfigError if the layers alone take more memory than the `machine_bytes` of this machine (None: look)."""
    parameters = sum(
        inputs * units
        for inputs, units in pairwise((1, *config.hidden_sizes, config.image_features or 1))
    )
    name = "hidden_sizes"
    if config.memory != "none":
        parameters += config.memory_size**2
        name = "memory_size"
    needed = 4 * WEIGHT_COPIES * parameters
    machine_bytes = machine_bytes or memory_of_this_machine()
    if machine_bytes is not None and needed > machine_bytes:
        raise ConfigError(
            f"{name}={getattr(config, name)}: the network has more than {parameters:,} parameters, which take "
            f"{_describe_bytes(needed)} with gradients and the moments of Adam, and this machine has "
            f"{_describe_bytes(machine_bytes)}. Use smaller layers."
        )


def memory_of_this_machine() -> int | None:
    """Return the bytes of memory that this process may use; None if that is not known."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):
        limits.append(int(CGROUP_LIMIT.read_text()))  # "max" if there is no limit
    return min(limits, default=None)


def _describe_bytes(size: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
