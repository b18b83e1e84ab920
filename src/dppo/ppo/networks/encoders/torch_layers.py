"""Layers of the built-in networks that differ from torch's, for bytes and for lower precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from dppo.ppo.networks.products import layer_forward

BLOCK = 4  # pixels of a side: four bytes are moved as one number of 32 bits


class Output(nn.Linear):
    """A last layer: in the precision of its weights, also where the layers before it run in bfloat16.

    bfloat16 has three digits, too few for values and for the mean of a narrow Gaussian.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs [rows, n] of `hidden` [rows, features]."""
        if precision_on(hidden.device) is None:
            return layer_forward(self, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return layer_forward(self, hidden.to(self.weight.dtype))


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


def _by_onednn(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return `a` [n, k] times `b` [m, k] transposed, plus a row [m], as torch.compile does."""
    return torch.ops.mkldnn._linear_pointwise(a, b, plus, "none", [], "")


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


class PixelConv(nn.Conv2d):
    """A convolution over pixels divided by 255: its few weights are divided rather than the many pixels.

    In training it gets bytes. On a CPU it puts the channels of a pixel side by side in memory, and the layers behind it
    keep that order, with which backpropagation takes two thirds of the time.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the convolution of `pixels` [rows, channels, height, width] / 255."""
        weight = self.weight / 255
        if pixels.dtype == torch.uint8:
            dtype = precision_on(pixels.device) or weight.dtype
            if pixels.device.type != "cpu":
                pixels = pixels.to(dtype)
            elif fits_blocks(pixels, self.kernel_size, self.stride, self.padding):
                return convolve_blocks(pixels, weight, self.bias, dtype)
            else:
                pixels = pixels.to(dtype, memory_format=torch.channels_last)
        return self._conv_forward(pixels, weight, self.bias)


def precision_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` where it is not that of their weights, else None."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def fits_blocks(pixels: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: object) -> bool:
    """Return whether `convolve_blocks` computes this convolution of `pixels` [rows, channels, height, width]."""
    return (
        tuple(stride) == (BLOCK, BLOCK)
        and padding in (0, (0, 0))
        and all(side % BLOCK == 0 for side in (*kernel, *pixels.shape[2:]))
    )


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
