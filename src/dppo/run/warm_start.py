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
from dppo.policies.described import spaces_from
from dppo.ppo.exchange.scales import Statistics, ValueScale
from dppo.records.files.checkpoint import LoadedCheckpoint

if TYPE_CHECKING:  # torch is imported while Ray starts
    from dppo.learners.trainers import Trainers

Weights = dict[str, np.ndarray]
# arrays of soft actor-critic's critics in the state of its trainer
CRITIC_ARRAYS = ("critics.weights", "critics.targets")


def warm_start(
    trainers: Trainers, fresh: Statistics, origin: LoadedCheckpoint, config: Config
) -> Statistics:
    """Load the weights of `origin` where they fit into `trainers`; return the statistics to start with.

    Statistics of observations are taken if the observations are alike. Statistics of returns depend on the rewards, and
    are not taken. Values of a run with `norm_value` are converted to the unit of its rewards. State-independent
    deviations are left as they are if `config` sets them.

    Args:
        fresh: the statistics of a new run.

    Raises:
        ConfigError: no layer agrees, or there are no statistics to freeze, of observations or of returns.
        CheckpointError: `origin` has weights that are not finite.
    """
    spec = trainers.spec
    origin_weights = _in_units_of_rewards(origin.checkpoint.arrays)
    if config.log_std_init is not None:
        origin_weights.pop("log_std", None)
    weights, lines = _fitting(spec.unflatten(trainers.weights()), origin_weights, origin)
    statistics = _statistics(fresh, origin, spec.spaces.obs)
    if config.freeze_norm_after == 0:
        _check_frozen(statistics, fresh, origin)
    if fresh.obs is not None:
        lines.append(_line("statistics of observations", is_taken=statistics is not fresh))
    state = trainers.state()
    if CRITIC_ARRAYS[0] in state:
        critics = _critics(state, origin)
        state |= critics
        lines.append(_line("critics", is_taken=bool(critics)))
    for line in lines:
        logger.info("%s", line)
    trainers.load(spec.flatten(weights), state)
    return statistics


def _critics(state: Weights, origin: LoadedCheckpoint) -> Weights:
    """Return the critics of `origin` if it has some of the same size as those in `state`; else nothing."""
    stored = origin.checkpoint.arrays.get("optimizer", {})
    critics = {name: stored[name] for name in CRITIC_ARRAYS if name in stored}
    if critics.keys() != {*CRITIC_ARRAYS}:
        return {}
    if any(critics[name].shape != state[name].shape for name in CRITIC_ARRAYS):
        return {}
    return critics


def _statistics(fresh: Statistics, origin: LoadedCheckpoint, obs: np.dtype[Any]) -> Statistics:
    """Return `fresh` with the statistics of observations from `origin`, if these are `obs`, apart from masks."""
    if fresh.obs is None:
        return fresh
    arrays = origin.checkpoint.arrays.get("normalizer", {})
    # there are none, or statistics of other leaves, or the checkpoint, which may be a stranger's, has no valid spaces
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        if spaces_from(origin.checkpoint.state).of_network().obs == obs:
            return replace(replace(fresh, returns=None).loaded(arrays), returns=fresh.returns)
    return fresh


def _check_frozen(statistics: Statistics, fresh: Statistics, origin: LoadedCheckpoint) -> None:
    """Raise ConfigError if the statistics to freeze are not there."""
    if statistics is fresh:
        raise ConfigError(
            f"freeze_norm_after=0: {origin.path} has no statistics of these observations. Leave it out."
        )
    if fresh.returns is not None:
        fact = "norm_reward would have no statistics to keep, because those of another run are not taken over"
        raise ConfigError(
            f"freeze_norm_after=0: {fact}. Use a larger number, or `norm_reward=False`."
        )


def _in_units_of_rewards(arrays: Mapping[str, Weights]) -> Weights:
    """Return the weights of a checkpoint, with a value head that estimates values in units of rewards."""
    from dppo.ppo.learning.popart import value_layer  # imports torch

    weights = dict(arrays.get("model", {}))
    scale = ValueScale.from_state(arrays.get("optimizer", {}))
    if scale is not None:
        for kind, name in value_layer(weights).items():
            shift = scale.mean if kind == "bias" else 0.0
            weights[name] = weights[name] * scale.std + shift
    return weights


def _fitting(
    weights: Weights, origin_weights: Weights, origin: LoadedCheckpoint
) -> tuple[Weights, list[str]]:
    """Replace `weights` by `origin_weights` with the same name and shape; also return lines for the log."""
    rows = []
    fitting = set[str]()
    for name in weights | origin_weights:
        shape_here = _shape(weights, name)
        shape_there = _shape(origin_weights, name)
        if shape_here == shape_there:
            fitting.add(name)
        shapes = f"{name}, {shape_here} here and {shape_there} there"
        rows.append(_line(shapes, is_taken=name in fitting))
    if not any(weights[name].ndim > 1 for name in fitting):
        parameters = counted(len(origin_weights), "parameter")
        fact = f"no weights fit: none of its {parameters} has the name and shape of a layer here"
        advice = "Use the network settings of that run, or leave `init_from` out"
        raise ConfigError("\n".join([f"init_from={origin.path}: {fact}.", *rows, f"{advice}."]))
    if not all(np.isfinite(origin_weights[name]).all() for name in fitting):
        raise CheckpointError(
            f"{origin.path}: has weights that are not finite. Use another checkpoint."
        )
    num_taken = sum(weights[name].size for name in fitting)
    num_weights = sum(array.size for array in weights.values())
    numbers = f"{num_taken:,} of {num_weights:,} numbers"
    title = f"Starting with {len(fitting)} of {counted(len(weights), 'parameter')} ({numbers}) of {origin.path}:"
    return weights | {name: origin_weights[name] for name in fitting}, [title, *rows]


def _line(part: str, *, is_taken: bool) -> str:
    labels = {True: "taken", False: "not taken"}
    return f"  {labels[is_taken]}: {part}"


def _shape(weights: Weights, name: str) -> str:
    if name in weights:
        return "x".join(map(str, weights[name].shape))
    return "none"
