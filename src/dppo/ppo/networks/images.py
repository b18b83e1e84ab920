"""Encoders of images, and their layers that differ from torch's, for bytes and for lower precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from dppo.ppo.networks.products import layer_forward

BLOCK = 4  # pixels of a side: four bytes are moved as one number of 32 bits
SMALLEST_GRID = 7  # cells of a side that the convolutions of `grid_cnn` need
SQRT2 = math.sqrt(2)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class CNN(nn.Module):
    """Convolutions, and a layer of `features` units behind them."""

    def __init__(self, image: Image | Bits, layers: Iterable[nn.Module], outputs: int, features: int) -> None:
        """Draw the weights of the last layer, which reads the `outputs` numbers of `layers`."""
        super().__init__()
        self.image = image
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.last = nn.Sequential(orthogonal(Dense(outputs, features), SQRT2), nn.ReLU())
        self.features = features

    def forward(self, leaf: Tensor) -> Tensor:
        """Return the code [rows, features] of a leaf [rows, *shape]."""
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
    height, width, blocks = image.height, image.width, []
    for number, (inputs, outputs) in enumerate(pairwise((image.channels, 16, 32, 32))):
        convolution = nn.Conv2d if number else PixelConv
        blocks += [convolution(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        blocks += [Residual(outputs), Residual(outputs)]
        height, width = (height + 1) // 2, (width + 1) // 2
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
    height, width = (max(SMALLEST_GRID, side) for side in (image.height, image.width))
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
        """Return the sum, of the shape of `x` [rows, channels, height, width]."""
        return x + self.second(self.first(x.relu()).relu())


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


class Bits(nn.Module):
    """Images [rows, *shape] -> the bits of each byte, [rows, 8 * channels, height, width]."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image
        self.shift = nn.Buffer(torch.arange(8, dtype=torch.uint8)[:, None, None])

    def forward(self, leaf: Tensor) -> Tensor:
        """Return floats, 0 or 1."""
        cells = self.image(leaf).to(torch.uint8).unsqueeze(2)  # [rows, channels, 1, height, width]
        bits: Tensor = ((cells >> self.shift) & 1).flatten(1, 2)
        return bits.to(torch.get_default_dtype(), memory_format=torch.channels_last)  # faster, as in `PixelConv`


class Dense(nn.Linear):
    """The layer behind convolutions: on a CPU by oneDNN, as these.

    Its bits then depend on AVX-512, as theirs do, and a minibatch takes half the time that AVX2 allows.
    """

    def forward(self, code: Tensor) -> Tensor:
        """Return the outputs [rows, n] of `code` [rows, features]."""
        simple = code.device.type == "cpu" and code.dtype == self.weight.dtype == torch.float32
        if not simple or precision_on(code.device) is not None or not torch.backends.mkldnn.is_available():
            return layer_forward(self, code)
        if not torch.is_grad_enabled():
            return _by_onednn(code, self.weight, self.bias)
        return _Dense.apply(code, self.weight, self.bias)  # type: ignore[no-untyped-call]


class _Dense(Function):
    """y = x W^T + b, as in `products`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _by_onednn(by_y, weight.t()), _by_onednn(by_y.t(), x.t()), by_y.sum(dim=0)


def _by_onednn(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return `a` [n, k] times `b` [m, k] transposed, plus a row [m], as torch.compile does."""
    return torch.ops.mkldnn._linear_pointwise(a, b, plus, "none", [], "")


class PixelConv(nn.Conv2d):
    """A convolution over pixels divided by 255: its few weights are divided rather than the many pixels.

    In training it gets bytes. On a CPU it puts the channels of a pixel side by side in memory, and the layers behind it
    keep that order, with which backpropagation takes two thirds of the time.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the convolution of `pixels` [rows, channels, height, width] / 255."""
        weight = self.weight / 255
        if pixels.dtype == torch.uint8:
            dtype, on_cpu = precision_on(pixels.device) or weight.dtype, pixels.device.type == "cpu"
            whole = all(side % BLOCK == 0 for side in (*self.kernel_size, *pixels.shape[2:]))
            if on_cpu and whole and self.stride == (BLOCK, BLOCK) and self.padding == (0, 0):
                return convolve_blocks(pixels, weight, self.bias, dtype)
            pixels = pixels.to(dtype, memory_format=torch.channels_last if on_cpu else torch.preserve_format)
        return self._conv_forward(pixels, weight, self.bias)


def convolve_blocks(pixels: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the convolution with stride 4 of bytes, as a smaller one over blocks of pixels, computed in `dtype`.

        sum over c, y, x of w[o, c, y, x] p[c, 4 i + y, 4 j + x]
            = sum over a, b of (sum over c, y', x' of w[o, c, 4 a + y', 4 b + x'] p[c, 4 (i + a) + y', 4 (j + b) + x'])

    The inner sum is over one block of 4 x 4 pixels and all channels. With blocks as channels, the kernel has stride 1
    and a sixteenth of the positions. On CPUs the gradient in bfloat16, and converting bytes, take half the time.

    Args:
        pixels: [rows, channels, height, width].
        weight: [outputs, channels, height, width] of the kernel, both sides divisible by 4.
    """
    outputs, channels, high, wide = weight.shape
    rows, _, height, width = pixels.shape
    across = (outputs, channels, high // BLOCK, BLOCK, wide // BLOCK, BLOCK)
    if pixels.stride(1) == 1 and channels > 1:  # channels last
        lines = pixels.permute(0, 2, 3, 1).contiguous().view(rows, height, width * channels).view(torch.int32)
        fours = lines.view(rows, height // BLOCK, BLOCK, width // BLOCK, channels).permute(0, 1, 3, 2, 4)
        order = (0, 3, 5, 1, 2, 4)  # of a block: rows, columns, channels
    else:
        numbers = pixels.contiguous().flatten().view(torch.int32)
        fours = numbers.view(rows, channels, height // BLOCK, BLOCK, width // BLOCK).permute(0, 2, 4, 1, 3)
        order = (0, 1, 3, 5, 2, 4)  # of a block: channels, rows, columns
    kernel = weight.reshape(across).permute(order).reshape(outputs, -1, high // BLOCK, wide // BLOCK)
    blocks = fours.contiguous().flatten(3).view(torch.uint8)  # [rows, height / 4, width / 4, channels * 16]
    return conv2d(blocks.to(dtype).permute(0, 3, 1, 2), kernel.to(dtype), None if bias is None else bias.to(dtype))


def precision_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` where it is not that of their weights, else None."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Return `layer` with orthogonal weights and zero biases, drawn from torch's global generator."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _active(layer: nn.Conv2d) -> tuple[nn.Module, ...]:
    return orthogonal(layer, SQRT2), nn.ReLU()


CNNS = {"nature": nature_cnn, "impala": impala_cnn, "grid": grid_cnn}
