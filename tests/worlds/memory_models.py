"""Users' modules with memory: one keeps the contract, and each of the others breaks one part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dppo
from worlds.models import Plain


class Running(nn.Module):
    """Remembers an average of what it has seen, step by step in plain torch; reads a Dict or a single array."""

    def __init__(self, spaces: dppo.Spaces, head_size: int, units: int = 8) -> None:
        super().__init__()
        inputs = sum(int(torch.Size(leaf.shape).numel()) for leaf in spaces.leaves().values())
        self.inputs = nn.Linear(inputs, units)
        self.keep = nn.Parameter(torch.zeros(units))
        self.outputs = nn.Linear(2 * units, head_size + 1)
        self.state_size: Any = units

    def forward(self, obs: Any, state: Tensor, starts: Tensor) -> Any:
        leaves = obs.values() if isinstance(obs, dict) else [obs]
        flat = [leaf.reshape(*starts.shape, -1) for leaf in leaves]
        features = self.inputs(torch.cat(flat, dim=2)).tanh()
        keep = self.keep.sigmoid()
        states = []
        for now, start in zip(features, starts, strict=True):
            before = self.before(state, start)
            state = keep * before + (1 - keep) * now
            states.append(state)
        inputs = torch.cat([features, torch.stack(states)], dim=2)
        outputs = self.outputs(inputs)
        head = outputs[..., :-1]
        values = outputs[..., -1]
        return self.returned(head, values, states)

    def returned(self, head: Tensor, values: Tensor, states: list[Tensor]) -> Any:
        return head, values, states[-1]

    def before(self, state: Tensor, start: Tensor) -> Tensor:
        return torch.where(start.unsqueeze(1), 0.0, state)


class NeverStarts(Running):
    def before(self, state: Tensor, start: Tensor) -> Tensor:
        return state


class FirstState(Running):
    def forward(self, obs: Any, state: Tensor, starts: Tensor) -> Any:
        head, values, _ = super().forward(obs, state, starts)
        return head, values, state * 1.0


class Backward(Running):
    """Reads the sequence from its end."""

    def returned(self, head: Tensor, values: Tensor, states: list[Tensor]) -> Any:
        return head.flip(0), values, states[-1]


class NoState(Running):
    def returned(self, head: Tensor, values: Tensor, states: list[Tensor]) -> Any:
        return head, values


class WideState(Running):
    def returned(self, head: Tensor, values: Tensor, states: list[Tensor]) -> Any:
        return head, values, states[-1].repeat(1, 2)


class MeanState(Running):
    def before(self, state: Tensor, start: Tensor) -> Tensor:
        return super().before(state, start).mean(dim=0, keepdim=True).expand_as(state)


class OddSize(Running):
    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.state_size = (8,)


class OneStep(Plain):
    """Says that it has memory, but takes observations alone."""

    state_size = 4
