"""Plans: the settings that samplers and trainers are built from, in any process.

They are plain parts of the settings, so that an actor imports neither pydantic nor torch. The user's own network is
sent beside them, so that an error can name it.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dppo.cluster import wire
from dppo.config import Config
from dppo.config.parts import PPO, Env, Learners, Network, Sampling, Sizes
from dppo.errors import ConfigError
from dppo.user_code import in_a_line

Model = str | Callable[..., Any] | None
PackedModel = tuple[tuple[str, ...], bytes | None]
"""The folders from which the sending process imports, and the pickled network."""


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Settings from which a sampler is built."""

    env: Env
    sampling: Sampling
    ppo: PPO
    network: Network
    sizes: Sizes
    seed: int
    recycling: tuple[float, float] = (math.inf, math.inf)
    """Bytes and segments after which an actor is replaced."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings from which a trainer or rank is built; without the environment, whose module it need not import."""

    ppo: PPO
    network: Network
    learners: Learners
    sizes: Sizes
    seed: int


def sampler_plan(config: Config) -> SamplerPlan:
    """Return the parts of `config` that samplers are built from."""
    sampling = config.sampling
    if sampling.licences is not None:  # those of evaluations are set aside
        sampling = replace(sampling, licences=sampling.licences - config.evaluators)
    parts = config.env, sampling, config.ppo, config.network, config.sizes, config.seed
    return SamplerPlan(*parts, config.actors.recycling)


def trainer_plan(config: Config) -> TrainerPlan:
    """Return the parts of `config` that trainers are built from."""
    return TrainerPlan(config.ppo, config.network, config.learners, config.sizes, config.seed)


def packed_model(model: Model) -> PackedModel:
    """Return a user's network ready to send; `ConfigError` if its class cannot be pickled."""
    try:
        return tuple(path for path in sys.path if path), wire.pack_code(model)
    except Exception as error:  # pickling a user's class may raise anything
        raise ConfigError(
            f"model={model!r}: cannot be sent to other processes: {error}. Pass it as module:Class."
        ) from None


def unpacked_model(packed: PackedModel) -> Model:
    """Reverse `packed_model`, importing from the sender's folders, too; `ConfigError` if a module is missing."""
    paths, pickled = packed
    sys.path += [path for path in paths if path not in sys.path]
    try:
        model: Model = wire.unpack(pickled)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"model: cannot be loaded in another process: {in_a_line(error)}. It must be importable on every node."
        ) from None
    return model
