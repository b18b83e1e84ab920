"""Start a run with the weights of another one whose task or network has another shape, as far as they fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.config import Config
from dppo.errors import CheckpointError, ConfigError, counted
from dppo.log import logger
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.exchange.statistics import Statistics
from dppo.records.files.checkpoint import Found

if TYPE_CHECKING:  # torch is imported while Ray starts
    from dppo.learners.trainers import Trainers

Weights = dict[str, np.ndarray]


def warm_start(trainers: Trainers, own: Statistics, origin: Found, obs: Any, config: Config) -> Statistics:
    """Load the weights of `origin` where they fit into `trainers`; return the statistics to start with.

    Statistics of observations are taken if these are alike; those of returns, which depend on the rewards, are not.
    Values of a run with `norm_value` are put into the unit of its rewards. Free deviations are left as they are if
    `config` sets them.

    Args:
        own: the statistics of a new run.
        obs: the observations of this run, as a checkpoint describes them.

    Raises:
        ConfigError: no layer agrees, or there are no statistics to freeze, of observations or of returns.
        CheckpointError: `origin` has weights that are not finite.
    """
    spec, arrays, statistics = trainers.spec, origin.checkpoint.arrays, own
    there, frozen = _in_units_of_rewards(arrays), config.freeze_norm_after == 0
    if config.log_std_init is not None:
        there.pop("log_std", None)
    weights, rows = _fitting(spec.unflatten(trainers.weights()), there, origin)
    if own.obs is not None and origin.checkpoint.state["model"].get("obs") == obs:
        with suppress(KeyError, ValueError):  # there are none, or those of other leaves
            statistics = replace(replace(own, returns=None).loaded(arrays.get("normalizer", {})), returns=own.returns)
    if frozen and statistics is own:
        raise ConfigError(f"freeze_norm_after=0: {origin.path} has no statistics of these observations. Leave it out.")
    if frozen and own.returns is not None:
        fact = "norm_reward would have no statistics to keep, as those of another run's returns are not taken"
        raise ConfigError(f"freeze_norm_after=0: {fact}. Use a larger number, or `norm_reward=False`.")
    if own.obs is not None:
        rows.append(f"  {'not ' * (statistics is own)}taken: statistics of observations")
    for row in rows:
        logger.info("%s", row)
    trainers.load(spec.flatten(weights), trainers.state())
    return statistics


def _in_units_of_rewards(arrays: Mapping[str, Weights]) -> Weights:
    """Return the weights of a checkpoint; those of a run with `norm_value` estimate values in units of rewards."""
    from dppo.ppo.learning.popart import value_layer  # imports torch

    weights = dict(arrays.get("model", {}))
    if scale := ValueScale.of_state(arrays.get("optimizer", {})):
        for kind, name in value_layer(weights).items():
            weights[name] = weights[name] * scale.std + (scale.mean if kind == "bias" else 0.0)
    return weights


def _fitting(here: Weights, there: Weights, origin: Found) -> tuple[Weights, list[str]]:
    """Return the weights of `there` where name and shape are those of `here`, else of `here`; and this in lines."""
    taken = {name for name, array in here.items() if name in there and there[name].shape == array.shape}
    rows = []
    for name in {**here, **there}:
        shapes = ["x".join(map(str, of[name].shape)) if name in of else "none" for of in (here, there)]
        rows.append(f"  {'not ' * (name not in taken)}taken: {name}, {shapes[0]} here and {shapes[1]} there")
    if not any(here[name].ndim > 1 for name in taken):
        fact = f"nothing fits, none of its {counted(len(there), 'parameter')} has name and shape of a layer here"
        advice = "Use the network settings of that run, or leave `init_from` out"
        raise ConfigError("\n".join([f"init_from={origin.path}: {fact}.", *rows, f"{advice}."]))
    if not all(np.isfinite(there[name]).all() for name in taken):
        raise CheckpointError(f"{origin.path}: has weights that are not finite. Use another checkpoint.")
    numbers = f"{sum(here[name].size for name in taken):,} of {sum(array.size for array in here.values()):,} numbers"
    first = f"Starting with {len(taken)} of {counted(len(here), 'parameter')} ({numbers}) of {origin.path}:"
    return {name: there[name] if name in taken else array for name, array in here.items()}, [first, *rows]
