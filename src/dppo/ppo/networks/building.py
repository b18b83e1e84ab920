"""Build the two halves of a network from its spec: for actors and for trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dppo.ppo.networks.default.mlp import MLPSpec, NumpyMLP
from dppo.ppo.networks.encoders.encoder_spec import EncoderSpec
from dppo.ppo.networks.memory.memory_mlp import NumpyMemoryMLP
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, NetworkSpec
from dppo.ppo.networks.user.module_spec import ModuleSpec
from dppo.user_code import import_path

if TYPE_CHECKING:
    from torch import Tensor


def acting_network(spec: NetworkSpec) -> ActingNetwork:
    """Build the network for an actor, without torch if it acts in NumPy; raise ConfigError if a module is refused."""
    if isinstance(spec, MLPSpec):
        return NumpyMLP(spec)
    if isinstance(spec, EncoderSpec) and spec.acts_in_numpy:
        return NumpyMemoryMLP(spec)
    from dppo.ppo.networks.modules import TorchActing

    assert isinstance(spec, EncoderSpec | ModuleSpec)
    return TorchActing(spec.module(0), spec.spaces)


def learning_network(
    spec: NetworkSpec, seed: int, *, device: str = "cpu", zeros_like: Callable[[Tensor], Tensor] | None = None
) -> LearningNetwork:
    """Build the network for a trainer, with initial weights drawn from `seed` alone; imports torch.

    Args:
        zeros_like: allocates the vector of gradients, which several learners keep in shared memory.

    Raise ConfigError if a module of the user's does not keep the contract.
    """
    if isinstance(spec, MLPSpec):
        from dppo.ppo.networks.default.mlp_torch import HandwrittenMLP

        return HandwrittenMLP(spec, seed, device=device, zeros_like=zeros_like)
    from dppo.ppo.networks.modules import Autograd, quick
    from dppo.ppo.networks.parameters import settled, shapes_of

    assert isinstance(spec, EncoderSpec | ModuleSpec)
    name = import_path(spec.model) if isinstance(spec, ModuleSpec) else "the built-in network"
    module = quick(settled(lambda: spec.module(seed), name).to(device))
    assert list(shapes_of(module).items()) == list(spec.shapes.items()), "module and spec differ"
    return Autograd(module, module.parameters(), zeros_like)
