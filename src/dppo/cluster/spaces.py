"""The spaces of a sampler's environment, and refusals of settings that do not fit them."""

from __future__ import annotations

from typing import Any

from dppo.cluster.plans import SamplerPlan
from dppo.envs.spaces.observation_spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import normalized_shape
from dppo.spaces.spaces import MOST_WHOLE, Spaces


def spaces_of(plan: SamplerPlan, env: Any) -> Spaces:
    """Return the spaces of `env`.

    Raises:
        ConfigError: they cannot be learnt on, or `norm_obs` finds only images and categories.
    """
    of = plan.env
    spaces = describe_spaces(
        env,
        drop_obs=of.drop_obs,
        norm_obs_keys=plan.ppo.norm_obs_keys,
        action_bounds=of.action_bounds,
        action_mask=of.action_mask,
        obs_dtype=of.obs_dtype,
    )
    if of.obs_dtype == "float64" and not spaces.has_float64:
        raise ConfigError(
            "obs_dtype=float64 has no effect: the observation space contains neither float64 numbers nor a Box of "
            "integers beyond 2**24. Declare float64 in the environment if its numbers need that, or leave obs_dtype "
            "out."
        )
    read = spaces.of_network()
    alone = read.obs.names is None and read.categories
    if plan.ppo.norm_obs and (alone or normalized_shape(read.obs, spaces.normalized) == (0,)):
        raise ConfigError(
            "norm_obs=True has no effect: only floating-point numbers are normalised, and the observation holds images "
            "or categories. Use norm_obs=False."
        )
    _check_float64(plan, read)
    if plan.network.dtype == "float32":
        _check_categories(read)
    return spaces


def _check_categories(read: Spaces) -> None:
    """Refuse categories whose numbers a network of float32 would read as one another."""
    for name, found in read.categories.items():
        for count, start in zip(found.counts, found.starts, strict=True):
            if max(-start, start + count - 1) > MOST_WHOLE:
                raise ConfigError(
                    f"observation_space{f', leaf {name!r}' if name else ''}: has categories from {start} to "
                    f"{start + count - 1}, and the network reads them as float32, which cannot tell integers beyond "
                    f"2**24 apart. Subtract the start in the environment (gymnasium.wrappers.TransformObservation), or "
                    f"use dtype=float64."
                )


def _check_float64(plan: SamplerPlan, read: Spaces) -> None:
    """Refuse leaves that are kept in float64 and then reach a network of float32 without being normalised first."""
    if read.normalized is None or plan.network.dtype == "float64":
        return
    rounded = [name for name, leaf in read.leaves().items() if leaf.base == "f8" and name not in read.normalized]
    if rounded:
        raise ConfigError(
            f"norm_obs_keys={' '.join(plan.ppo.norm_obs_keys)}: leaves out {rounded[0]}, whose float64 numbers the "
            f"network would read as float32. Add {rounded[0]}, or use obs_dtype=float32."
        )
