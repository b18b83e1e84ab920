"""Soft actor-critic in a run: what it needs of an environment, and its trainer."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.config.parts import SAC
from dppo.config.settings import Settings
from dppo.envs.spaces import actions_of
from dppo.errors import ConfigError
from dppo.hosts.plans import TrainerPlan
from dppo.ppo.networks.choice import NetworkChoice, choose_network
from dppo.ppo.networks.layers import is_one_hot
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces, is_image

if TYPE_CHECKING:
    from dppo.ppo.learning.parallel import Parallel
    from dppo.ppo.networks.network import NetworkSpec
    from dppo.sac.trainer import SACTrainer


def check_actions(space: Any) -> None:
    """Raise ConfigError unless `space` is a Box of real numbers with finite bounds."""
    actions = actions_of(space, "clip")
    if not isinstance(actions, BoxActions):
        raise ConfigError(
            f"algo=sac: learns the real-valued actions of a single Box, and the action space is {actions}. Use "
            f"`algo=ppo`."
        )
    infinite = np.flatnonzero(~(np.isfinite(actions.low) & np.isfinite(actions.high)))
    if len(infinite):
        element = int(infinite[0])
        raise ConfigError(
            f"algo=sac: measures the entropy of actions within their bounds, and element {element} of an action lies "
            f"between {actions.low.flat[element]} and {actions.high.flat[element]}. Give the Box finite bounds, or use "
            f"`algo=ppo`."
        )


def check_observations(spaces: Spaces) -> None:
    """Raise ConfigError if an observation has images."""
    for name, leaf in spaces.of_network().leaves().items():
        if is_image(leaf):
            label = f"leaf {name!r}" if name else "the observation"
            size = " x ".join(map(str, leaf.shape))
            raise ConfigError(
                f"algo=sac: its critics read numbers, and {label} is an image of {size} bytes. Use `algo=ppo`."
            )


def networks_in_words(config: Settings, spaces: Spaces) -> str:
    """Describe the networks of a run with their sizes, in a line; with soft actor-critic, policy and critics."""
    network = choose_network(config.network, spaces)
    if config.algo == "sac":
        return _policy_and_critics(network, config.sac)
    return str(network)


def _policy_and_critics(network: NetworkChoice, sac: SAC) -> str:
    """Describe policy and critics; a critic reads the action, and the observation with categories as one-hot codes."""
    from dppo.sac.settings import SACSettings

    spaces = network.spec.spaces
    inputs = network.spec.distribution.noise_size
    for name, leaf in spaces.leaves().items():
        categories = spaces.categories.get(name)
        if categories is not None and is_one_hot(categories):
            inputs += sum(categories.counts)
        else:
            inputs += math.prod(leaf.shape)
    sizes = (inputs, *sac.critic_sizes, 1)
    parameters = SACSettings().num_critics * sum(
        (fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes)
    )
    units = " x ".join(map(str, sac.critic_sizes))
    privileged = ""
    if spaces.critic_obs:
        privileged = f"; only they read {', '.join(spaces.critic_obs)}"
    return (
        f"{network.describe_policy()}; two critics with {units} units, {parameters:,} parameters, which also read the "
        f"action{privileged}."
    )


def sac_trainer(plan: TrainerPlan, spec: NetworkSpec, parallel: Parallel) -> SACTrainer:
    """Build the trainer of a run with resolved settings; imports torch."""
    from dppo.sac.settings import SACSettings
    from dppo.sac.trainer import SACTrainer

    values = vars(plan.ppo) | vars(plan.sac) | {"first_rows": plan.sac.learning_starts}
    if plan.sizes.prior_iterations:
        # what a controller does is worth learning from its first steps on
        values["first_rows"] = 0
        values["controller_iterations"] = plan.sizes.prior_iterations + plan.policy_lag
    shared = {
        field.name: values[field.name] for field in fields(SACSettings) if field.name in values
    }
    shared.pop("max_grad_norm")  # PPO's setting
    return SACTrainer(spec, SACSettings(**shared), plan.seed, parallel)
