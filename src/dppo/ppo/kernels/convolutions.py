"""Layers for images of bytes: convolutions over pixels, and the layer behind all convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from dppo.numerics.torch_modes import autocast_dtype_on
from dppo.ppo.kernels.linear_layers import layer_forward

BLOCK = 4  # pixels of a side: four bytes are moved as one number of 32 bits


class PixelConv(nn.Conv2d):
    """A convolution over pixels divided by 255: its few weights are divided rather than the many pixels.

    In training it gets bytes. On a CPU it puts the channels of a pixel side by side in memory, and the layers behind it
    keep that order, with which backpropagation takes two thirds of the time.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the convolution of `pixels` [rows, channels, height, width] / 255."""
        weight = self.weight / 255
        if pixels.dtype != torch.uint8:
            return self._conv_forward(pixels, weight, self.bias)
        dtype = autocast_dtype_on(pixels.device) or weight.dtype
        if pixels.device.type != "cpu":
            return self._conv_forward(pixels.to(dtype), weight, self.bias)
        is_whole_blocks = all(side % BLOCK == 0 for side in (*self.kernel_size, *pixels.shape[2:]))
        if is_whole_blocks and self.stride == (BLOCK, BLOCK) and self.padding == (0, 0):
            return convolve_blocks(pixels, weight, self.bias, dtype)
        return self._conv_forward(
            pixels.to(dtype, memory_format=torch.channels_last), weight, self.bias
        )


def convolve_blocks(
    pixels: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the convolution with stride 4 of bytes, as a smaller one over blocks of pixels, computed in `dtype`.

        sum over c, y, x of w[o, c, y, x] p[c, 4 i + y, 4 j + x]
            = sum over a, b of (sum over c, y', x' of w[o, c, 4 a + y', 4 b + x'] p[c, 4 (i + a) + y', 4 (j + b) + x'])

    The inner sum is over one block of 4 x 4 pixels and all channels. With blocks as channels, the kernel has stride 1
    and a sixteenth of the positions. On CPUs the gradient in bfloat16, and converting bytes, take half the time.

    Args:
        pixels: [rows, channels, height, width].
        weight: [outputs, channels, height, width] of the kernel, both sides divisible by 4.
    """
    outputs, channels, kernel_height, kernel_width = weight.shape
    rows, _, height, width = pixels.shape
    if pixels.stride(1) == 1 and channels > 1:  # channels last
        lines = (
            pixels.permute(0, 2, 3, 1)
            .contiguous()
            .view(rows, height, width * channels)
            .view(torch.int32)
        )
        words = lines.view(rows, height // BLOCK, BLOCK, width // BLOCK, channels).permute(
            0, 1, 3, 2, 4
        )
        # within a block: rows, columns, channels
        block_order = (0, 3, 5, 1, 2, 4)
    else:
        words = pixels.contiguous().flatten().view(torch.int32)
        words = words.view(rows, channels, height // BLOCK, BLOCK, width // BLOCK).permute(
            0, 2, 4, 1, 3
        )
        # within a block: channels, rows, columns
        block_order = (0, 1, 3, 5, 2, 4)
    # [rows, height / 4, width / 4, channels * 16]
    blocks = words.contiguous().flatten(3).view(torch.uint8)
    kernel_blocks = kernel_height // BLOCK, kernel_width // BLOCK
    kernel = weight.reshape(outputs, channels, kernel_blocks[0], BLOCK, kernel_blocks[1], BLOCK)
    kernel = kernel.permute(block_order).reshape(outputs, -1, *kernel_blocks)
    bias = None if bias is None else bias.to(dtype)
    return conv2d(blocks.to(dtype).permute(0, 3, 1, 2), kernel.to(dtype), bias)


class Dense(nn.Linear):
    """The layer behind convolutions: on a CPU by oneDNN, like the convolutions themselves.

    Its bits then depend on AVX-512, as those of convolutions do, and a minibatch takes half the time that AVX2 allows.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs [rows, n] of `inputs` [rows, features]."""
        is_plain = (
            inputs.device.type == "cpu" and inputs.dtype == self.weight.dtype == torch.float32
        )
        if (
            not is_plain
            or autocast_dtype_on(inputs.device) is not None
            or not torch.backends.mkldnn.is_available()
        ):
            return layer_forward(self, inputs)
        if not torch.is_grad_enabled():
            return _by_onednn(inputs, self.weight, self.bias)
        return _Dense.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]


class _Dense(Function):
    """y = x W^T + b: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (_by_onednn(grad_y, weight.t()), _by_onednn(grad_y.t(), x.t()), grad_y.sum(dim=0))


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `a` [n, k] times `b` [m, k] transposed, plus `bias` [m], as torch.compile does."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
