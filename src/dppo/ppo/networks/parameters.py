"""The parameters of a module: drawn from a seed, and stored in one flat vector."""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dppo.errors import ConfigError
from dppo.numerics.torch_modes import default_dtype, in_turn

ZerosLike = Callable[[Tensor], Tensor]
MAX_BUILDS = 20
"""Builds of a module in which two must have equal weights."""


class FlatParameters:
    """Parameters of a module as views of one vector, with their gradients as views of another.

    The gradient's norm, its clipping and its sum over learners, Adam, and a snapshot are then one operation each.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], zeros_like: ZerosLike | None = None
    ) -> None:
        """Move `parameters`, all of a module, into one vector; `zeros_like` allocates the vector of gradients."""
        parameters = list(parameters)
        self.weights = nn.Parameter(
            torch.cat([parameter.detach().flatten() for parameter in parameters])
        )
        self.gradient = (zeros_like or torch.zeros_like)(self.weights.detach())
        self.weights.grad = self.gradient
        sizes = [parameter.numel() for parameter in parameters]
        pieces = zip(
            parameters, self.weights.data.split(sizes), self.gradient.split(sizes), strict=True
        )
        for parameter, weights, gradient in pieces:
            parameter.data = weights.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)


def initialized(make: Callable[[], nn.Module], seed: int, dtype: str) -> nn.Module:
    """Return what `make` builds on the CPU, with weights drawn from `seed`; torch's global generator stays unchanged.

    Weights are drawn in float32 for every dtype.
    """
    with in_turn(), torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        torch.default_generator.manual_seed(seed)
        module = make()
    module_dtype = getattr(torch, dtype)
    return module._apply(
        lambda tensor: tensor.to(module_dtype) if tensor.is_floating_point() else tensor
    )


def rebuilt_deterministically(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """Build a module until two builds have equal weights: a thread of an environment may draw from the generator, too.

    Raise ConfigError, with the `name` of the module, if the weights differ each time.
    """
    digests: set[bytes] = set()
    for _ in range(MAX_BUILDS):
        module = build()
        weights = [parameter.detach().numpy().tobytes() for parameter in module.parameters()]
        digest = hashlib.sha256(b"".join(weights)).digest()
        if digest in digests:
            return module
        digests.add(digest)
    raise ConfigError(
        f"model={name}: its initial weights differ each time, in {MAX_BUILDS} builds from one seed. Draw them from "
        f"torch's generator, not from NumPy or uninitialized memory, and let no thread of an environment draw from it."
    )


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
