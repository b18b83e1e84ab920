"""Any `torch.nn.Module` as a network, for acting and for learning by autograd; torch is imported when used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.ppo.distributions import Distribution, distribution_of
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, NetworkSpec, Outputs
from dppo.ppo.networks.torch_state import default_dtype, exact_on, matmul_precision
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dppo.ppo.networks.recall import Recall

ModelClass = str | Callable[..., Any]


@dataclass(frozen=True)
class ModuleSpec(NetworkSpec):
    """A user's module, by its class.

    The contract: `Class(spaces, head_size, **kwargs)` returns a `torch.nn.Module` whose `forward(obs)` maps a
    floating-point tensor of observations [rows, *O] to the head [rows, head_size] and the values [rows]. Of a Dict or
    Tuple space, it gets a dict of such tensors by the leaf's name.

    A module with memory has an attribute `state_size`, S. Its `forward(obs, state, starts)` maps sequences of
    observations [L, rows, *O], the state [rows, S] before the first step, and flags [L, rows] at which the state
    becomes zero before the step, to head [L, rows, head_size], values [L, rows] and the state after the last step.
    Actors call it with L = 1. `dppo.ppo.networks.user.contract` checks it.
    """

    obs_shape: tuple[int, ...]
    distribution: Distribution
    model: ModelClass
    """`module:Class`, or the class itself."""
    kwargs: dict[str, Any]
    dtype: str
    spaces: Spaces = field(compare=False, repr=False)

    @staticmethod
    def of(spaces: Spaces, model: ModelClass, kwargs: dict[str, Any], dtype: str) -> ModuleSpec:
        """Return the network for these spaces."""
        return ModuleSpec(spaces.obs.shape, distribution_of(spaces.actions), model, kwargs, dtype, spaces)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes in the order of `named_parameters`."""
        return self._shapes

    @property
    def state_size(self) -> int:
        """Return the module's `state_size`, or 0."""
        return self._facts[1]

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._facts[0]

    @cached_property
    def _facts(self) -> tuple[dict[str, tuple[int, ...]], int]:
        module = self.module(0)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        return shapes, getattr(module, "state_size", 0)

    def acting(self) -> ActingNetwork:
        """Build the network for an actor.

        Raises:
            ConfigError: the module does not keep the contract.
        """
        return TorchActing(self)

    def learning(
        self, seed: int, *, device: str = "cpu", zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> LearningNetwork:
        """Build the network for a trainer.

        Raises:
            ConfigError: the module does not keep the contract.
        """
        from dppo.ppo.networks.quick import quick

        module = quick(self.module(seed, settled=True).to(device))
        return Autograd(module, module.parameters(), zeros_like)

    def module(self, seed: int, *, settled: bool = False) -> nn.Module:
        """Build the module on the CPU with weights drawn from `seed`; torch's global generator is left unchanged.

        Args:
            settled: make sure that no other thread has drawn from that generator meanwhile. Where the weights are
                replaced, this is not needed.

        Raises:
            ConfigError: the module does not keep the contract.
        """
        import torch

        from dppo.ppo.networks.user.contract import Contract, model_class
        from dppo.ppo.networks.user.trial import Trial

        name = model_name(self.model)
        contract = Contract(Trial(name, self.spaces, self.distribution.head_size, self.dtype))
        made_of = model_class(self.model, name)

        def build(seed: int) -> nn.Module:
            torch.default_generator.manual_seed(seed)
            with default_dtype(torch.float32):  # for every dtype, as for the default network
                return made_of(self.spaces, self.distribution.head_size, **self.kwargs)

        with torch.random.fork_rng(devices=[]):
            return contract.checked(build, seed, settled=settled)

    def zeros(self, rows: int) -> Tensor | dict[str, Tensor]:
        """Return observations of zeros, as a batch holds them."""
        import torch

        def leaf_of(leaf: np.dtype[Any]) -> Tensor:
            dtype = self.dtype if leaf.base.kind == "f" else leaf.base
            return torch.from_numpy(np.zeros((rows, *leaf.shape), dtype))

        named = {name: leaf_of(leaf) for name, leaf in self.spaces.leaves().items()}
        return named if self.spaces.obs.names is not None else named[""]

    def as_json(self) -> dict[str, Any]:
        """Return the import path of the class, its arguments and the dtype."""
        return {"model": model_name(self.model), "model_kwargs": self.kwargs, "dtype": self.dtype}


def check_model(model: ModelClass) -> None:
    """Check that `model` is or names a subclass of `torch.nn.Module`, without creating one; imports torch.

    Raises:
        ConfigError: it does not.
    """
    from dppo.ppo.networks.user.contract import model_class

    model_class(model, model_name(model))


def model_name(model: ModelClass) -> str:
    """Return the import path of the class, `module:Class`."""
    return model if isinstance(model, str) else f"{model.__module__}:{getattr(model, '__qualname__', repr(model))}"


class Autograd:
    """Train any module: the gradient of the parameters is one vector-Jacobian product by autograd."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        zeros_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Move the parameters of `module` into one vector.

        Args:
            parameters: all of the module's, in the order of the vector.
            zeros_like: allocates the vector of gradients; None means `torch.zeros_like`.
        """
        from dppo.ppo.networks.flat import FlatParameters

        self.parameters = FlatParameters(parameters, zeros_like)
        self._module = module
        self._dtype = self.parameters.weights.dtype
        self._reads_bytes = getattr(module, "reads_bytes", False)
        self._lower: torch.dtype | None = None

    def compute_in(self, lower: torch.dtype) -> None:
        """Run the layers in the precision `lower` from now on; weights and outputs keep theirs."""
        self._lower = lower

    def forward(
        self, obs: Tensor | dict[str, Tensor], recall: Recall | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return head [rows, H] and values [rows], detached, and both with their graph."""
        import torch

        with torch.enable_grad(), default_dtype(self._dtype):
            if self._lower is None:
                head, values = self._outputs(obs, recall)
            else:
                with torch.autocast(self.parameters.weights.device.type, self._lower):
                    head, values = self._outputs(obs, recall)
                head, values = head.to(self._dtype), values.to(self._dtype)
        return head.detach(), values.detach(), (head, values)

    def _outputs(self, obs: Tensor | dict[str, Tensor], recall: Recall | None) -> tuple[Tensor, Tensor]:
        inputs = self._inputs(obs)
        if recall is not None:
            return recall.outputs(self._module, inputs)
        head, values = self._module(inputs)
        return head, values

    def _inputs(self, obs: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        if isinstance(obs, dict):
            return {name: self._input(leaf) for name, leaf in obs.items()}
        return self._input(obs)

    def _input(self, leaf: Tensor) -> Tensor:
        is_image = leaf.element_size() == 1 and leaf.dim() > 3
        return leaf if is_image and self._reads_bytes else leaf.to(self._dtype)

    def backward(
        self, residuals: tuple[Tensor, Tensor], by_head: Tensor, by_values: Tensor, *, accumulate: bool
    ) -> None:
        """Compute the gradient with autograd, which adds to the views that the module's parameters hold."""
        import torch

        if not accumulate:
            self.parameters.gradient.zero_()
        with default_dtype(self._dtype):
            torch.autograd.backward(residuals, (by_head, by_values))


class TorchActing:
    """Act with any module, on one thread, so that sums do not depend on the number of threads.

    A step on a few rows takes less time than torch's context managers. They are entered only if an environment in this
    process has changed the global setting in question, and parameters without gradients make `no_grad` unnecessary.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        import torch

        from dppo.ppo.networks.quick import quick

        self._module = quick(spec.module(0).requires_grad_(False))
        self._parameters = list(self._module.parameters())
        self._dtype = self._parameters[0].dtype
        self._dims = {name: len(leaf.shape) for name, leaf in spec.spaces.leaves().items()}
        self._default_dtype, self._num_threads = torch.get_default_dtype, torch.get_num_threads
        self._inputs: dict[str, Tensor] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._state, self._starts = torch.empty(0), torch.empty(0)

    def load(self, weights: np.ndarray) -> None:
        """Copy `weights` [P]."""
        import torch

        flat, start = torch.from_numpy(weights.copy()), 0  # a copy, because torch warns about read-only arrays
        for parameter in self._parameters:
            end = start + parameter.numel()
            parameter.copy_(flat[start:end].view_as(parameter))
            start = end

    def step(self, obs: np.ndarray | dict[str, np.ndarray], state: np.ndarray | None = None) -> Outputs:
        """Return head and values of `obs` [..., E, *O]: E rows at a time: larger batches would change the last bits."""
        named = obs if isinstance(obs, dict) else {"": obs}
        for name, leaf in named.items():
            if leaf.ndim > self._dims[name] + 1:
                stacked = [{one: view[s] for one, view in named.items()} for s in range(len(leaf))]
                states = [None] * len(leaf) if state is None else state
                return _stacked([self.step(one, own) for one, own in zip(stacked, states, strict=True)])
            if name not in self._rows or leaf.shape != self._rows[name].shape:
                self._fit(name, leaf.shape)
            np.copyto(self._rows[name], leaf)
        inputs: Any = self._inputs.get("", self._inputs)
        if self._default_dtype() is self._dtype and self._num_threads() == 1 and matmul_precision() == "highest":
            return self._outputs(inputs, state)
        with default_dtype(self._dtype), exact_on(1):
            return self._outputs(inputs, state)

    def _outputs(self, inputs: Any, state: np.ndarray | None) -> Outputs:
        if state is None:
            head, values = self._module(inputs)
            return Outputs(head.numpy(), values.numpy())
        import torch

        if self._state.shape != state.shape:
            self._state = torch.empty(state.shape, dtype=self._dtype)
            self._starts = torch.zeros((1, len(state)), dtype=torch.bool)
        np.copyto(self._state.numpy(), state)
        steps = each_leaf(inputs, lambda leaf: leaf[None])
        head, values, after = self._module(steps, self._state, self._starts)
        return Outputs(head[0].numpy(), values[0].numpy(), after.numpy().copy())  # may be a view of our own

    def _fit(self, name: str, shape: tuple[int, ...]) -> None:
        """Take memory for the module's input: torch aligns its own memory alike in every process."""
        import torch

        self._inputs[name] = torch.empty(shape, dtype=self._dtype)
        self._rows[name] = self._inputs[name].numpy()


def _stacked(outputs: list[Outputs]) -> Outputs:
    states = [one.state for one in outputs if one.state is not None]
    heads, values = (np.stack([getattr(one, name) for one in outputs]) for name in ("head", "values"))
    return Outputs(heads, values, np.stack(states) if states else None)
