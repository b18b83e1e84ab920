"""Checks across settings: sizes, numbers of processes and environments, devices, and shares of several learners."""

import json
import math
import re
from collections.abc import Callable, Iterator

from dppo.config.effects import without_effect
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.config.process_checks import (
    problems_of_actors,
    problems_of_licences,
    problems_of_nodes,
    problems_of_samplers_per_actor,
)
from dppo.config.sac_checks import problems_with_sac
from dppo.config.settings import Settings
from dppo.errors import ConfigError, counted, refuse

MIN_EPISODES = 2  # fewest episodes of an evaluation that compares the policy with a baseline
MAX_LAYERS = 1000
MIN_AMOUNT = 1e-4  # smallest amount of a resource in Ray
MAX_DRAWN = 10**6  # rows of a minibatch that is drawn from earlier iterations, too
MAX_TRIED = 10**6  # numbers tried as divisors, to suggest some


Problem = tuple[str, str]
"""The name of a setting, and its problem, which follows its value in a message."""


def check(config: Settings) -> None:
    """Raise ConfigError, with a line for each setting that contradicts others: the numbers, and a remedy."""
    refuse(_refusals(config))


def _refusals(config: Settings) -> Iterator[ConfigError]:
    has_batch = True
    for group in PROBLEMS:
        # checks of minibatches would only repeat that the batch is invalid
        if group in OF_MINIBATCHES and not has_batch:
            continue
        for refusal in _refusals_of(group, config):
            has_batch = has_batch and group is not _problems_of_the_batch
            yield refusal


def _refusals_of(
    group: Callable[[Settings], Iterator[Problem]], config: Settings
) -> Iterator[ConfigError]:
    """Yield the problems of a group as errors, also the one that ends it."""
    try:
        for name, problem in group(config):
            yield ConfigError(f"{name}={getattr(config, name)}{problem}", setting=name)
    except ConfigError as error:
        yield error


def describe_batch(config: Settings) -> str:
    """Name the factors of the batch: `8 samplers x 1 env x 128 steps`."""
    sizes = (
        (config.num_samplers, "sampler"),
        (config.envs_per_sampler, "env"),
        (config.num_steps, "step"),
    )
    return " x ".join(counted(size, noun) for size, noun in sizes)


# ------------------------------------------------------------------ contradictions


def _problems_of_lengths(config: Settings) -> Iterator[Problem]:
    if len(config.resize) not in (0, 2):
        raise ConfigError(
            f"resize={' '.join(map(str, config.resize))}: must be two numbers, height and width: 84 84.",
            setting="resize",
        )
    if len(config.hidden_sizes) > MAX_LAYERS:
        raise ConfigError(
            f"hidden_sizes: are more than {MAX_LAYERS} layers. Use fewer.", setting="hidden_sizes"
        )
    _ = config.kept_checkpoints  # raises if keep_checkpoints has another form
    if config.recorded_every is None:
        yield "record_episodes", ": must be all, best, none, or a number such as every=100."


def _problems_of_the_batch(config: Settings) -> Iterator[Problem]:
    batch = describe_batch(config)
    if config.batch_size <= 1:
        yield (
            "num_steps",
            f" makes a batch of {config.batch_size} step ({batch}), which is too small. Raise `num_steps`; 64 is "
            f"usual.",
        )
    if config.total_timesteps < config.batch_size:
        yield (
            "total_timesteps",
            f" is less than one batch of {config.batch_size} steps ({batch}). Raise it, or lower `num_steps`.",
        )
    if config.reuse > config.iterations:
        yield (
            "reuse",
            f" is more than the {counted(config.iterations, 'iteration')} of {config.batch_size} steps ({batch}) of "
            f"this run. Use `reuse={config.iterations}` or less, or lower `num_steps`.",
        )
    if config.policy_lag > 1 and config.overlap:
        yield "policy_lag", ": overlap=True sets a lag of 1. Leave one of them out."
    if config.policy_lag >= config.iterations:
        yield (
            "policy_lag",
            f" needs more than {counted(config.policy_lag, 'iteration')}, or the first policy collects everything: "
            f"total_timesteps={config.total_timesteps} makes {config.iterations} of {config.batch_size} steps. Raise "
            f"`total_timesteps` to more than {config.policy_lag * config.batch_size}, or lower `policy_lag`.",
        )
    largest_minibatch = {"ppo": config.batch_size}.get(config.algo, MAX_DRAWN)
    if config.minibatch_size is not None and config.minibatch_size > largest_minibatch:
        yield (
            "minibatch_size",
            f" is larger than the batch of {config.batch_size} steps ({batch}). Use at most {config.batch_size}, or "
            f"raise `num_steps`.",
        )


def _problems_of_devices(config: Settings) -> Iterator[Problem]:
    if config.num_learners > 0 and config.device != "cpu" and config.learner_gpus == 0:
        yield (
            "device",
            ": learners on Ray see only the GPUs that they request, and learner_gpus=0 requests none. Use "
            "`learner_gpus=1`, or `device=cpu`.",
        )
    shares_gpu = config.learner_gpus < 1 and config.num_learners <= 1
    if config.learner_gpus not in (0, 1) and not shares_gpu:
        yield (
            "learner_gpus",
            ": a learner trains on one GPU, and learners cannot share one. Use `learner_gpus=1`.",
        )
    if config.actor_gpus > 1 and config.actor_gpus != int(config.actor_gpus):
        yield (
            "actor_gpus",
            ": an actor has a share of one GPU, or whole ones. Use a fraction below 1, or a whole number.",
        )
    if config.num_learners > 0 and config.learner_threads > max(1.0, config.learner_cpus):
        yield (
            "learner_threads",
            f" is more than learner_cpus={config.learner_cpus:g}, the CPUs that a learner reserves. Use "
            f"`learner_cpus={config.learner_threads}`.",
        )


def _problems_of_minibatches(config: Settings) -> Iterator[Problem]:
    """Refuse sequences that do not fit into a segment or a minibatch, and minibatches that do not fit the batch."""
    steps = config.sizes.sequence_length
    if config.num_steps % steps:
        near = sorted(_nearest_divisors(config.num_steps, steps))
        raise ConfigError(
            f"sequence_length={steps} does not divide num_steps={config.num_steps}. {_use('sequence_length', near)}.",
            setting="sequence_length",
        )
    for name in ("minibatch_size", "micro_batch_size"):
        rows = getattr(config, name)
        if rows is not None and rows < steps:
            yield (
                name,
                f" is less than a sequence of {steps} steps. Raise it, or lower `sequence_length`.",
            )
    if config.algo == "sac":
        return
    per_epoch = config.sizes.minibatches_per_epoch
    if config.norm_adv is not False and config.batch_size // per_epoch < 2:
        yield (
            "minibatch_size" if config.minibatch_size else "num_steps",
            f" splits the batch of {config.batch_size} rows into {per_epoch} minibatches, some of one row, whose "
            f"advantage cannot be standardized. Use a `minibatch_size` of at least {min(3, config.batch_size)} (64 is "
            f"usual), or `norm_adv=False`.",
        )


def _problems_of_ray(config: Settings) -> Iterator[Problem]:
    check_address(config.address or "", "address")
    for name in ("cpus_per_actor", "actor_gpus", "learner_cpus"):
        if 0 < getattr(config, name) < MIN_AMOUNT:
            yield (
                name,
                f": Ray counts in units of {MIN_AMOUNT}. Use `{name}={MIN_AMOUNT}` or more.",
            )
    for group in config.resource_groups:
        for name, amount in group.items():
            is_custom = name not in ("CPU", "GPU", "memory", "object_store_memory")
            if not (is_custom and MIN_AMOUNT <= amount < math.inf):
                yield (
                    "actor_resources",
                    f": {name}={amount} is not a custom resource with an amount of at least {MIN_AMOUNT}. Use "
                    f"`cpus_per_actor` for CPUs and `actor_gpus` for GPUs; name others as the cluster does.",
                )


ADDRESSES = {
    "http": "the address of Ray's dashboard, which takes `ray job submit`",
    "ray": "the address of a Ray Client server, which is not supported",
}


def check_address(address: str, source: str) -> None:
    """Refuse an address of anything but a Ray cluster; `source` is the setting or the variable that holds it."""
    if address not in ("", "auto", "local") and not re.fullmatch(r"[^/]+:\d+", address):
        scheme = address.partition("://")[0]
        kind = ADDRESSES.get(scheme.removesuffix("s"), "not an address of a Ray cluster")
        unset = ""
        if source != "address":
            unset = f", or unset {source} to start Ray here"
        raise ConfigError(
            f"{source}={address}: this is {kind}. On a node of the cluster use `address=auto`, or the head's "
            f"host:port (6379 by default){unset}.",
            setting=source,
        )


def _problems_of_shares(config: Settings) -> Iterator[Problem]:
    """Refuse sizes that give learners unequal numbers of samplers or rows."""
    learners = config.num_learners
    if learners <= 1:
        return
    if config.num_samplers % learners:
        low = config.num_samplers // learners * learners
        near = [n for n in (low, low + learners) if n >= max(1, config.actor_bounds[0])]
        yield (
            "num_learners",
            f" cannot share {config.num_samplers} samplers evenly. {_use('num_samplers', near)}, or a different "
            f"number of learners.",
        )
    if config.algo == "sac":
        return
    steps = config.sizes.sequence_length
    per_epoch = config.sizes.minibatches_per_epoch
    sequences = config.batch_size // steps // learners
    if sequences % per_epoch:
        near = _nearest_divisors(sequences, per_epoch, limit=max(1, sequences // 2))
        best = sorted(near, reverse=True)
        rows = f"{sequences} rows"
        if steps > 1:
            rows = f"{sequences} sequences of {steps} rows"
        raise ConfigError(
            f"minibatch_size={config.minibatch_size or config.sizes.minibatch_rows}: {per_epoch} minibatches do not "
            f"divide the {rows} of each learner evenly. "
            f"{_use('minibatch_size', [config.batch_size // n for n in best])}, or a different number of learners.",
            setting="minibatch_size",
        )


def _problems_of_the_baseline(config: Settings) -> Iterator[Problem]:
    if config.baseline is not None and config.eval_episodes < MIN_EPISODES:
        yield (
            "eval_episodes",
            f" is too few to compare the policy with the baseline: an interval needs at least {MIN_EPISODES}, and a "
            f"useful one 10. Use `eval_episodes={EVAL_EPISODES}`, or leave `baseline` out.",
        )


def _problems_of_the_prior(config: Settings) -> Iterator[Problem]:
    """Refuse a controller to start from where its rows cannot be cloned, or leave nothing to train."""
    if config.prior is None:
        return
    if config.frame_stack > 1:
        yield (
            "prior",
            f": frame_stack={config.frame_stack} stores stacks of frames in parts, which are not kept for cloning. "
            f"Leave one of them out.",
        )
    if config.env_state == "own":
        yield (
            "prior",
            ": env_state=own sets states without a replay, by which the controller of a lost sampler would be brought "
            "back. Use `env_state=auto`, or leave it out.",
        )
    collected = config.collected_by_prior
    if collected >= config.iterations:
        steps = counted(collected, "iteration")
        lag = ""
        if config.lag:
            lag = f", {config.lag} of them for the policy lag,"
        yield (
            "prior" if config.prior_steps is None else "prior_steps",
            f": the controller collects {steps}{lag} of {config.batch_size} steps ({describe_batch(config)}), and the "
            f"run has {config.iterations}, so that none is left to train. Raise `total_timesteps` to more than "
            f"{collected * config.batch_size}{_less_of_the_prior(config)}.",
        )


def _less_of_the_prior(config: Settings) -> str:
    """Return the settings that leave more iterations after the controller's if they are lowered; "" without any."""
    names = []
    if config.lag + 1 < config.iterations:
        names.append("`prior_steps`")
    if (config.prior_steps or 0) < config.total_timesteps:
        names.append("`num_steps`")
    if names:
        return f", or lower {' or '.join(names)}"
    return ""


def _use(name: str, values: list[int]) -> str:
    return " or ".join([f"Use `{name}={values[0]}`", *map(str, values[1:])])


def _nearest_divisors(number: int, near: int, limit: float = math.inf) -> list[int]:
    """Return the two divisors of `number`, up to `limit`, that are nearest to `near`; a prime may have only one."""
    small = [n for n in range(1, min(math.isqrt(number), MAX_TRIED) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return sorted((n for n in divisors if n <= limit), key=lambda n: abs(n - near))[:2]


def _problems_of_model_kwargs(config: Settings) -> Iterator[Problem]:
    """Refuse arguments that a checkpoint cannot store: loading a policy builds its network from them."""
    for name, value in config.model_kwargs.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            yield (
                "model_kwargs",
                f": {name}={value!r} is not JSON, which checkpoints store. Use numbers, text, lists, dicts.",
            )


def _problems_of_sac(config: Settings) -> Iterator[Problem]:
    if config.algo == "sac":
        yield from problems_with_sac(config)


def _settings_without_effect(config: Settings) -> Iterator[Problem]:
    for name, reason in without_effect(config):
        yield name, f" has no effect: {reason}."


PROBLEMS = (
    _problems_of_lengths,
    _problems_of_sac,
    _problems_of_the_batch,
    problems_of_actors,
    problems_of_nodes,
    problems_of_licences,
    problems_of_samplers_per_actor,
    _problems_of_devices,
    _problems_of_minibatches,
    _problems_of_ray,
    _problems_of_shares,
    _problems_of_model_kwargs,
    _problems_of_the_baseline,
    _problems_of_the_prior,
    _settings_without_effect,
)
"""Groups of checks; each ends with its first error that is raised, not yielded."""
OF_MINIBATCHES = (_problems_of_minibatches, _problems_of_shares)
"""Groups that compute with a valid batch."""
