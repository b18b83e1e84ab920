"""Any `torch.nn.Module` as a network: TorchActing for actors, Autograd for trainers."""

import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from dppo.errors import ConfigError
from dppo.numerics.torch_modes import default_dtype, exact_on
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.kernels.calls import without_call_overhead
from dppo.ppo.kernels.linear_layers import use_in
from dppo.ppo.networks.network import (
    ActingNetwork,
    LearningNetwork,
    NetworkOutputs,
    RecurrentInputs,
)
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike
from dppo.spaces.spaces import Spaces

Inputs = Tensor | dict[str, Tensor]


class TorchActing(ActingNetwork):
    """Act with any module, on one thread, so that sums do not depend on the number of threads.

    A step on a few rows takes less time than torch's context managers. They are entered only if an environment in this
    process has changed the global setting in question, and parameters without gradients make `no_grad` unnecessary.
    """

    def __init__(
        self, module: nn.Module, parameters: Iterable[nn.Parameter], spaces: Spaces
    ) -> None:
        """Act with `module`; `parameters` are in the order of the flat vector."""
        self._parameters = list(parameters)
        self._module = without_call_overhead(module.requires_grad_(False))
        for parameter in self._parameters:
            # as in learners, whose products have the same bits then
            parameter.data = parameter.data.contiguous()
        self._dtype = self._parameters[0].dtype
        self._num_axes = {name: len(leaf.shape) for name, leaf in spaces.leaves().items()}

    @override
    def load(self, weights: np.ndarray) -> None:
        # a copy, because torch warns about read-only arrays
        flat = torch.from_numpy(weights.copy())
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))

    @override
    def step(
        self, obs: np.ndarray | dict[str, np.ndarray], state: np.ndarray | None = None
    ) -> NetworkOutputs:
        """Return head and values of `obs` [..., E, *O]: E rows at a time: larger batches would change the last bits."""
        name, leaf = next(iter(obs.items())) if isinstance(obs, dict) else ("", obs)
        if leaf.ndim > self._num_axes[name] + 1:
            return self._step_each(obs, state, len(leaf))
        with default_dtype(self._dtype), exact_on(1):
            inputs = each_leaf(obs, self._tensor)
            if state is None:
                # which may have a graph, if the module takes a gradient itself
                head, values = self._module(inputs)
                return NetworkOutputs(head.numpy(force=True), values.numpy(force=True))
            starts = torch.zeros((1, len(state)), dtype=torch.bool)
            one_step = each_leaf(inputs, itemgetter(None))
            head, values, new_state = self._module(one_step, self._tensor(state), starts)
            return NetworkOutputs(
                head[0].numpy(force=True), values[0].numpy(force=True), new_state.numpy(force=True)
            )

    def _step_each(
        self, obs: np.ndarray | dict[str, np.ndarray], state: np.ndarray | None, length: int
    ) -> NetworkOutputs:
        """Step each element of the first axis on its own."""
        steps = [
            self.step(each_leaf(obs, itemgetter(s)), None if state is None else state[s])
            for s in range(length)
        ]
        head = np.stack([outputs.head for outputs in steps])
        values = np.stack([outputs.values for outputs in steps])
        if state is None:
            return NetworkOutputs(head, values)
        return NetworkOutputs(
            head,
            values,
            np.stack([outputs.state for outputs in steps if outputs.state is not None]),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Copy `array` into memory that is aligned alike in every process."""
        tensor = torch.empty(array.shape, dtype=self._dtype)
        np.copyto(tensor.numpy(), array)
        return tensor


class Autograd(LearningNetwork):
    """Train any module: the gradient of the parameters is one vector-Jacobian product by autograd."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        zeros_like: ZerosLike | None = None,
    ) -> None:
        self.parameters = FlatParameters(parameters, zeros_like)
        use_in(module)
        self._module = module
        self._dtype = self.parameters.weights.dtype
        self._device = self.parameters.weights.device.type
        self._reads_bytes = getattr(module, "reads_bytes", False)
        self.lower_precision: torch.dtype | None = None
        """Precision of the layers, where weights and outputs have a higher one."""

    @override
    def forward(
        self, obs: Inputs, recurrent: RecurrentInputs | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return head [rows, H] and values [rows], detached, and both with their graph."""
        lowered: AbstractContextManager[object] = nullcontext()
        if self.lower_precision is not None:
            torch.clear_autocast_cache()  # within another autocast, torch keeps copies of weights that have changed
            lowered = torch.autocast(self._device, self.lower_precision)
        with torch.enable_grad(), default_dtype(self._dtype), lowered:
            head, values = self._outputs(obs, recurrent)
            head = head.to(self._dtype)
            values = values.to(self._dtype)
        return head.detach(), values.detach(), (head, values)

    def _outputs(self, obs: Inputs, recurrent: RecurrentInputs | None) -> tuple[Tensor, Tensor]:
        inputs = each_leaf(obs, self._input)
        if recurrent is None:
            head, values = self._module(inputs)
            return head, values
        states, starts = recurrent

        def time_first(leaf: Tensor) -> Tensor:
            return leaf.view(*starts.shape, *leaf.shape[1:]).transpose(0, 1)

        head, values, _ = self._module(each_leaf(inputs, time_first), states, starts.t())
        return head.transpose(0, 1).flatten(0, 1), values.t().flatten()

    def _input(self, leaf: Tensor) -> Tensor:
        # rows, and the axes of `spaces.is_image`
        is_image = leaf.dtype == torch.uint8 and leaf.dim() in (4, 5)
        if is_image and self._reads_bytes:
            return leaf
        return leaf.to(self._dtype)

    @override
    def backward(
        self, residuals: tuple[Tensor, Tensor], grad_head: Tensor, grad_values: Tensor
    ) -> None:
        """Compute the gradient with autograd, which adds to the views that the module's parameters hold."""
        self.parameters.gradient.zero_()
        with default_dtype(self._dtype):
            torch.autograd.backward(residuals, (grad_head, grad_values))


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
    network.lower_precision = torch.bfloat16


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; False if torch does not know."""
    if hasattr(torch.cpu, "get_capabilities"):
        return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.10
