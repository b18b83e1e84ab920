"""PPOModel: the torch module that learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dppo.ppo.architecture import ModelSpec

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class Kept(NamedTuple):
    """The inputs of the linear layers of each trunk in one forward pass, until the next one."""

    policy: list[Tensor]
    value: list[Tensor]


class PPOModel(nn.Module):
    """Observation -> output of the policy head and value, in two separate trunks (details 13 and 26)."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        """Draw the initial weights from `seed` alone; torch's global generator is neither used nor changed."""
        super().__init__()
        self.spec = spec
        self.policy = self._trunk(spec.distribution.head_size)
        self.value = self._trunk(1)
        self.log_std = None
        if "log_std" in dict(spec.shapes()):
            self.log_std = nn.Parameter(torch.zeros(spec.distribution.head_size))  # detail 24
        generator = torch.Generator().manual_seed(seed)
        for trunk, gain in ((self.policy, 0.01), (self.value, 1.0)):
            self._initialize(trunk, gain, generator)
        self.to(getattr(torch, spec.dtype))
        self._space = _Workspace()

    def _trunk(self, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        inputs = self.spec.obs_size
        for units in self.spec.hidden_sizes:
            layers += [nn.Linear(inputs, units, device="meta"), ACTIVATIONS[self.spec.activation]()]
            inputs = units
        layers.append(nn.Linear(inputs, outputs, device="meta"))
        # From "meta" to memory without a draw from the global generator, which nn.Linear would make.
        return nn.Sequential(*layers).to_empty(device="cpu")

    @staticmethod
    def _initialize(trunk: nn.Sequential, head_gain: float, generator: torch.Generator) -> None:
        """Orthogonal weights, zero biases (detail 2)."""
        linears = [layer for layer in trunk if isinstance(layer, nn.Linear)]
        for layer in linears:
            gain = head_gain if layer is linears[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Head [rows, H] and values [rows] of observations [rows, O]."""
        return self.policy(obs), self.value(obs).squeeze(1)

    @torch.no_grad()
    def forward_keeping(self, obs: Tensor) -> tuple[Tensor, Tensor, Kept]:
        """What `forward` gives, and what `backward` needs; all of it in memory that the next call writes to again."""
        head, policy = self._through("policy", self.policy, obs)
        values, value = self._through("value", self.value, obs)
        return head, values.squeeze(1), Kept(policy, value)

    @torch.no_grad()
    def backward(self, kept: Kept, by_head: Tensor, by_values: Tensor, *, accumulate: bool = False) -> None:
        """The loss's gradient by every weight of the trunks, from those by head [rows, H] and values [rows].

        It replaces the gradient of before, or is added to it; `kept` is used up. What autograd would do with `forward`,
        at half its cost, for most of that is bookkeeping where layers are small.
        """
        self._back(self.policy, kept.policy, by_head, accumulate)
        self._back(self.value, kept.value, by_values.unsqueeze(1), accumulate)

    def _through(self, name: str, trunk: nn.Sequential, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output of `trunk`, and the input of each of its linear layers."""
        inputs: list[Tensor] = []
        for layer in trunk:
            if isinstance(layer, nn.Linear):
                inputs.append(x)
                space = self._space.take((name, len(inputs)), x, layer.out_features)
                x = torch.addmm(layer.bias, x, layer.weight.t(), out=space)
            else:
                x = x.tanh_() if self.spec.activation == "tanh" else x.relu_()
        return x, inputs

    def _back(self, trunk: nn.Sequential, inputs: list[Tensor], by_output: Tensor, accumulate: bool) -> None:
        """Chain rule, from the last linear layer y = W x + b to the first.

        dL/dW = dL/dy^T x        dL/db = sum(dL/dy)        dL/dx = dL/dy W
        x = tanh(z): dL/dz = dL/dx (1 - x^2)        x = relu(z): dL/dz = dL/dx where x > 0
        """
        linears = [layer for layer in trunk if isinstance(layer, nn.Linear)]
        turn = "odd"
        for layer, x in zip(reversed(linears), reversed(inputs), strict=True):
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            layer.weight.grad.addmm_(by_output.t(), x, beta=int(accumulate))  # 0: what was there is not even read
            if accumulate:
                layer.bias.grad += by_output.sum(dim=0)
            else:
                torch.sum(by_output, dim=0, out=layer.bias.grad)
            if layer is not linears[0]:
                # Two in turn: one is read while the other is written.
                turn = "even" if turn == "odd" else "odd"
                by_input = torch.mm(by_output, layer.weight, out=self._space.take(turn, x, layer.in_features))
                if self.spec.activation == "tanh":
                    by_output = by_input.addcmul_(by_input, x.square_(), value=-1)
                else:
                    by_output = by_input.mul_(x > 0)

    def ordered_parameters(self) -> list[nn.Parameter]:
        """All parameters in the order of `ModelSpec.shapes`, which is not that of `named_parameters`."""
        named = dict(self.named_parameters())
        assert {name: tuple(p.shape) for name, p in named.items()} == dict(self.spec.shapes()), "model and spec differ"
        return [named[name] for name, _ in self.spec.shapes()]


class _Workspace:
    """Memory that every minibatch uses again.

    What is allocated and freed in each, the system takes back and hands out anew, page by page, which shows where
    layers are wide.
    """

    def __init__(self) -> None:
        self._by_rows: dict[int, dict[Hashable, Tensor]] = {}

    def take(self, use: Hashable, like: Tensor, columns: int) -> Tensor:
        """A matrix [rows of `like`, `columns`] of its type, with whatever its last `use` left in it."""
        rows = len(like)
        if rows not in self._by_rows:
            if len(self._by_rows) == 2:  # minibatches come in two sizes at most, which differ by one row
                self._by_rows.clear()
            self._by_rows[rows] = {}
        spaces = self._by_rows[rows]
        space = spaces.get((use, columns))
        if space is None:
            space = spaces[use, columns] = like.new_empty((rows, columns))
        return space


class FlatParameters:
    """All parameters of a module in one vector, and all gradients in another.

    The module's own parameters become views. Then the gradient's norm, its clipping, the optimiser's step, a
    snapshot, and the mean over several learners are each one operation on one tensor, whatever the model.
    """

    def __init__(
        self, parameters: list[nn.Parameter], zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like
    ) -> None:
        """Args:
        parameters: all of them, in the order in which they are to lie in the vector.
        zeros_like: makes the vector of gradients; several learners want theirs in shared memory.
        """
        self.weights = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.gradient = zeros_like(self.weights.detach())
        self.weights.grad = self.gradient
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.weights.data[start:end].view_as(parameter)
            parameter.grad = self.gradient[start:end].view_as(parameter)
            start = end
