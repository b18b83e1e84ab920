"""Networks for images, categories and nested observations: plain torch modules, with the contract of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dppo.ppo.distributions import distribution_of
from dppo.ppo.networks.encoders.encoders import CNN, SQRT2, Encoder, encoder_of, orthogonal
from dppo.ppo.networks.encoders.layers import Output
from dppo.spaces.spaces import Spaces

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class EncoderNetwork(nn.Module):
    """Encode each leaf, join the codes, and read policy and value from the hidden layers behind them.

    An image goes through a CNN, categories become one-hot codes, all other numbers stay as they are. Hidden layers
    follow, unless the only leaf is an image, whose encoder ends in one. Initial weights are orthogonal (detail 2).
    """

    reads_bytes = True  # images reach it as bytes in training, and as floats from `TorchActing`

    def __init__(
        self,
        spaces: Spaces,
        head_size: int,
        *,
        image_encoder: str = "nature",
        image_features: int = 512,
        hidden_sizes: Iterable[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = True,
        layer_norm: bool = False,
        state_dependent_std: bool = False,
    ) -> None:
        """Draw the initial weights from torch's global generator.

        Args:
            image_encoder: nature, impala, grid or flatten.
            image_features: units of the last layer of an image's encoder.
            shared: whether policy and value have all layers in common but the last.
        """
        super().__init__()
        free = distribution_of(spaces.actions, state_dependent_std=state_dependent_std).free_size

        def body() -> Body:
            encoders = [encoder_of(spaces, name, image_encoder, image_features) for name in spaces.leaves()]
            return Body(encoders, list(spaces.leaves()), tuple(hidden_sizes), activation, layer_norm=layer_norm)

        self.body = body()
        self.value_body = None if shared else body()
        self.policy = orthogonal(Output(self.body.features, head_size - free), 0.01)
        self.value = orthogonal(Output(self.body.features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(free)) if free else None

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Return head [rows, H] and values [rows] of a tensor [rows, *O], or of a dict of them by the leaf's name."""
        hidden = self.body(obs)
        head = self.policy(hidden)
        if self.log_std is not None:
            head = torch.cat([head, self.log_std.expand(len(head), -1)], dim=1)
        if self.value_body is not None:
            hidden = self.value_body(obs)
        return head, self.value(hidden).squeeze(1)


class Body(nn.Module):
    """The encoder of each leaf, and the hidden layers that read all codes side by side."""

    def __init__(
        self,
        encoders: list[Encoder],
        names: list[str],
        hidden_sizes: tuple[int, ...],
        activation: str,
        *,
        layer_norm: bool,
    ) -> None:
        super().__init__()
        self._names = names
        self.encoders = nn.ModuleList(encoders)
        width = sum(encoder.features for encoder in encoders)
        if len(encoders) == 1 and isinstance(encoders[0], CNN):
            hidden_sizes = ()
        layers: list[nn.Module] = []
        for inputs, units in pairwise((width, *hidden_sizes)):
            layers.append(orthogonal(nn.Linear(inputs, units), SQRT2))
            if layer_norm:
                layers.append(nn.LayerNorm(units))
            layers.append(ACTIVATIONS[activation]())
        self.hidden = nn.Sequential(*layers)
        self.features = hidden_sizes[-1] if hidden_sizes else width

    def forward(self, obs: Any) -> Tensor:
        """Return features [rows, F]."""
        if isinstance(obs, Tensor):
            codes: Tensor = self.encoders[0](obs)
        else:
            named = zip(self._names, self.encoders, strict=True)
            codes = torch.cat([encoder(obs[name]) for name, encoder in named], dim=1)
        features: Tensor = self.hidden(codes)
        return features
