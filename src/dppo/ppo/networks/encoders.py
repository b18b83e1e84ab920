"""The network of encoders: a plain torch module, with the contract of a user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dppo.numerics.torch_modes import autocast_dtype_on
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.kernels.linear_layers import layer_forward
from dppo.ppo.kernels.recurrence import over_time
from dppo.ppo.networks.images import CNN, CNNS, SQRT2, orthogonal
from dppo.ppo.networks.layers import Layers, is_one_hot
from dppo.ppo.networks.mlp import ACTIVATIONS
from dppo.spaces.spaces import Categories, Spaces, is_image

EMBEDDING_SIZE = 64
CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell]] = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}
Cell = nn.GRUCell | nn.LSTMCell


class EncoderNetwork(nn.Module):
    """Encode each leaf, join the codes, and read policy and value from the layers behind them.

    An image goes through a CNN, categories become one-hot codes, all other numbers stay as they are. Hidden layers
    follow, unless the only leaf is an image, whose encoder ends in one. With memory, policy and value read a recurrent
    cell behind them: what it keeps has been encoded, as in CleanRL's ppo_atari_lstm.py. Initial weights are orthogonal
    (detail 2), those of the cell with gain 1, and biases are zero.
    """

    reads_bytes = True  # images reach it as bytes in training, and as floats from `TorchActing`

    def __init__(self, spaces: Spaces, head_size: int, **layers: Any) -> None:
        """Draw the initial weights from torch's global generator; `layers` may come from `model_kwargs`."""
        super().__init__()
        chosen = Layers(**layers)
        state_dependent_std = chosen.state_dependent_std
        distribution = distribution_of(spaces.actions, state_dependent_std=state_dependent_std)
        free_size = distribution.free_size
        policy_leaves = [name for name in spaces.leaves() if name not in spaces.critic_obs]
        self.body = Body(spaces, chosen, policy_leaves)
        value_body = None if chosen.shared else Body(spaces, chosen, list(spaces.leaves()))
        self.value_body = value_body
        features = self.body.features
        value_features = features if value_body is None else value_body.features
        self.memory = _cell(chosen, features)
        self.value_memory = None if chosen.shared else _cell(chosen, value_features)
        if self.memory is not None:
            features = chosen.memory_size
            value_features = chosen.memory_size
        self.policy = orthogonal(Output(features, head_size - free_size), 0.01)
        self.value = orthogonal(Output(value_features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(free_size)) if free_size else None
        self.state_size = chosen.state_size

    def forward(
        self, obs: Any, state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return head [rows, H] and values [rows]; with memory, head [L, rows, H], values [L, rows], state [rows, S].

        Args:
            obs: a tensor [rows, *O], with memory [L, rows, *O], or a dict of them by the leaf's name.
            state: [rows, S] before the first step.
            starts: [L, rows]; True where the state becomes zero before the step.
        """
        bodies = [self.body] if self.value_body is None else [self.body, self.value_body]
        if state is None or starts is None:
            return self._outputs([body(obs) for body in bodies])
        length, num_rows = starts.shape
        obs_rows = each_leaf(obs, _rows_first)
        cells = [cell for cell in (self.memory, self.value_memory) if cell is not None]
        hidden = []
        new_states = []
        for body, cell, cell_state in zip(
            bodies, cells, state.chunk(len(bodies), dim=1), strict=True
        ):
            codes = body(obs_rows).view(num_rows, length, -1).transpose(0, 1)
            outputs, new_state = over_time(cell, codes, cell_state, starts)
            hidden.append(outputs)
            new_states.append(new_state)
        return *self._outputs(hidden), torch.cat(new_states, dim=1)

    def _outputs(self, hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return head and values; `hidden` are the features of the policy and of the value, or one for both."""
        head = self.policy(hidden[0])
        if self.log_std is not None:
            log_std = self.log_std.expand(*head.shape[:-1], -1)
            head = torch.cat([head, log_std], dim=-1)
        return head, self.value(hidden[-1]).squeeze(-1)


class Body(nn.Module):
    """The encoder of each leaf, and the hidden layers that read all codes side by side."""

    def __init__(self, spaces: Spaces, layers: Layers, names: Sequence[str]) -> None:
        """Encode the leaves of these `names`."""
        super().__init__()
        self._names = names
        encoders = [encoder_of(spaces, name, layers) for name in self._names]
        self.encoders = nn.ModuleList(encoders)
        width = sum(encoder.features for encoder in encoders)
        is_image_alone = len(encoders) == 1 and isinstance(encoders[0], CNN)
        hidden_sizes = () if is_image_alone else layers.hidden_sizes
        hidden: list[nn.Module] = []
        for inputs, units in pairwise((width, *hidden_sizes)):
            hidden.append(orthogonal(nn.Linear(inputs, units), SQRT2))
            if layers.layer_norm:
                hidden.append(nn.LayerNorm(units))
            hidden.append(ACTIVATIONS[layers.activation]())
        self.hidden = nn.Sequential(*hidden)
        self.features = hidden_sizes[-1] if hidden_sizes else width

    def forward(self, obs: Any) -> Tensor:
        """Compute features [rows, F]."""
        if isinstance(obs, Tensor):
            codes: Tensor = self.encoders[0](obs)
        else:
            encoders = zip(self._names, self.encoders, strict=True)
            codes = torch.cat([encoder(obs[name]) for name, encoder in encoders], dim=1)
        return self.hidden(codes)


def _rows_first(leaf: Tensor) -> Tensor:
    """Return a leaf [L, rows, ...] as [rows * L, ...], sequence by sequence, as in a batch."""
    return leaf.transpose(0, 1).flatten(0, 1)


def _cell(layers: Layers, features: int) -> Cell | None:
    """Return the cell with orthogonal weights and zero biases; None without memory."""
    if layers.memory == "none":
        return None
    cell = CELLS[layers.memory](features, layers.memory_size)
    for name, parameter in cell.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return cell


class Output(nn.Linear):
    """A last layer: in the precision of its weights, also where the layers before it run in bfloat16.

    bfloat16 has three digits, too few for values and for the mean of a narrow Gaussian.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the outputs [rows, n] of `hidden` [rows, features]."""
        if autocast_dtype_on(hidden.device) is None:
            return layer_forward(self, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return layer_forward(self, hidden.to(self.weight.dtype))


class Flatten(nn.Module):
    """All numbers of a leaf, side by side; those of an image divided by 255."""

    def __init__(self, shape: tuple[int, ...], divisor: float | None = None) -> None:
        super().__init__()
        self.features = math.prod(shape)
        self._divisor = divisor

    def forward(self, leaf: Tensor) -> Tensor:
        """Encode a leaf [rows, *shape] as [rows, features]."""
        flat = leaf.reshape(leaf.shape[0], -1)
        if self._divisor is None:
            return flat
        return flat / self._divisor


class OneHot(nn.Module):
    """A column for each category of each element: 1 where the element has it, 0 elsewhere."""

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        elements: list[int] = []
        numbers: list[float] = []
        for element, (start, count) in enumerate(
            zip(categories.starts, categories.counts, strict=True)
        ):
            elements += [element] * count
            numbers += [float(start + c) for c in range(count)]
        self.element = nn.Buffer(torch.tensor(elements))
        self.category = nn.Buffer(torch.tensor(numbers))
        self.features = len(elements)

    def forward(self, leaf: Tensor) -> Tensor:
        """Encode a leaf [rows, *shape] as [rows, features]."""
        numbers = leaf.reshape(leaf.shape[0], -1).index_select(1, self.element)
        return (numbers == self.category).to(leaf.dtype)


class Embedding(nn.Module):
    """A learned vector for each category of each element."""

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        starts = torch.tensor(categories.starts)
        counts = torch.tensor(categories.counts)
        self.first = nn.Buffer(starts)
        self.last = nn.Buffer(starts + counts - 1)
        self.shift = nn.Buffer(counts.cumsum(0) - counts - starts)
        self.table = nn.Embedding(sum(categories.counts), EMBEDDING_SIZE)
        self.features = EMBEDDING_SIZE * len(categories.counts)

    def forward(self, leaf: Tensor) -> Tensor:
        """Encode a leaf [rows, *shape] as [rows, features]."""
        category = leaf.reshape(leaf.shape[0], -1).long().clamp(self.first, self.last)
        return self.table(category + self.shift).flatten(1)


# turns one leaf [rows, *shape] into features [rows, F]
Encoder = CNN | Flatten | OneHot | Embedding


def encoder_of(spaces: Spaces, name: str, layers: Layers) -> Encoder:
    leaf = spaces.leaves()[name]
    if name in spaces.categories:
        categories = spaces.categories[name]
        if is_one_hot(categories):
            return OneHot(categories)
        return Embedding(categories)
    if not is_image(leaf):
        return Flatten(leaf.shape)
    if layers.image_encoder in CNNS:
        return CNNS[layers.image_encoder](leaf.shape, layers.image_features)
    return Flatten(leaf.shape, 255.0)
