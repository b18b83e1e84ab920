"""Any `torch.nn.Module` as a network: TorchActing for actors, Autograd for trainers."""

import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, jit, nn
from typing_extensions import override

from dppo.errors import ConfigError
from dppo.ppo.exchange.normalizer import each_leaf
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, Outputs, RecurrentInputs
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike, default_dtype, exact_on
from dppo.ppo.networks.products import HOOKS, forwards_of, use_in
from dppo.spaces.spaces import Spaces

Inputs = Tensor | dict[str, Tensor]


class TorchActing(ActingNetwork):
    """Act with any module, on one thread, so that sums do not depend on the number of threads.

    A step on a few rows takes less time than torch's context managers. They are entered only if an environment in this
    process has changed the global setting in question, and parameters without gradients make `no_grad` unnecessary.
    """

    def __init__(self, module: nn.Module, spaces: Spaces) -> None:
        self._module = quick(module.requires_grad_(False))
        self._parameters = list(self._module.parameters())
        for parameter in self._parameters:
            parameter.data = parameter.data.contiguous()  # as in learners, whose products have the same bits then
        self._dtype = self._parameters[0].dtype
        self._dims = {name: len(leaf.shape) for name, leaf in spaces.leaves().items()}

    @override
    def load(self, weights: np.ndarray) -> None:
        flat = torch.from_numpy(weights.copy())  # a copy, because torch warns about read-only arrays
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))

    @override
    def step(self, obs: np.ndarray | dict[str, np.ndarray], state: np.ndarray | None = None) -> Outputs:
        """Return head and values of `obs` [..., E, *O]: E rows at a time: larger batches would change the last bits."""
        name, leaf = next(iter(obs.items())) if isinstance(obs, dict) else ("", obs)
        if leaf.ndim > self._dims[name] + 1:
            states = [None] * len(leaf) if state is None else state
            parts = (each_leaf(obs, itemgetter(s)) for s in range(len(leaf)))
            each: Any = zip(*map(self.step, parts, states), strict=True)
            whole: list[Any] = [None if one[0] is None else np.stack(one) for one in each]
            return Outputs(*whole)
        with default_dtype(self._dtype), exact_on(1):
            inputs = each_leaf(obs, self._tensor)
            before = None if state is None else self._tensor(state)
            if before is None:
                head, values = self._module(inputs)  # which may have a graph, if the module takes a gradient itself
                return Outputs(head.numpy(force=True), values.numpy(force=True))
            starts = torch.zeros((1, len(before)), dtype=torch.bool)
            head, values, after = self._module(each_leaf(inputs, itemgetter(None)), before, starts)
            return Outputs(*(one.numpy(force=True) for one in (head[0], values[0], after)))

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Copy `array` into memory that is aligned alike in every process."""
        tensor = torch.empty(array.shape, dtype=self._dtype)
        np.copyto(tensor.numpy(), array)
        return tensor


class Autograd(LearningNetwork):
    """Train any module: the gradient of the parameters is one vector-Jacobian product by autograd."""

    def __init__(
        self, module: nn.Module, parameters: Iterable[nn.Parameter], zeros_like: ZerosLike | None = None
    ) -> None:
        self.parameters = FlatParameters(parameters, zeros_like)
        use_in(module)
        self._module = module
        self._dtype, self._device = self.parameters.weights.dtype, self.parameters.weights.device.type
        self._reads_bytes = getattr(module, "reads_bytes", False)
        self.lower: torch.dtype | None = None  # precision of the layers, where weights and outputs have a higher one

    @override
    def forward(
        self, obs: Inputs, recurrent: RecurrentInputs | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return head [rows, H] and values [rows], detached, and both with their graph."""
        lowered: AbstractContextManager[object] = nullcontext()
        if self.lower is not None:
            torch.clear_autocast_cache()  # within another autocast, torch keeps copies of weights that have changed
            lowered = torch.autocast(self._device, self.lower)
        with torch.enable_grad(), default_dtype(self._dtype), lowered:
            head, values = (output.to(self._dtype) for output in self._outputs(obs, recurrent))
        return head.detach(), values.detach(), (head, values)

    def _outputs(self, obs: Inputs, recurrent: RecurrentInputs | None) -> tuple[Tensor, Tensor]:
        inputs = each_leaf(obs, self._input)
        if recurrent is None:
            return self._module(inputs)
        states, starts = recurrent

        def over_time(leaf: Tensor) -> Tensor:
            return leaf.view(*starts.shape, *leaf.shape[1:]).transpose(0, 1)

        head, values, _ = self._module(each_leaf(inputs, over_time), states, starts.t())
        return head.transpose(0, 1).flatten(0, 1), values.t().flatten()

    def _input(self, leaf: Tensor) -> Tensor:
        is_image = leaf.dtype == torch.uint8 and leaf.dim() in (4, 5)  # rows, and the axes of `spaces.is_image`
        return leaf if is_image and self._reads_bytes else leaf.to(self._dtype)

    @override
    def backward(self, residuals: tuple[Tensor, Tensor], by_head: Tensor, by_values: Tensor) -> None:
        """Compute the gradient with autograd, which adds to the views that the module's parameters hold."""
        self.parameters.gradient.zero_()
        with default_dtype(self._dtype):
            torch.autograd.backward(residuals, (by_head, by_values))


def quick(module: nn.Module) -> nn.Module:
    """Modify `module` so that its forward pass takes half the time for few rows, and return it.

    Submodules also become plain attributes, so that `self.layer` skips torch's `__getattr__`. Layers of torch that have
    no hooks call `forward` directly. The tensors stay the same objects. The structure of the module must not change
    afterwards.
    """
    for part, forward in forwards_of(module):
        if isinstance(part, jit.ScriptModule):
            continue
        part.__dict__.update(part._modules)  # not parameters: torch.func.functional_call replaces them for a call
        kind = type(part)
        if (
            kind.__module__.startswith("torch.nn.modules.")
            and kind.__call__ is nn.Module.__call__
            and "forward" not in part.__dict__
            and not any(getattr(part, hooks) for hooks in HOOKS)
        ):
            call = kind.forward if forward is None else _forward
            part.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        if forward is not None:  # of this module alone: a slice or a copy of it has the class, and another `forward`
            part.__dict__["forward"] = forward
    return module


def _forward(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """Call what `quick` has set on this module, without torch's `__call__`."""
    return module.forward(*inputs, **named)


def learn_in_bfloat16(network: LearningNetwork, device: str) -> None:
    """Run the layers of `network` in bfloat16 from now on; its weights, gradients and outputs stay float32.

    Half the bytes, and several times the products per second where the hardware has it. Results are reproducible on the
    same type of CPU or GPU.

    Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training" (arXiv:1905.12322).

    Raise ConfigError if the network is the MLP with a gradient by hand, or the device has no instructions for bfloat16.
    """
    if not isinstance(network, Autograd):
        raise ConfigError(
            "precision=bfloat16: the default network for an observation of numbers is a small MLP with a gradient "
            "written by hand in float32, and would not become faster. Use `precision=float32`."
        )
    if device == "cpu" and not cpu_has_bfloat16():
        raise ConfigError(
            f"precision=bfloat16: this CPU ({platform.machine()}) has no instructions for bfloat16 (AVX512_BF16 or AMX "
            f"on x86), so it would be slower than float32. Use `precision=float32`, or `device=cuda`."
        )
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision=bfloat16: {torch.cuda.get_device_name()} has no instructions for bfloat16, which came with "
            f"NVIDIA's Ampere. Use `precision=float32`."
        )
    network.lower = torch.bfloat16


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; False if torch does not know."""
    if hasattr(torch.cpu, "get_capabilities"):
        return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.10
