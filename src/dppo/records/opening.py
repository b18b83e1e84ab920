"""The first lines of a run: its sizes, the hosts of its samplers, and the run that it branches off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.config.checks import batch_in_words
from dppo.errors import counted


def sizes_in_words(config: Config) -> str:
    """Return batch, segments, minibatches and updates in one sentence."""
    per_epoch = config.minibatches_per_epoch
    batch = f"{config.batch_size:,} steps ({batch_in_words(config)})"
    return (
        f"{counted(config.iterations, 'iteration')} of {batch}, each trained "
        f"for {counted(config.update_epochs, 'epoch')} of {counted(per_epoch, 'minibatch', 'minibatches')} of up to "
        f"{config.minibatch_rows:,} rows: "
        f"{counted(config.iterations * config.update_epochs * per_epoch, 'SGD step')} in all."
    )


def hosting_in_words(config: Config) -> str:
    """Return the hosts of the samplers in one sentence."""
    if config.num_actors == 0:
        if config.num_samplers == 1:
            return "Collecting in this process."
        return f"Collecting in this process; --num-actors {config.num_samplers} spreads it over Ray actors."
    fewest, most = divmod(config.num_samplers, config.num_actors)
    if not most:
        if config.num_actors == 1:
            return f"1 Ray actor hosts {counted(fewest, 'sampler')}."
        return f"{config.num_actors} Ray actors host {counted(fewest, 'sampler')} each."
    return (
        f"{config.num_actors} Ray actors host {config.num_samplers} samplers unevenly: {most} of them {fewest + 1}, "
        f"the others {fewest}; the others wait for these."
    )


def branch_in_words(checkpoint: Path, state: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a new run takes over from a checkpoint of another, and what it leaves."""
    lengths = [array for name, array in arrays["samplers"].items() if name.endswith(".episode_lengths")]
    left = sum(int((array > 0).sum()) for array in lengths)
    steps = sum(int(array.sum()) for array in lengths)
    return (
        f"Branching off {checkpoint} at step {state['global_step']:,}: weights, optimiser and normalisers go on, "
        f"counters begin at zero. Its {counted(left, 'open episode')} of {counted(steps, 'step')} are left, fresh ones "
        f"begin."
    )
