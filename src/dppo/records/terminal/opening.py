"""The first lines of a run: its sizes, where its samplers run, and the checkpoint it branches from."""

from __future__ import annotations

from dppo.config import Config
from dppo.config.checks import batch_in_words
from dppo.errors import counted
from dppo.records.files.checkpoint import Found


def sizes_line(config: Config) -> str:
    """Return the numbers of iterations, steps, epochs and minibatches in one sentence."""
    per_epoch = config.minibatches_per_epoch
    batch = f"{config.batch_size:,} steps ({batch_in_words(config)})"
    return (
        f"{counted(config.iterations, 'iteration')} of {batch}, each trained "
        f"for {counted(config.update_epochs, 'epoch')} of {counted(per_epoch, 'minibatch', 'minibatches')} of up to "
        f"{config.minibatch_rows:,} rows: "
        f"{counted(config.iterations * config.update_epochs * per_epoch, 'SGD step')} in all."
    )


def hosting_line(config: Config) -> str:
    """Return where the samplers run, in one sentence."""
    if config.num_actors == 0:
        if config.num_samplers == 1:
            return "Collecting in this process."
        spread = as_setting_and_flag("num_actors", config.num_samplers)
        return f"Collecting in this process; {spread} would spread it over Ray actors, with the same result."
    fewest, most = divmod(config.num_samplers, config.num_actors)
    if not most:
        if config.num_actors == 1:
            return f"1 Ray actor hosts {counted(fewest, 'sampler')}."
        return f"{config.num_actors} Ray actors host {counted(fewest, 'sampler')} each."
    return (
        f"{config.num_actors} Ray actors host {config.num_samplers} samplers unevenly: {most} host {fewest + 1}, the "
        f"others {fewest} and have to wait."
    )


def waiting_line(config: Config) -> str:
    """Return what happens before the first line of a run, for a terminal."""
    if config.num_actors == 0:
        return f"Creating {config.env_name} ..."
    return f"Starting {counted(config.num_actors, 'Ray actor')} ..."


def branch_line(origin: Found) -> str:
    """Return what a new run takes over from a checkpoint of another run, and what it drops."""
    state, arrays = origin.checkpoint.state, origin.checkpoint.arrays
    lengths = [array for name, array in arrays["samplers"].items() if name.endswith(".episode_lengths")]
    left = sum(int((array > 0).sum()) for array in lengths)
    steps = sum(int(array.sum()) for array in lengths)
    return (
        f"Branching off {origin.path} at step {state['global_step']:,}: weights, optimizer and normalizers are kept, "
        f"counters start at zero. New episodes start; {counted(left, 'open episode')} of {counted(steps, 'step')} "
        f"{'is' if left == 1 else 'are'} dropped."
    )


def as_setting_and_flag(name: str, value: object) -> str:
    """Return a setting as it is written in Python and on the command line: `num_actors=8 (--num-actors 8)`."""
    flag = f"--{name.replace('_', '-')}"
    return f"{name}={value} ({flag if value is True else f'{flag} {value}'})"
