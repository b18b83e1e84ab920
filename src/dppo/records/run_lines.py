"""Lines about a run that is about to start: its size, its processes, and the run that it branches from."""

from dppo.config import Config
from dppo.config.checks import describe_batch
from dppo.config.resolve import value_of
from dppo.errors import counted
from dppo.invocation import as_setting_and_flag
from dppo.records.files.checkpoint import LoadedCheckpoint
from dppo.spaces.actions import Actions, continuous_width


def sizes_line(config: Config, actions: Actions | None = None) -> str:
    """Describe the number of env steps, and the batch and the epochs of an iteration.

    `actions` are None if they are not known yet: the epochs may depend on them.
    """
    total_steps = config.total_steps
    total = counted(total_steps, "env step")
    iterations = counted(config.iterations, "iteration")
    if total_steps != config.total_timesteps:
        iterations += f" ({config.total_timesteps:,}, rounded up to whole iterations)"
    batch = f"{config.batch_size:,} ({describe_batch(config)})"
    if config.algo == "sac":
        steps = counted(round(config.gradient_steps * config.batch_size), "gradient step")
        trains = f"takes {steps} on rows of all segments so far"
        return f"{total} in {iterations}: each collects {batch}, then {trains}."
    batches = "them"
    if config.reuse > 1:
        batches = f"them and those of {counted(config.reuse - 1, 'iteration')} before,"
    trains = f"trains on {batches} for {_epochs(config, actions)}"
    return f"{total} in {iterations}: each collects {batch}, then {trains}."


def _epochs(config: Config, actions: Actions | None) -> str:
    if actions is not None:
        return counted(value_of("update_epochs", config, continuous_width(actions)), "epoch")
    continuous_epochs = value_of("update_epochs", config, action_dims=1)
    discrete_epochs = value_of("update_epochs", config, action_dims=0)
    text = counted(continuous_epochs, "epoch")
    if discrete_epochs > continuous_epochs:
        text += f", or {discrete_epochs} if actions are discrete"
    return text


def prior_line(config: Config) -> str:
    """Describe the iterations that a controller collects."""
    iterations = "the first iteration"
    if config.collected_by_prior > 1:
        iterations = f"the first {config.collected_by_prior:,} iterations"
    steps = counted(config.collected_by_prior * config.batch_size, "step")
    collects = f"{config.prior_name} collects {iterations} ({steps}) with noise"
    if config.algo == "sac":
        return f"{collects}; the policy becomes its clone, and the critics learn from its rewards."
    cloned = "then it is cloned"
    if config.has_memory:
        cloned += ", in about a minute because of the memory"
    return f"{collects}; {cloned}, and training begins near the clone."


def returns_line(config: Config) -> str:
    """Describe which returns a run shows, if it evaluates its policy."""
    episodes = counted(config.eval_episodes, "episode")
    noise = "also with noise" if config.eval_stochastic else "without noise"
    return (
        f"return: the last 100 training episodes at most, with exploration noise; eval: {episodes} {noise}, every "
        f"{config.eval_every:,} env steps."
    )


def hosting_line(config: Config) -> str:
    """Describe where the samplers run."""
    samplers = counted(config.num_samplers, "sampler")
    actors = config.most_actors
    if config.num_actors == 0:
        if config.num_samplers == 1:
            return "Collecting in this process."
        spread = as_setting_and_flag("num_actors", config.num_samplers)
        return f"Collecting in this process; {spread} would spread it over Ray actors, with the same result."
    if config.elastic:
        between = f"Between {config.actor_bounds[0]} and {counted(actors, 'Ray actor')}"
        return f"{between}, as there is room for them, host {samplers}."
    if actors == 1:
        return f"1 Ray actor hosts {samplers}."
    samplers_per_actor, remainder = divmod(config.num_samplers, actors)
    if remainder == 0:
        return f"{actors} Ray actors host {counted(samplers_per_actor, 'sampler')} each."
    uneven = f"{remainder} host {samplers_per_actor + 1}, the others {samplers_per_actor} and have to wait"
    return f"{actors} Ray actors host {samplers} unevenly: {uneven}."


def own_state_line(config: Config) -> str:
    """Describe how `get_state` and `set_state` of the environments are used."""
    if config.env_state == "own":
        return "get_state and set_state: the state of a lost environment is set, without a replay."
    return (
        "get_state and set_state: the actions of a lost environment are replayed. If that leads to another state, its "
        "own state is set instead, provided that repeating the last segment proves it complete. env_state=own sets it "
        "without a replay; env_state=off only replays."
    )


def branch_line(origin: LoadedCheckpoint) -> str:
    """Describe the state that a new run takes over from a checkpoint of another run, and the episodes it drops."""
    state = origin.checkpoint.state
    lengths = origin.checkpoint.episode_lengths
    open_episodes = sum(int((array > 0).sum()) for array in lengths)
    dropped_steps = sum(int(array.sum()) for array in lengths)
    step = f"{state['global_step']:,}"
    verb = "is" if open_episodes == 1 else "are"
    episodes = counted(open_episodes, "open episode")
    dropped = f"{episodes} of {counted(dropped_steps, 'step')} {verb} dropped"
    return (
        f"Branching off {origin.path} at step {step}: weights, optimizer and normalizers are kept, counters start at "
        f"zero. New episodes start; {dropped}."
    )
