"""The contract of a user's module with memory, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.user.trial import Trial, close, inputs_in_words, made_up_inputs

STEPS, ROWS = 4, 3  # of the trial pass
OUTPUTS = ("head", "values", "state")


def check_memory(trial: Trial, module: nn.Module, state_size: int) -> None:
    """Run a module with memory on a few random sequences and check its outputs.

    Raises:
        ConfigError: it breaks the trial.
    """
    sequences = _Sequences.of(trial, state_size)

    def run(*pieces: _Sequences) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: _outputs(trial, module, pieces)

    first = sequences.steps(0)
    one, again, alone, in_turn, started, from_zero = trial.passes(
        module,
        [
            run(sequences),
            run(sequences),
            run(sequences.row(1)),
            run(*(sequences.steps(t) for t in range(STEPS))),
            run(_Sequences(first.obs, first.state, torch.ones_like(first.starts))),
            run(_Sequences(first.obs, torch.zeros_like(first.state), torch.zeros_like(first.starts))),
        ],
    )
    for at in range(2):
        trial.check_output(OUTPUTS[at], one[at], again[at], alone[at], one[at][:, 1:2])
    for name, found, expected in zip(OUTPUTS, started, from_zero, strict=True):
        if not close(found, expected):
            raise trial.broken(
                f"its {name} where starts is True differ from those of a state of zeros. Set the state of these rows "
                f"to zero before the step"
            )
    for name, found, expected in zip(OUTPUTS, in_turn, one, strict=True):
        if not close(found, expected):
            raise trial.broken(
                f"its {name} of a sequence differ from those of its steps one after the other, as actors call it. "
                f"Return the state after the last step, and let no step see a later one"
            )


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Arguments of one call."""

    obs: Any
    state: Tensor
    starts: Tensor

    @staticmethod
    def of(trial: Trial, state_size: int) -> _Sequences:
        """Return random sequences of 3 rows, in two of which an episode starts."""
        dtype = getattr(torch, trial.dtype)
        inputs = made_up_inputs(trial.spaces, STEPS * ROWS, dtype)
        state = torch.randn((ROWS, state_size), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        starts = torch.zeros((STEPS, ROWS), dtype=torch.bool)
        starts[0, 1] = starts[2, 2] = True
        return _Sequences(
            each_leaf(inputs, lambda leaf: leaf.view(STEPS, ROWS, *leaf.shape[1:])), state.to(dtype), starts
        )

    def row(self, row: int) -> _Sequences:
        """Return a single row."""
        rows = slice(row, row + 1)
        return _Sequences(each_leaf(self.obs, lambda leaf: leaf[:, rows]), self.state[rows], self.starts[:, rows])

    def steps(self, t: int) -> _Sequences:
        """Return step `t` of all rows."""
        return _Sequences(each_leaf(self.obs, lambda leaf: leaf[t : t + 1]), self.state, self.starts[t : t + 1])


def _outputs(trial: Trial, module: nn.Module, pieces: tuple[_Sequences, ...]) -> tuple[Tensor, ...]:
    """Return head, values and state of successive pieces, each from the state after the one before."""
    heads, values, state = [], [], pieces[0].state
    for piece in pieces:
        called = (
            f"forward(obs, state, starts), with obs {inputs_in_words(piece.obs)}, state of shape "
            f"{tuple(state.shape)} and starts of shape {tuple(piece.starts.shape)},"
        )
        expected = (
            ("head", (*piece.starts.shape, trial.head_size), "[L, rows, head_size]"),
            ("values", tuple(piece.starts.shape), "[L, rows]; values.squeeze(-1) removes a last axis"),
            ("state", tuple(state.shape), "[rows, state_size], after the last step"),
        )
        head, value, state = trial.outputs(module, (piece.obs, state, piece.starts), called, expected)
        heads.append(head)
        values.append(value)
    with torch.enable_grad():
        return torch.cat(heads), torch.cat(values), state
