"""Checks of actors, nodes, and the numbers of environments that processes and licences allow.

Each yields the name of a setting, and its problem, which follows its value in a message.
"""

import math
from collections.abc import Iterator

from dppo.config.settings import Settings
from dppo.errors import counted


def problems_of_actors(config: Settings) -> Iterator[tuple[str, str]]:
    fewest, most = config.actor_bounds
    if config.num_actors != 0 and not 1 <= fewest <= most:
        yield (
            "num_actors",
            ": the lower bound must be at least 1, and at most the upper one. Use one such as `num_actors=4..64`; "
            "`num_actors=0` collects in this process.",
        )
    if fewest > config.num_samplers:
        yield (
            "num_actors",
            f" is more than num_samplers={config.num_samplers}, and each actor hosts one at least. Use "
            f"`num_actors={config.num_samplers}` or fewer, or `num_samplers={fewest}`, which makes the batch larger "
            f"and so changes the learning problem.",
        )
    starts_apart = config.start_interval_s > 0  # raises if start_rate is not a rate
    is_counted = config.licences is not None or config.layout.cores > 0
    if config.backup_requests and (starts_apart or is_counted):
        yield (
            "backup_requests",
            ": makes environments of a sampler a second time, whatever `licences`, `start_rate` and `ranks_per_env` "
            "allow. Leave it out, or these.",
        )


def problems_of_nodes(config: Settings) -> Iterator[tuple[str, str]]:
    most = config.node_counts[-1]
    if config.ranks_per_env % most:
        rounded_up = most * math.ceil(config.ranks_per_env / most)
        fewer = max(count for count in range(1, most) if config.ranks_per_env % count == 0)
        yield (
            "nodes_per_env",
            f": ranks_per_env={config.ranks_per_env} cannot be divided evenly among {most} nodes. Use "
            f"`nodes_per_env={fewer}` or `ranks_per_env={rounded_up}`.",
        )
    if most > 1 and (len(config.resource_groups) > 1 or config.actors_per_node is not None):
        yield (
            "nodes_per_env",
            ": an actor on several nodes has no alternatives in actor_resources, and no limit of actors_per_node. "
            "Leave one of them out.",
        )


def problems_of_licences(config: Settings) -> Iterator[tuple[str, str]]:
    needed = config.envs_of_sampler * config.num_samplers + config.evaluators
    if config.licences is None or needed <= config.licences:
        return
    evaluating = ""
    if config.evaluators:
        evaluating = f" + {config.evaluators} for evaluations"
    copies = counted(1 + config.standby_envs, "copy", "copies")
    remedies = ", or ".join([*_fewer_environments(config, config.licences), "raise `licences`"])
    yield (
        "licences",
        f" is less than the {counted(needed, 'environment')} that exist at once ({config.num_samplers} samplers x "
        f"{config.envs_per_sampler} env x {copies}{evaluating}). To change that, {remedies}.",
    )


def _fewer_environments(config: Settings, licences: int) -> Iterator[str]:
    """Yield ways to need fewer environments."""
    num_samplers = (licences - config.evaluators) // config.envs_of_sampler
    if num_samplers >= max(1, config.actor_bounds[0]):
        yield f"use `num_samplers={num_samplers}`, for a smaller batch"
    elif num_samplers > 0:
        yield f"use `num_samplers={num_samplers}` with `num_actors={num_samplers}`, for a smaller batch"
    elif config.envs_per_sampler > 1:
        yield "lower `envs_per_sampler`, for a smaller batch"
    if config.standby_envs:
        yield "lower `standby_envs`"
    if config.evaluators > 1:
        yield "lower `eval_actors`"
    elif config.evaluators:
        yield "leave `eval_every` out"


def problems_of_samplers_per_actor(config: Settings) -> Iterator[tuple[str, str]]:
    """Refuse settings with which a process would have more samplers, or more environments, than it may."""
    limit = config.samplers_per_actor
    if limit is None:
        return
    name = "samplers_per_actor"
    samplers = config.num_samplers
    fewest = config.fewest_for(samplers)
    needed = str(fewest)
    if config.elastic:
        needed = f"{config.actor_bounds[0]}..{fewest}"
    if config.num_actors == 0 and samplers > limit:
        yield (
            name,
            f": num_actors=0 hosts all {samplers} samplers in this process. Use `num_actors={needed}`.",
        )
    if config.num_actors != 0 and fewest > config.most_actors:
        hosted = config.most_actors * limit
        yield (
            name,
            f": num_actors={config.num_actors} hosts {hosted} of {samplers} samplers at most. Use "
            f"`num_actors={needed}`, or `num_samplers={hosted}` for a smaller batch.",
        )
    if config.num_actors == 0 and samplers <= limit < samplers + config.evaluators:
        yield (
            name,
            f": num_actors=0 evaluates in this process, which has {samplers} already. Use `num_actors={needed}`, "
            f"where evaluations have processes of their own, or leave `eval_every` out.",
        )
    if config.standby_envs:
        yield (
            "standby_envs",
            f": makes {counted(1 + config.standby_envs, 'copy', 'copies')} of each environment in the same process, "
            f"more than samplers_per_actor={limit} is meant to allow. Leave one of them out.",
        )
    if config.env_threads:
        yield (
            "env_threads",
            f": runs several samplers side by side in each process, and closes those that have moved away while it "
            f"makes others, whatever samplers_per_actor={limit} allows. Leave one of them out.",
        )
    if config.backup_requests:
        yield (
            "backup_requests",
            f": makes environments of a sampler a second time, in a process that has others, whatever "
            f"samplers_per_actor={limit} allows. Leave one of them out.",
        )
