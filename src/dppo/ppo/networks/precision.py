"""bfloat16 for learning: half the bytes, and several times the products per second where the hardware has it."""

from __future__ import annotations

import platform

import torch

from dppo.errors import ConfigError
from dppo.ppo.networks.autograd import Autograd
from dppo.ppo.networks.network import LearningNetwork


def learn_in_bfloat16(network: LearningNetwork, device: str) -> None:
    """Run the layers of `network` in bfloat16 from now on; its weights, gradients and outputs stay float32.

    Results are reproducible on the same type of CPU or GPU.

    Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training" (arXiv:1905.12322).

    Raises:
        ConfigError: the network is the MLP with a gradient by hand, or the device has no instructions for bfloat16.
    """
    if not isinstance(network, Autograd):
        raise ConfigError(
            "precision=bfloat16: the default network for an observation of numbers is a small MLP with a gradient "
            "written by hand in float32, and would not become faster. Use precision=float32."
        )
    if device == "cpu" and not cpu_has_bfloat16():
        raise ConfigError(
            f"precision=bfloat16: this CPU ({platform.machine()}) has no instructions for bfloat16 (AVX512_BF16 or AMX "
            f"on x86), so it would be slower than float32. Use precision=float32, or device=cuda."
        )
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision=bfloat16: {torch.cuda.get_device_name()} has no instructions for bfloat16, which came with "
            f"NVIDIA's Ampere. Use precision=float32."
        )
    network.compute_in(torch.bfloat16)


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; False if torch does not know."""
    if hasattr(torch.cpu, "get_capabilities"):
        return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.10
