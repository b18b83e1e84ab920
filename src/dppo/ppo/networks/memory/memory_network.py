"""The network with memory: encoders and hidden layers, a GRU or an LSTM, then policy and value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dppo.ppo.distributions import distribution_of
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.encoders.encoder_network import Body
from dppo.ppo.networks.encoders.encoders import encoder_of, orthogonal
from dppo.ppo.networks.encoders.layers import Output
from dppo.ppo.networks.memory.cells import STATES
from dppo.ppo.networks.memory.recurrence import over_time
from dppo.spaces.spaces import Spaces

CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell]] = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}


class MemoryNetwork(nn.Module):
    """Read policy and value from the outputs of a recurrent cell behind encoders and hidden layers.

    The order is that of CleanRL's ppo_atari_lstm.py: what the cell keeps has been encoded. So are the initial weights:
    orthogonal, those of the cell with gain 1, and zero biases. Policy and value share all layers but the last, or have
    a body and a cell each.
    """

    reads_bytes = True  # as of `EncoderNetwork`

    def __init__(
        self,
        spaces: Spaces,
        head_size: int,
        *,
        memory: str = "gru",
        memory_size: int = 64,
        shared: bool = True,
        state_dependent_std: bool = False,
        **layers: Any,
    ) -> None:
        """Draw the initial weights from torch's global generator.

        Args:
            shared: whether policy and value have all layers in common but the last.
            layers: arguments of `body_of`.
        """
        super().__init__()
        free = distribution_of(spaces.actions, state_dependent_std=state_dependent_std).free_size
        self.body = body_of(spaces, **layers)
        self.value_body = None if shared else body_of(spaces, **layers)
        self.memory = orthogonal_cell(CELLS[memory](self.body.features, memory_size))
        self.value_memory = None if shared else orthogonal_cell(CELLS[memory](self.body.features, memory_size))
        self.policy = orthogonal(Output(memory_size, head_size - free), 0.01)
        self.value = orthogonal(Output(memory_size, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(free)) if free else None
        self.state_size = STATES[memory] * memory_size * (1 if shared else 2)

    def forward(self, obs: Any, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return head [L, rows, H], values [L, rows] and state [rows, S].

        Args:
            obs: a tensor [L, rows, *O], or a dict of them by the leaf's name.
            state: [rows, S] before the first step.
            starts: [L, rows]; True where the state becomes zero before the step.
        """
        rows = each_leaf(obs, lambda leaf: leaf.transpose(0, 1).flatten(0, 1))  # [rows * L, ...], as a batch holds them
        states = state.chunk(1 if self.value_memory is None else 2, dim=1)
        hidden, state = _remembered(self.body, self.memory, rows, states[0], starts)
        head = self.policy(hidden)
        if self.log_std is not None:
            head = torch.cat([head, self.log_std.expand(*head.shape[:2], -1)], dim=2)
        if self.value_body is not None and self.value_memory is not None:
            hidden, of_value = _remembered(self.value_body, self.value_memory, rows, states[1], starts)
            state = torch.cat([state, of_value], dim=1)
        return head, self.value(hidden).squeeze(2), state


def body_of(
    spaces: Spaces,
    *,
    image_encoder: str = "nature",
    image_features: int = 512,
    hidden_sizes: Iterable[int] = (64, 64),
    activation: str = "tanh",
    layer_norm: bool = False,
) -> Body:
    """Return what is in front of the cell; arguments as those of `EncoderNetwork`."""
    encoders = [encoder_of(spaces, name, image_encoder, image_features) for name in spaces.leaves()]
    return Body(encoders, list(spaces.leaves()), tuple(hidden_sizes), activation, layer_norm=layer_norm)


def orthogonal_cell(cell: nn.GRUCell | nn.LSTMCell) -> nn.GRUCell | nn.LSTMCell:
    """Return `cell` with orthogonal weights and zero biases, drawn from torch's global generator."""
    for weight in (cell.weight_ih, cell.weight_hh):
        nn.init.orthogonal_(weight)
    for bias in (cell.bias_ih, cell.bias_hh):
        nn.init.zeros_(bias)
    return cell


def _remembered(
    body: Body, cell: nn.GRUCell | nn.LSTMCell, rows: Any, state: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode all rows at once, and run the cell over them: outputs [L, rows, H], and the state after them."""
    length, count = starts.shape
    features = body(rows).view(count, length, body.features).transpose(0, 1)
    return over_time(cell, features, state, starts)
