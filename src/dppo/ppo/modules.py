"""Networks for images, categories and nested observations: plain torch modules, with the contract of a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dppo.ppo.distributions import distribution_of
from dppo.ppo.layers import Output, PixelConv
from dppo.spaces import Categories, Spaces, is_image

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
MOST_COLUMNS = 1024  # of a one-hot code; more categories are embedded
EMBEDDED = 64  # numbers that each embedded category becomes
SQRT2 = math.sqrt(2)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


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
            image_encoder: nature, impala or flatten.
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
        if len(encoders) == 1 and isinstance(encoders[0], NatureCNN | ImpalaCNN):
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


# ------------------------------------------------------------------ encoders


class Encoder(nn.Module):
    """Turn one leaf [rows, *shape] into a code [rows, features]."""

    features: int


def encoder_of(spaces: Spaces, name: str, image_encoder: str, image_features: int) -> Encoder:
    """Return the encoder for the leaf `name`."""
    leaf = spaces.leaves()[name]
    if name in spaces.categories:
        categories = spaces.categories[name]
        return OneHot(categories) if sum(categories.counts) <= MOST_COLUMNS else Embedding(categories)
    if is_image(leaf) and image_encoder != "flatten":
        return {"nature": NatureCNN, "impala": ImpalaCNN}[image_encoder](leaf.shape, image_features)
    return Flatten(leaf.shape, 255.0 if is_image(leaf) else None)


class Flatten(Encoder):
    """All numbers of a leaf, side by side; those of an image divided by 255."""

    def __init__(self, shape: tuple[int, ...], divisor: float | None = None) -> None:
        super().__init__()
        self.features = math.prod(shape)
        self._divisor = divisor

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
        flat = leaf.reshape(len(leaf), -1)
        return flat if self._divisor is None else flat / self._divisor


class OneHot(Encoder):
    """A column for each category of each element: 1 where the element has it, else 0."""

    element: Tensor
    category: Tensor

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        numbered = zip(categories.starts, categories.counts, strict=True)
        columns = [(k, start + c) for k, (start, count) in enumerate(numbered) for c in range(count)]
        self.register_buffer("element", torch.tensor([k for k, _ in columns]))
        self.register_buffer("category", torch.tensor([float(category) for _, category in columns]))
        self.features = len(columns)

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
        of_columns = leaf.reshape(len(leaf), -1).index_select(1, self.element)
        return (of_columns == self.category).to(leaf.dtype)


class Embedding(Encoder):
    """A learnt vector for each category of each element."""

    first: Tensor
    last: Tensor
    shift: Tensor

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        starts, counts = torch.tensor(categories.starts), torch.tensor(categories.counts)
        offsets = torch.tensor([0, *accumulate(categories.counts)][:-1])
        self.register_buffer("first", starts)
        self.register_buffer("last", starts + counts - 1)
        self.register_buffer("shift", offsets - starts)
        self.table = nn.Embedding(sum(categories.counts), EMBEDDED)
        self.features = EMBEDDED * len(categories.counts)

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
        category = leaf.reshape(len(leaf), -1).long().clamp(self.first, self.last)
        vectors: Tensor = self.table(category + self.shift)
        return vectors.flatten(1)


class NatureCNN(Encoder):
    """Three convolutions and a layer of `features` units. The image has at least 36 x 36 pixels.

    Source: Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), methods.
    """

    def __init__(self, shape: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.image = Image(shape)
        self.layers = nn.Sequential(
            orthogonal(PixelConv(self.image.channels, 32, 8, stride=4), SQRT2),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), SQRT2),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3), SQRT2),
            nn.ReLU(),
            nn.Flatten(),
        )
        height, width = (((side - 8) // 4 - 3) // 2 - 1 for side in (self.image.height, self.image.width))
        self.last = nn.Sequential(orthogonal(nn.Linear(64 * height * width, features), SQRT2), nn.ReLU())
        self.features = features

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
        code: Tensor = self.last(self.layers(self.image(leaf)))
        return code


class ImpalaCNN(Encoder):
    """Three blocks, each a convolution, a pooling and two residual units, and a layer of `features` units.

    Convolutions keep torch's initial weights, as in CleanRL's ppo_procgen.py.

    Source: Espeholt et al., "IMPALA" (arXiv:1802.01561), figure 3, the larger network.
    """

    def __init__(self, shape: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.image = Image(shape)
        height, width, blocks = self.image.height, self.image.width, []
        for number, (inputs, outputs) in enumerate(pairwise((self.image.channels, 16, 32, 32))):
            convolution = nn.Conv2d if number else PixelConv
            blocks += [
                convolution(inputs, outputs, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                Residual(outputs),
                Residual(outputs),
            ]
            height, width = (height + 1) // 2, (width + 1) // 2
        self.layers = nn.Sequential(*blocks, nn.ReLU(), nn.Flatten())
        self.last = nn.Sequential(orthogonal(nn.Linear(32 * height * width, features), SQRT2), nn.ReLU())
        self.features = features

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
        code: Tensor = self.last(self.layers(self.image(leaf)))
        return code


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum, of the shape of `x` [rows, channels, height, width]."""
        y: Tensor = self.second(self.first(x.relu()).relu())
        return x + y


class Image(nn.Module):
    """Images [rows, *shape] -> [rows, channels, height, width].

    The axis of the channels is the first or the last one, whichever is shorter. The images of a stack,
    [frames, *image], are put side by side as channels.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        image = shape[-3:]
        channels_first = image[0] < image[2]
        channels, self.height, self.width = image if channels_first else (image[2], *image[:2])
        self.channels = channels * math.prod(shape[:-3])
        self._axes = None if channels_first else (*range(len(shape) - 2), -1, -3, -2)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return a view of `pixels` where that is possible."""
        if self._axes is not None:
            pixels = pixels.permute(self._axes)
        return pixels.flatten(1, -3) if pixels.dim() > 4 else pixels


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Return `layer` with orthogonal weights and zero biases, drawn from torch's global generator."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
