"""Encoders of images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from dppo.ppo.kernels.convolutions import Dense, PixelConv

MIN_GRID = 7  # cells of a side that the convolutions of `grid_cnn` need
SQRT2 = math.sqrt(2)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class CNN(nn.Module):
    """Convolutions, and a layer of `features` units behind them."""

    def __init__(
        self, image: Image | Bits, layers: Iterable[nn.Module], outputs: int, features: int
    ) -> None:
        """Draw the weights of the last layer, which reads the `outputs` numbers of `layers`."""
        super().__init__()
        self.image = image
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.last = nn.Sequential(orthogonal(Dense(outputs, features), SQRT2), nn.ReLU())
        self.features = features

    def forward(self, leaf: Tensor) -> Tensor:
        """Encode a leaf [rows, *shape] as [rows, features]."""
        return self.last(self.layers(self.image(leaf)))


def nature_cnn(shape: tuple[int, ...], features: int) -> CNN:
    """Return three convolutions and a layer of `features` units. The image has at least 36 x 36 pixels.

    Source: Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), methods.
    """
    image = Image(shape)
    layers = [
        *_active(PixelConv(image.channels, 32, 8, stride=4)),
        *_active(nn.Conv2d(32, 64, 4, stride=2)),
        *_active(nn.Conv2d(64, 64, 3)),
    ]
    height, width = (((side - 8) // 4 - 3) // 2 - 1 for side in (image.height, image.width))
    return CNN(image, layers, 64 * height * width, features)


def impala_cnn(shape: tuple[int, ...], features: int) -> CNN:
    """Return three blocks, each a convolution, a pooling and two residual units, and a layer of `features` units.

    Source: Espeholt et al., "IMPALA" (arXiv:1802.01561), figure 3, the larger network. Convolutions keep torch's
    initial weights, as in CleanRL's ppo_procgen.py.
    """
    image = Image(shape)
    height = image.height
    width = image.width
    blocks: list[nn.Module] = []
    for inputs, outputs in pairwise((image.channels, 16, 32, 32)):
        convolution = nn.Conv2d if blocks else PixelConv
        blocks += [convolution(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        blocks += [Residual(outputs), Residual(outputs)]
        height = (height + 1) // 2
        width = (width + 1) // 2
    return CNN(image, [*blocks, nn.ReLU()], 32 * height * width, features)


def grid_cnn(shape: tuple[int, ...], features: int) -> CNN:
    """Return three convolutions over the bits of each byte, and a layer of `features` units; for small images.

    Bytes of a small image are usually codes of what is in a cell, such as those of MiniGrid from 0 to 10, which would
    all be close to 0 when divided by 255. Each byte becomes eight inputs, 0 or 1, so that codes are easy to tell apart
    and nothing is lost of pixels either. Images of fewer than 7 x 7 cells are enlarged with zeros.

    Deviation: the source reads the bytes as they are, and has no last layer.

    Source: Willems, rl-starter-files (github.com/lcswillems/rl-starter-files), model.py, for the convolutions.
    """
    image = Image(shape)
    height = max(MIN_GRID, image.height)
    width = max(MIN_GRID, image.width)
    layers = [
        nn.ZeroPad2d((0, width - image.width, 0, height - image.height)),
        *_active(nn.Conv2d(8 * image.channels, 16, 2)),
        nn.MaxPool2d(2),
        *_active(nn.Conv2d(16, 32, 2)),
        *_active(nn.Conv2d(32, 64, 2)),
    ]
    return CNN(Bits(image), layers, 64 * ((height - 1) // 2 - 2) * ((width - 1) // 2 - 2), features)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to `x` [rows, channels, height, width]."""
        return x + self.second(self.first(x.relu()).relu())


class Image(nn.Module):
    """Images [rows, *shape] -> [rows, channels, height, width].

    The axis of the channels is the first or the last one, whichever is shorter. The images of a stack,
    [frames, *image], are put side by side as channels.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        image = shape[-3:]
        is_channels_first = image[0] < image[2]
        if is_channels_first:
            channels, self.height, self.width = image
        else:
            self.height, self.width, channels = image
        self.channels = channels * math.prod(shape[:-3])
        self._axes = None if is_channels_first else (*range(len(shape) - 2), -1, -3, -2)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [rows, channels, height, width], as a view of `pixels` where that is possible."""
        if self._axes is not None:
            pixels = pixels.permute(self._axes)
        if pixels.dim() > 4:
            return pixels.flatten(1, -3)
        return pixels


class Bits(nn.Module):
    """Images [rows, *shape] -> the bits of each byte, [rows, 8 * channels, height, width]."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image
        self.shift = nn.Buffer(torch.arange(8, dtype=torch.uint8)[:, None, None])

    def forward(self, leaf: Tensor) -> Tensor:
        """Split bytes into their bits, as floats 0 or 1."""
        cells = self.image(leaf).to(torch.uint8).unsqueeze(2)  # [rows, channels, 1, height, width]
        bits: Tensor = ((cells >> self.shift) & 1).flatten(1, 2)
        # faster, as in `PixelConv`
        return bits.to(torch.get_default_dtype(), memory_format=torch.channels_last)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Return `layer` with orthogonal weights and zero biases, drawn from torch's global generator."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _active(layer: nn.Conv2d) -> tuple[nn.Module, ...]:
    return orthogonal(layer, SQRT2), nn.ReLU()


CNNS = {"nature": nature_cnn, "impala": impala_cnn, "grid": grid_cnn}
