"""Remedies for networks of users: each class breaks one part of the contract, and another one follows the message."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from worlds import memory_models, models
from worlds.models import Plain

import dppo
from remedies.worlds import Fine


class LayerNormed(Plain):
    """Normalizes with LayerNorm, as the message about BatchNorm says."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.norm = nn.LayerNorm(head_size)

    def forward(self, obs: Tensor) -> Any:
        head, values = super().forward(obs)
        return self.norm(head), values


class FrozenFeatures(Plain):
    """Random numbers in a parameter without gradient."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.features = nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, obs: Tensor) -> Any:
        return super().forward(torch.cos(obs * self.features))


class SameDtype(Plain):
    """Returns values in the dtype of the observation."""

    def forward(self, obs: Tensor) -> Any:
        head, values = super().forward(obs)
        return head, values.double().to(obs.dtype)


class ChangesCopy(Plain):
    """Changes a copy of its argument."""

    def forward(self, obs: Tensor) -> Any:
        return super().forward(obs.clone().div_(255))


class LateBuffer(Plain):
    """Makes a buffer in its first forward pass."""

    def forward(self, obs: Tensor) -> Any:
        self.register_buffer("ones", torch.ones(1))
        return super().forward(obs)


class EarlyBuffer(Plain):
    """Makes it in the constructor."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.register_buffer("ones", torch.ones(1))


class RandomShape(Plain):
    """Draws the number of its units."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size, units=8 + int(torch.randint(1000, ())))


class AllElsewhere(Plain):
    """Chooses a device by itself."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.to("meta")


class ScaledValues(Plain):
    """Changes what its layer `value` returns."""

    def forward(self, obs: Tensor) -> Any:
        head, values = super().forward(obs)
        return head, 3 * values


CONTRACT: tuple[tuple[str, type[nn.Module], type[nn.Module]], ...] = (
    ("Use LayerNorm or GroupNorm", models.Normalized, LayerNormed),
    ("Remove dropout and noise", models.Drops, Plain),
    ("Give lazy layers their sizes", models.Lazy, Plain),
    (
        "its parameters differ: {} is {} on {}, {} is {} on {}. Let dppo choose both",
        models.Mixed,
        Plain,
    ),
    ("its parameters are {} on {}. Let dppo choose both", AllElsewhere, Plain),
    ("Make it a parameter with requires_grad=False", models.RandomBuffer, FrozenFeatures),
    ("Return the dtype of obs", models.Doubles, SameDtype),
    ("Look for a division by zero", models.Infinite, Plain),
    ("{} returned a {}. Return {}", models.HeadOnly, Plain),
    ("Change a copy of them (obs.clone())", models.ChangesObs, ChangesCopy),
    ("Make it in the constructor", LateBuffer, EarlyBuffer),
    ("Let them follow from the arguments", RandomShape, Plain),
    (
        "Set the state of these rows to zero before the step",
        memory_models.NeverStarts,
        memory_models.Running,
    ),
    ("Return the state after the last step", memory_models.FirstState, memory_models.Running),
)
"""Words of src/dppo/ppo/networks/user_module.py, a class with which they are printed, and one that follows them."""


def settings_of(model: type[nn.Module]) -> dict[str, Any]:
    """Return the settings of a run with this network."""
    memory = {"sequence_length": 16} if model.__module__ == memory_models.__name__ else {}
    return {"env_id": Fine, "model": model, **memory}
