"""Inputs of critics: the numbers of all leaves of an observation, and an action."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dppo.ppo.networks.encoders import Flatten, OneHot
from dppo.ppo.networks.layers import is_one_hot
from dppo.spaces.spaces import Spaces


class CriticInputs:
    """Joins the leaves of normalized observations with actions; categories become one-hot codes."""

    def __init__(self, spaces: Spaces, num_actions: int, device: torch.device) -> None:
        """Prepare for observations of `spaces`, which have no images, and actions of `num_actions` components."""
        self._encoders = {name: _encoder(spaces, name).to(device) for name in spaces.leaves()}
        self.size = num_actions + sum(encoder.features for encoder in self._encoders.values())
        """n, the numbers of an observation and an action together."""

    def __call__(self, obs: Any, actions: Tensor) -> Tensor:
        """Return the inputs [rows, n] of observations, a tensor or a dict by leaf, and actions [rows, A]."""
        leaves = obs if isinstance(obs, dict) else {"": obs}
        codes = [
            encoder(leaves[name].to(actions.dtype)) for name, encoder in self._encoders.items()
        ]
        return torch.cat([*codes, actions], dim=1)


def _encoder(spaces: Spaces, name: str) -> Flatten | OneHot:
    categories = spaces.categories.get(name)
    if categories is not None and is_one_hot(categories):
        return OneHot(categories)
    return Flatten(spaces.leaves()[name].shape)
