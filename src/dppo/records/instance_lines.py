"""Advice for environments of which only few instances can exist: in a process, on a node, or by their licences."""

import math

from dppo.config import Config
from dppo.errors import EnvFault, counted
from dppo.invocation import as_setting_and_flag


def instances_line(config: Config, fault: EnvFault | None) -> str:
    """Return what may limit the number of environments, to append to the error of a constructor; "" for other faults.

    If the process had made other instances, it may be the process that allows no more; otherwise it may be the
    licences of the run or of the node.
    """
    if fault is None or fault.phase != "constructor":
        return ""
    if fault.others:
        return f". {_limit_of_process(config, fault)}{_limit_by_licences(config)}"
    if config.num_samplers > 1:
        return f". {_limit_by_licences(config).strip()}"
    return ""


def hang_line(config: Config) -> str:
    """Return what to do about an environment in this process that does not return, to append to a line about it."""
    instances = config.num_samplers * config.envs_of_sampler
    samplers = config.num_samplers * config.envs_per_sampler
    actors = as_setting_and_flag("num_actors", config.num_samplers)
    text = f". Nothing in this process ends a hang: press Ctrl-C, and resume with {actors}: hung actors are replaced"
    if instances == 1:
        return text
    single = [as_setting_and_flag("samplers_per_actor", 1)]
    if samplers != config.num_samplers:  # the same batch, in samplers of one environment
        single.insert(0, as_setting_and_flag("num_actors", samplers))
        single.insert(0, as_setting_and_flag("num_samplers", samplers))
        begin = "start again with"
    else:
        begin = "also use"
    return f"{text}. There are {instances} instances here; if a process may have only one, {begin} {', '.join(single)}"


def _limit_of_process(config: Config, fault: EnvFault) -> str:
    """Return the settings with which each process has only as many instances as this one could make."""
    limit = fault.others
    samplers = config.num_samplers
    samplers_per_actor = fault.samplers_beside
    flags = []
    if config.standby_envs:
        samplers_per_actor = limit // config.envs_per_sampler
        flags.append(as_setting_and_flag("standby_envs", 0))
    if samplers_per_actor == 0:  # the same batch, in samplers of fewer environments
        samplers_per_actor = 1
        samplers = math.ceil(samplers * config.envs_per_sampler / limit)
        flags.append(as_setting_and_flag("envs_per_sampler", limit))
        flags.append(as_setting_and_flag("num_samplers", samplers))
    if samplers > 1:
        flags.append(as_setting_and_flag("num_actors", math.ceil(samplers / samplers_per_actor)))
    flags.append(as_setting_and_flag("samplers_per_actor", samplers_per_actor))
    instances = counted(limit, "other instance")
    return (
        f"Its process had {instances}. If a process may have only {limit}, use {', '.join(flags)}."
    )


def _limit_by_licences(config: Config) -> str:
    samplers = config.num_samplers
    if samplers == 1:
        return ""
    envs = config.envs_of_sampler
    evaluating = config.evaluators
    evaluations = ""
    if evaluating:
        evaluations = f" + {evaluating} for evaluations"
    fewer_samplers = samplers // 2
    fewer = as_setting_and_flag("num_samplers", fewer_samplers)
    text = (
        f" {samplers} samplers x {counted(envs, 'env')}{evaluations} = {samplers * envs + evaluating} instances exist "
        f"at once, for any number of actors. With fewer licences, use {fewer}: "
        f"{fewer_samplers * envs + evaluating} instances, and a smaller batch."
    )
    if config.num_actors != 0:
        text += " If a node may have few, use actors_per_node (--actors-per-node)."
    return text
