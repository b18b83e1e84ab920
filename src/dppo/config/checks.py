"""Checks across settings: sizes, the shares of several learners, and settings without effect."""

import json
import math
from collections.abc import Callable, Iterator

from dppo.config.parts import FlatSettings, default_of
from dppo.errors import ConfigError, counted

MOST_LAYERS = 1000
LEAST_AMOUNT = 1e-4  # of a resource, in Ray
MOST_TRIED = 10**6  # numbers tried as divisors, to suggest some

# fmt: off
LIMITS: tuple[tuple[Callable[[FlatSettings], bool], str], ...] = (
    (lambda c: c.batch_size > 1,
     "num_steps={config.num_steps} makes a batch of {config.batch_size} step ({batch}), which is too small. Raise "
     "`num_steps`; 64 is usual."),
    (lambda c: c.total_timesteps >= c.batch_size,
     "total_timesteps={config.total_timesteps} is less than one batch of {config.batch_size} steps ({batch}). Raise "
     "it, or lower `num_steps`."),
    (lambda c: len(c.hidden_sizes) <= MOST_LAYERS,
     f"hidden_sizes: are more than {MOST_LAYERS} layers. Use fewer."),
    (lambda c: c.recorded_every is not None,
     "record_episodes={config.record_episodes}: must be all, best, none, or a number such as every=100."),
    (lambda c: c.reuse <= c.iterations,
     "reuse={config.reuse} is more than the {iterations} of {config.batch_size} steps ({batch}) of this run. Use "
     "`reuse={config.iterations}` or less, or lower `num_steps`."),
    (lambda c: c.policy_lag < 2 or not c.overlap,
     "policy_lag={config.policy_lag}: overlap=True sets a lag of 1. Leave one of them out."),
    (lambda c: c.policy_lag < c.iterations,
     "policy_lag={config.policy_lag} needs more than {lag}, or the first policy collects everything: "
     "total_timesteps={config.total_timesteps} makes {config.iterations} of {config.batch_size} steps. Raise "
     "`total_timesteps` to more than {lag_steps}, or lower `policy_lag`."),
    (lambda c: c.minibatch_size is None or c.minibatch_size <= c.batch_size,
     "minibatch_size={config.minibatch_size} is larger than the batch of {config.batch_size} steps ({batch}). Use at "
     "most {config.batch_size}, or raise `num_steps`."),
    (lambda c: c.num_actors == 0 or 1 <= c.actor_bounds[0] <= c.actor_bounds[1],
     "num_actors={config.num_actors}: the lower bound must be at least 1, and at most the upper one. Use one such as "
     "`num_actors=4..64`; `num_actors=0` collects in this process."),
    (lambda c: c.actor_bounds[0] <= c.num_samplers,
     "num_actors={config.num_actors} is more than num_samplers={config.num_samplers}, and each actor hosts one at "
     "least. Use `num_actors={config.num_samplers}` or fewer, or `num_samplers={config.actor_bounds[0]}`, which makes "
     "the batch larger and so changes the learning problem."),
    (lambda c: c.licences is None or c.envs_of_sampler * c.num_samplers + c.evaluators <= c.licences,
     "licences={config.licences} is less than the {envs} that exist at once ({config.num_samplers} samplers x "
     "{config.envs_per_sampler} env x {copies}{evaluating}). To change that, {fewer}."),
    (lambda c: c.samplers_per_actor is None or c.num_actors != 0 or c.num_samplers <= c.samplers_per_actor,
     "samplers_per_actor={config.samplers_per_actor}: num_actors=0 hosts all {config.num_samplers} samplers in this "
     "process. Use `num_actors={needed}`."),
    (lambda c: c.samplers_per_actor is None or c.num_actors == 0 or c.fewest_for(c.num_samplers) <= c.most_actors,
     "samplers_per_actor={config.samplers_per_actor}: num_actors={config.num_actors} hosts {hosted} of "
     "{config.num_samplers} samplers at most. Use `num_actors={needed}`, or `num_samplers={hosted}` for a smaller "
     "batch."),
    (lambda c: c.samplers_per_actor is None or c.num_actors != 0
     or c.num_samplers + c.evaluators <= c.samplers_per_actor,
     "samplers_per_actor={config.samplers_per_actor}: num_actors=0 evaluates in this process, which has "
     "{config.num_samplers} already. Use `num_actors={needed}`, where evaluations have processes of their own, or "
     "leave `eval_every` out."),
    (lambda c: c.samplers_per_actor is None or not c.standby_envs,
     "standby_envs={config.standby_envs}: makes {copies} of each environment in the same process, more than "
     "samplers_per_actor={config.samplers_per_actor} is meant to allow. Leave one of them out."),
    (lambda c: c.samplers_per_actor is None or not c.env_threads,
     "env_threads=True: runs several samplers side by side in each process, and closes those that have moved away "
     "while it makes others, whatever samplers_per_actor={config.samplers_per_actor} allows. Leave one of them out."),
    (lambda c: c.samplers_per_actor is None or not c.backup_requests,
     "backup_requests=True: makes environments of a sampler a second time, in a process that has others, whatever "
     "samplers_per_actor={config.samplers_per_actor} allows. Leave one of them out."),
    (lambda c: (c.start_interval_s == 0 and c.licences is None) or not c.backup_requests,
     "backup_requests=True: makes environments of a sampler a second time, whatever `licences` and `start_rate` allow. "
     "Leave it out, or these."),
    (lambda c: c.num_learners == 0 or c.device == "cpu" or c.learner_gpus > 0,
     "device={config.device}: learners on Ray see only the GPUs that they request, and learner_gpus=0 requests none. "
     "Use `learner_gpus=1`, or `device=cpu`."),
    (lambda c: c.learner_gpus in (0, 1) or (c.learner_gpus < 1 and c.num_learners <= 1),
     "learner_gpus={config.learner_gpus:g}: a learner trains on one GPU, and learners cannot share one. Use "
     "`learner_gpus=1`."),
    (lambda c: c.actor_gpus <= 1 or c.actor_gpus == int(c.actor_gpus),
     "actor_gpus={config.actor_gpus:g}: an actor has a share of one GPU, or whole ones. Use a fraction below 1, or a "
     "whole number."),
    (lambda c: c.num_learners == 0 or c.learner_threads <= max(1.0, c.learner_cpus),
     "learner_threads={config.learner_threads} is more than learner_cpus={config.learner_cpus:g}, the CPUs that a "
     "learner reserves. Use `learner_cpus={config.learner_threads}`."),
)
"""Conditions of every run, and otherwise the fact and a remedy."""

NEEDS: tuple[tuple[str, Callable[[FlatSettings], bool], str], ...] = (
    ("obs_dtype", lambda c: c.norm_obs or c.dtype == "float64",
     "the network reads float32. Use `norm_obs=True`, which normalizes before rounding, or `dtype=float64`"),
    ("desired_kl", lambda c: not c.anneal_lr,
     "anneal_lr sets the learning rate. Use `anneal_lr=False`, or leave it out"),
    ("desired_kl", lambda c: c.reuse == 1,
     "reuse={config.reuse} adapts the learning rate to the total variation. Leave one of them out"),
    ("desired_kl", lambda c: c.update_epochs != 1 or c.sizes.minibatches_per_epoch > 1,
     "an update is a single SGD step here. Leave it out, or raise `update_epochs`"),
    ("target_kl", lambda c: c.target_kl == 0 or c.update_epochs != 1 or c.sizes.minibatches_per_epoch > 1,
     "an update is a single SGD step here. Leave it out, or raise `update_epochs`"),
    ("recompute_advantages", lambda c: c.update_epochs != 1,
     "advantages of the only epoch are fresh. Leave it out, or raise `update_epochs`"),
    ("adv_floor", lambda c: c.norm_adv is not False and c.norm_reward,
     "advantages are not standardized, or have no unit. Use `norm_adv=True` and `norm_reward=True`, or leave it out"),
    ("clip_vloss norm_value", lambda c: c.vf_coef > 0,
     "vf_coef=0 disables the value loss. Leave it out, or raise `vf_coef`"),
    ("anneal_ent", lambda c: bool(c.ent_coef),
     "ent_coef=0 leaves the entropy out, and a default is not lowered. Leave it out, or raise `ent_coef`"),
    ("norm_obs_keys", lambda c: c.norm_obs,
     "norm_obs=False normalizes nothing. Use `norm_obs=True`, or leave it out"),
    ("freeze_norm_after", lambda c: c.norm_obs or c.norm_reward,
     "there are no statistics to freeze. Use `norm_obs=True` or `norm_reward=True`, or leave it out"),
    ("clip_reward", lambda c: not c.sign_reward,
     "sign_reward leaves -1, 0 and 1. Leave one of them out"),
    ("scale_reward", lambda c: not c.norm_reward,
     "norm_reward divides by a deviation that has the same factor. Use `norm_reward=False`, or leave it out"),
    ("model_kwargs", lambda c: c.model is not None,
     "it applies to a model of your own only. Set `model`, or leave it out"),
    ("hidden_sizes activation image_encoder image_features trunk layer_norm state_dependent_std log_std_init memory",
     lambda c: c.model is None,
     "it applies to the default network only, not to model={config.model_name}. Leave it out"),
    ("log_std_init", lambda c: not c.state_dependent_std,
     "with state_dependent_std the network starts with its own. Leave one of them out"),
    ("activation layer_norm", lambda c: bool(c.hidden_sizes),
     "hidden_sizes is empty. Leave it out"),
    ("memory_size", lambda c: c.memory != "none",
     "memory=none has no state. Set `memory`, or leave it out"),
    ("sequence_length", lambda c: c.memory != "none" or c.model is not None,
     "only a network with memory learns from sequences. Set `memory`, or leave it out"),
    ("address upload cpus_per_actor actor_gpus actor_resources actors_per_node segment_timeout_s start_timeout_s "
     "reset_timeout_s step_timeout_s max_actor_restarts on_other_cpu dashboard",
     lambda c: c.num_actors != 0,
     "num_actors=0 starts no actors. Use `num_actors=1` or more"),
    ("recycle_after", lambda c: c.recycling and c.num_actors != 0,
     "num_actors=0 starts no actors. Use `num_actors=1` or more"),
    ("actors_per_node", lambda c: (c.actors_per_node or 1) < c.most_actors + c.evaluators,
     "there are never more than {config.most_actors} actors, and {config.evaluators} of evaluations. Leave it out, or "
     "raise `num_actors`"),
    ("backup_requests", lambda c: c.num_actors not in (0, 1),
     "num_actors={config.num_actors} leaves no other actor to ask. Use `num_actors=2` or more, or leave it out"),
    ("backup_requests", lambda c: c.replay,
     "replay=False abandons the open episodes of a sampler that is rebuilt. Leave one of them out"),
    ("replay_limit", lambda c: c.replay,
     "replay=False replays nothing. Leave one of them out"),
    ("env_threads", lambda c: c.num_samplers > max(1, c.actor_bounds[0]),
     "each process has a single sampler, and so a single thread. Use fewer actors than samplers, or leave it out"),
    ("num_learners", lambda c: c.num_actors != 0,
     "num_actors=0 runs everything in this process. Use `num_actors=1` or more"),
    ("learner_cpus learner_gpus", lambda c: c.num_learners > 0,
     "num_learners=0 trains in this process. Use `num_learners=1` or more"),
    ("env_faults", lambda c: c.fault_budget[0] > 0 and c.on_env_fault != "raise",
     "on_env_fault=raise survives no fault. Leave one of them out"),
    ("eval_episodes eval_stochastic eval_env_kwargs eval_actors eval_timeout_s", lambda c: c.eval_every is not None,
     "eval_every=None evaluates nothing. Set `eval_every`, or leave it out"),
    ("eval_actors", lambda c: c.num_actors != 0,
     "num_actors=0 evaluates in this process. Use `num_actors=1` or more"),
    ("eval_actors", lambda c: c.eval_actors <= c.eval_episodes,
     "each plays an episode at a time, and an evaluation has {config.eval_episodes}. Use as many or fewer"),
    ("dashboard", lambda c: c.address is None,
     "a running cluster has its own dashboard. Leave it out"),
    ("precision", lambda c: c.numerics != "strict",
     "numerics=strict forbids the instructions of AVX-512 for bfloat16. Leave one of them out"),
    ("precision", lambda c: c.dtype == "float32",
     "dtype={config.dtype} asks for more precision than float32. Leave one of them out"),
    ("micro_batch_size", lambda c: (c.micro_batch_size or 0) * max(1, c.num_learners) < c.sizes.minibatch_rows,
     "a minibatch has {config.sizes.minibatch_rows} rows. Use a smaller one, or leave it out"),
    ("reuse", lambda c: c.frame_stack == 1,
     "frame_stack={config.frame_stack} stores stacks of frames in parts, which are not kept. Leave one of them out"),
    ("learner_gpus", lambda c: c.device != "cpu",
     "device=cpu trains on the CPU. Use `device=cuda`"),
)
"""Settings that have an effect under a condition only, and otherwise the reason why they have none, and a remedy."""
# fmt: on


def check(config: FlatSettings) -> None:
    """Raise ConfigError for the first settings that contradict each other, with the numbers and a remedy."""
    if len(config.resize) not in (0, 2):
        raise ConfigError(f"resize={' '.join(map(str, config.resize))}: must be two numbers, height and width: 84 84.")
    facts = {"config": config, "batch": batch_in_words(config), "lag_steps": config.policy_lag * config.batch_size}
    facts |= {"iterations": counted(config.iterations, "iteration"), "lag": counted(config.policy_lag, "iteration")}
    facts |= {"envs": counted(config.envs_of_sampler * config.num_samplers + config.evaluators, "environment")}
    facts |= {"evaluating": f" + {config.evaluators} for evaluations" if config.evaluators else ""}
    facts |= {"copies": counted(1 + config.standby_envs, "copy", "copies")}
    needed = config.fewest_for(config.num_samplers)
    facts |= {"needed": f"{config.actor_bounds[0]}..{needed}" if config.elastic else needed}
    facts |= {"hosted": config.most_actors * (config.samplers_per_actor or 0)}
    facts |= {"fewer": ", or ".join([*_fewer_environments(config), "raise `licences`"])}
    for holds, otherwise in LIMITS:
        if not holds(config):
            raise ConfigError(otherwise.format(**facts))
    _check_minibatches(config)
    _check_ray(config)
    _check_shares(config)
    _check_model_kwargs(config)
    for name, reason in without_effect(config):
        raise ConfigError(f"{name}={getattr(config, name)} has no effect: {reason}.")


def _fewer_environments(config: FlatSettings) -> Iterator[str]:
    """Yield ways to need fewer environments, in words."""
    fits = ((config.licences or 0) - config.evaluators) // config.envs_of_sampler
    if fits > 0:
        yield f"use `num_samplers={fits}`, for a smaller batch"
    elif config.envs_per_sampler > 1:
        yield "lower `envs_per_sampler`, for a smaller batch"
    if config.standby_envs:
        yield "lower `standby_envs`"
    if config.evaluators:
        yield "lower `eval_actors`" if config.evaluators > 1 else "leave `eval_every` out"


def without_effect(config: FlatSettings) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that differs from its default but has no effect, and the reason."""
    for names, holds, otherwise in NEEDS:
        for name in names.split():
            if getattr(config, name) != default_of(name) and not holds(config):
                yield name, otherwise.format(config=config)


def batch_in_words(config: FlatSettings) -> str:
    """Return the factors of the batch: `8 samplers x 1 env x 128 steps`."""
    sizes = ((config.num_samplers, "sampler"), (config.envs_per_sampler, "env"), (config.num_steps, "step"))
    return " x ".join(counted(size, noun) for size, noun in sizes)


def _check_minibatches(config: FlatSettings) -> None:
    """Refuse sequences that do not fit into a segment or a minibatch, and minibatches that do not fit the batch."""
    steps = config.sizes.sequence_length
    if config.num_steps % steps:
        near = sorted(_nearest_divisors(config.num_steps, steps))
        raise ConfigError(
            f"sequence_length={steps} does not divide num_steps={config.num_steps}. {_use('sequence_length', near)}."
        )
    for name in ("minibatch_size", "micro_batch_size"):
        rows = getattr(config, name)
        if rows is not None and rows < steps:
            raise ConfigError(
                f"{name}={rows} is less than a sequence of {steps} steps. Raise it, or lower `sequence_length`."
            )
    if config.norm_adv is not False and config.batch_size // (per_epoch := config.sizes.minibatches_per_epoch) < 2:
        name = "minibatch_size" if config.minibatch_size else "num_steps"
        raise ConfigError(
            f"{name}={getattr(config, name)} splits the batch of {config.batch_size} rows into {per_epoch} "
            f"minibatches, some of one row, whose advantage cannot be standardized. Use a `minibatch_size` of at least "
            f"{min(3, config.batch_size)} (64 is usual), or `norm_adv=False`."
        )


def _check_ray(config: FlatSettings) -> None:
    check_address(config.address or "", "address")
    for name in ("cpus_per_actor", "actor_gpus", "learner_cpus"):
        if 0 < (amount := getattr(config, name)) < LEAST_AMOUNT:
            raise ConfigError(
                f"{name}={amount:g}: Ray counts in units of {LEAST_AMOUNT}. Use `{name}={LEAST_AMOUNT}` or more."
            )
    for name, amount in [item for group in config.resource_groups for item in group.items()]:
        if name in ("CPU", "GPU", "memory", "object_store_memory") or not LEAST_AMOUNT <= amount < math.inf:
            raise ConfigError(
                f"actor_resources={config.actor_resources}: {name}={amount} is not a custom resource with an amount of "
                f"at least {LEAST_AMOUNT}. Use `cpus_per_actor` for CPUs and `actor_gpus` for GPUs; name others as the "
                f"cluster does."
            )


def check_address(address: str, source: str) -> None:
    """Refuse an address that is not that of a Ray cluster; `source` is the setting or the variable that holds it."""
    scheme, separator, _ = address.partition("://")
    if separator:
        kind = {
            "http": "the address of Ray's dashboard, which takes `ray job submit`",
            "ray": "the address of a Ray Client server, which is not supported",
        }.get(scheme.removesuffix("s"), "not an address of a Ray cluster")
        unset = "" if source == "address" else f", or unset {source} to start Ray here"
        raise ConfigError(
            f"{source}={address}: this is {kind}. On a node of the cluster use `address=auto`, or the head's "
            f"host:port (6379 by default){unset}."
        )


def _check_model_kwargs(config: FlatSettings) -> None:
    """Refuse arguments that a checkpoint cannot store: loading a policy builds its network from them."""
    for name, value in config.model_kwargs.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"model_kwargs: {name}={value!r} is not JSON, which checkpoints store. Use numbers, text, lists, dicts."
            ) from None


def _check_shares(config: FlatSettings) -> None:
    """Refuse sizes that give learners unequal numbers of samplers or rows."""
    learners = config.num_learners
    if learners <= 1:
        return
    if config.num_samplers % learners:
        low = config.num_samplers // learners * learners
        near = [n for n in (low, low + learners) if n >= max(1, config.actor_bounds[0])]
        raise ConfigError(
            f"num_learners={learners} cannot share {config.num_samplers} samplers evenly. "
            f"{_use('num_samplers', near)}, or a different number of learners."
        )
    steps, per_epoch = config.sizes.sequence_length, config.sizes.minibatches_per_epoch
    sequences = config.batch_size // steps // learners
    if sequences % per_epoch:
        best = _nearest_divisors(sequences, per_epoch, most=max(1, sequences // 2))
        rows = f"{sequences} rows" if steps == 1 else f"{sequences} sequences of {steps} rows"
        fact = f"{per_epoch} minibatches do not divide the {rows} of each learner evenly"
        use = _use("minibatch_size", [config.batch_size // n for n in sorted(best, reverse=True)])
        raise ConfigError(
            f"minibatch_size={config.minibatch_size or config.sizes.minibatch_rows}: {fact}. {use}, or a "
            "different number of learners."
        )


def _use(name: str, values: list[int]) -> str:
    first, *others = values
    return " or ".join([f"Use `{name}={first}`", *map(str, others)])


def _nearest_divisors(number: int, near: int, most: float = math.inf) -> list[int]:
    """Return the two divisors of `number`, up to `most`, that are nearest to `near`; a prime may have only one."""
    small = [n for n in range(1, min(math.isqrt(number), MOST_TRIED) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return sorted((n for n in divisors if n <= most), key=lambda n: abs(n - near))[:2]
