"""Recurrent cells over sequences, against torch's cells one step at a time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dppo.ppo.kernels.acting import NumpyCells
from dppo.ppo.kernels.recurrence import over_time
from dppo.ppo.networks.encoders import CELLS
from dppo.ppo.networks.layers import NUM_STATE_VECTORS

INPUTS, UNITS = 5, 6
kinds = pytest.mark.parametrize("kind", ["gru", "lstm"])


def cell_of(kind: str, seed: int = 0) -> nn.GRUCell | nn.LSTMCell:
    torch.manual_seed(seed)
    return CELLS[kind](INPUTS, UNITS).double()


def slowly(cell: nn.GRUCell | nn.LSTMCell, inputs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Run the cell step by step and row by row."""
    outputs = torch.empty(*inputs.shape[:2], UNITS, dtype=inputs.dtype)
    last = []
    for row in range(inputs.shape[1]):
        before = state[row]
        for t in range(inputs.shape[0]):
            if starts[t, row]:
                before = before * 0
            if isinstance(cell, nn.LSTMCell):
                before = torch.cat(cell(inputs[t, row], (before[:UNITS], before[UNITS:])))
            else:
                before = cell(inputs[t, row], before)
            outputs = outputs.index_put((torch.tensor(t), torch.tensor(row)), before[:UNITS])
        last.append(before)
    return outputs, torch.stack(last)


@pytest.mark.proves("_LSTM", "_GRU")
@kinds
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("ends", ["none", "some", "all"])
def test_outputs_and_gradients_are_those_of_torchs_cell_step_by_step(kind: str, length: int, ends: str) -> None:
    """Compare every input's gradient, with episodes that start inside the sequences."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand((length, 4), generator=generator) < {"none": 0.0, "some": 0.3, "all": 1.0}[ends]
    shapes = (
        (length, 4, INPUTS),
        (4, NUM_STATE_VECTORS[kind] * UNITS),
        (length, 4, UNITS),
        (4, NUM_STATE_VECTORS[kind] * UNITS),
    )
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found = []
    for run in (over_time, slowly):
        cell = cell_of(kind)
        inputs, state = (one.clone().requires_grad_() for one in drawn[:2])
        outputs, last = run(cell, inputs, state, starts)
        ((outputs * drawn[2]).sum() + (last * drawn[3]).sum()).backward()
        gradients = [inputs.grad, state.grad, *(parameter.grad for parameter in cell.parameters())]
        found.append([outputs, last, *gradients])
    for one, twin in zip(*found, strict=True):
        assert one is not None
        assert twin is not None
        np.testing.assert_allclose(one.detach(), twin.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell", [nn.Linear(2, 2), nn.RNNCell(2, 2), nn.GRUCell(2, 2, bias=False)])
def test_other_cells_are_refused(cell: nn.Module) -> None:
    given: Any = cell
    with pytest.raises(TypeError, match=r"Pass an nn\.GRUCell or an nn\.LSTMCell with biases"):
        over_time(given, torch.zeros(1, 1, 2), torch.zeros(1, 2), torch.zeros((1, 1), dtype=torch.bool))


def test_a_cell_that_does_more_when_it_is_called_is_refused() -> None:
    class Own(nn.GRUCell):
        def forward(self, *given: Any) -> Any:
            return 2 * super().forward(*given)

    hooked = nn.LSTMCell(2, 2)
    hooked.register_forward_hook(lambda _, __, output: output)
    for cell in (Own(2, 2), hooked):
        with pytest.raises(TypeError, match=r"which has hooks or its own forward\(\)\. Call it step by step\."):
            over_time(cell, torch.zeros(1, 1, 2), torch.zeros(1, 4), torch.zeros((1, 1), dtype=torch.bool))


def test_the_recurrence_is_not_computed_in_lower_precision() -> None:
    cell = nn.GRUCell(INPUTS, UNITS)
    state, starts = torch.zeros(2, UNITS), torch.zeros((3, 2), dtype=torch.bool)
    inputs = torch.randn(3, 2, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = over_time(cell, inputs.bfloat16(), state, starts)
    assert (outputs.dtype, last.dtype) == (torch.float32, torch.float32)
    expected, _ = over_time(cell, inputs.bfloat16().float(), state, starts)
    assert torch.equal(outputs, expected)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cells_in_numpy_are_those_of_torch(kind: str, dtype: str) -> None:
    """Compare two cells side by side, with gates far into saturation."""
    cells = [cell_of(kind, seed).to(getattr(torch, dtype)) for seed in range(2)]
    side_by_side = NumpyCells(
        kind, [{name: one.detach().numpy() for name, one in cell.named_parameters()} for cell in cells]
    )
    rng = np.random.default_rng(0)
    inputs = (rng.normal(size=(2, 4, INPUTS)) * np.array([1, 3, 30, 100])[:, None]).astype(dtype)
    state = rng.normal(size=(2, 4, NUM_STATE_VECTORS[kind] * UNITS)).astype(dtype)
    outputs, after = side_by_side.step(inputs, state)
    tolerance = {"float32": 1e-6, "float64": 1e-14}[dtype]
    for k, cell in enumerate(cells):
        x, before = torch.from_numpy(inputs[k]), torch.from_numpy(state[k])
        expected = torch.cat(cell(x, before.chunk(2, dim=1)), dim=1) if kind == "lstm" else cell(x, before)
        np.testing.assert_allclose(after[k], expected.detach(), atol=tolerance)
        np.testing.assert_array_equal(outputs[k], after[k][:, :UNITS])
    assert (str(outputs.dtype), str(after.dtype)) == (dtype, dtype)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stacked_cells_have_the_bits_of_single_ones(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for inputs_size, units, k in itertools.product((1, 5, 64), (1, 7, 64, 128), (1, 2)):
        gates = {"gru": 3, "lstm": 4}[kind] * units
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (gates, inputs_size), "weight_hh": (gates, units)}
        shapes |= {"bias_ih": (gates,), "bias_hh": (gates,)}
        cells = NumpyCells(
            kind, [{name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()} for _ in range(k)]
        )
        for rows in (1, 2, 5, 16):
            inputs = rng.normal(size=(8, k, rows, inputs_size)).astype(dtype)
            state = rng.normal(size=(8, k, rows, NUM_STATE_VECTORS[kind] * units)).astype(dtype)
            outputs, after = cells.step(inputs, state)
            before = state.copy()
            for s in range(8):
                alone = cells.step(inputs[s], state[s])
                np.testing.assert_array_equal(outputs[s], alone[0])
                np.testing.assert_array_equal(after[s], alone[1])
            np.testing.assert_array_equal(state, before)
