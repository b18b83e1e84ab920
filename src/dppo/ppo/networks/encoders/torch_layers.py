"""Layers of the built-in networks that differ from torch's, for bytes and for lower precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dppo.ppo.networks.encoders.blocks import convolve_blocks, fits_blocks


class Output(nn.Linear):
    """A last layer: in the precision of its weights, also where the layers before it run in bfloat16.

    bfloat16 has three digits, too few for values and for the mean of a narrow Gaussian.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs [rows, n] of `hidden` [rows, features]."""
        if precision_on(hidden.device) is None:
            return super().forward(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))


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
        convolved: Tensor = self._conv_forward(pixels, weight, self.bias)
        return convolved


def precision_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` where it is not that of their weights, else None."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
