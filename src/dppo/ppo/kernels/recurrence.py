"""Run a GRU or an LSTM cell over sequences in which episodes start, with gradients written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dppo.ppo.kernels.linear_layers import has_hooks, linear
from dppo.ppo.kernels.products import multiply

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float


def over_time(
    cell: nn.GRUCell | nn.LSTMCell,
    inputs: Float[Tensor, "L rows I"],
    state: Float[Tensor, "rows S"],
    starts: Bool[Tensor, "L rows"],
) -> tuple[Float[Tensor, "L rows H"], Float[Tensor, "rows S"]]:
    """Return the outputs of `cell` at each step, and the state after the last one.

    All products with the inputs are one, so that only the recurrence itself goes step by step. Its gradient is written
    by hand, which takes a third of the time of autograd's.

    Args:
        cell: with biases, as is torch's default.
        state: before the first step: h of a GRU, S = H; h and c of an LSTM side by side, S = 2 H.
        starts: True where the state becomes zero before the step, because an episode starts there.

    Raise TypeError if `cell` is neither an `nn.GRUCell` nor an `nn.LSTMCell` with biases, or has hooks or its own
    `forward`.
    """
    if not isinstance(cell, nn.GRUCell | nn.LSTMCell) or not cell.bias:
        raise TypeError(
            f"over_time() was given {cell!r}. Pass an nn.GRUCell or an nn.LSTMCell with biases."
        )
    is_plain = type(cell).forward in (nn.GRUCell.forward, nn.LSTMCell.forward)
    if not is_plain or "forward" in cell.__dict__ or has_hooks(cell):
        raise TypeError(
            f"over_time() does not call {cell!r}, which has hooks or its own forward(). Call it step by step."
        )
    # an exporter follows operations of torch, not gradients by hand
    if torch.compiler.is_compiling():
        return over_time_in_torch(cell, inputs, state, starts)
    # rounding errors of a recurrence would add up
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = cell.weight_hh.dtype
        with torch.autocast(inputs.device.type, enabled=False):
            return over_time(cell, inputs.to(dtype), state.to(dtype), starts)
    if isinstance(cell, nn.GRUCell):
        gates = linear(inputs, cell.weight_ih, cell.bias_ih)
        outputs: Tensor = _GRU.apply(gates, cell.weight_hh, cell.bias_hh, state, starts)  # type: ignore[no-untyped-call]
        return outputs, outputs[-1]
    gates = linear(inputs, cell.weight_ih, cell.bias_ih + cell.bias_hh)
    h, c = state.chunk(2, dim=1)
    outputs, last_c = _LSTM.apply(gates, cell.weight_hh, h, c, starts)  # type: ignore[no-untyped-call]
    return outputs, torch.cat([outputs[-1], last_c], dim=1)


def over_time_in_torch(
    cell: nn.GRUCell | nn.LSTMCell, inputs: Tensor, state: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Do as `over_time`, by calling the cell step by step: the plain twin, and what exporters see."""
    outputs = []
    for x, start in zip(inputs, starts, strict=True):
        state = torch.where(start.unsqueeze(1), 0.0, state)
        if isinstance(cell, nn.GRUCell):
            state = cell(x, state)
            outputs.append(state)
        else:
            h, c = cell(x, state.chunk(2, dim=1))
            state = torch.cat([h, c], dim=1)
            outputs.append(h)
    return torch.stack(outputs), state


class _Resets(NamedTuple):
    """Steps at which states become zero."""

    at_step: list[bool]
    """True where an episode of any row starts; the other steps need no product."""
    factors: Tensor
    """[L, rows, 1]: zero where an episode starts, one elsewhere."""

    @staticmethod
    def of(starts: Tensor, dtype: torch.dtype) -> _Resets:
        at_step = starts.any(dim=1).tolist()
        factors = (~starts).to(dtype).unsqueeze(2)
        return _Resets(at_step, factors)


class _LSTM(Function):
    """c' = f c + i g, h' = o tanh(c') with i, f, o = sigmoid and g = tanh of their gates, x W_i + h W_h + b.

    Source: Hochreiter, Schmidhuber (1997) with forget gates; torch.nn.LSTMCell, whose order of gates is i, f, g, o.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return h of each step [L, rows, H] and the last c [rows, H]; `gates` [L, rows, 4H] hold x W_i + b."""
        size = h.shape[1]
        gates = gates.clone(memory_format=torch.contiguous_format)
        resets = _Resets.of(starts, gates.dtype)
        length, rows, _ = gates.shape
        h_before = gates.new_empty(length, rows, size)
        c_before = gates.new_empty(length, rows, size)
        tanh_c = gates.new_empty(length, rows, size)
        outputs = gates.new_empty(length, rows, size)
        transposed = weight.t()
        h_part = torch.empty_like(gates[0])
        for t, is_reset in enumerate(resets.at_step):
            if is_reset:
                h = h * resets.factors[t]
                c = c * resets.factors[t]
            h_before[t] = h
            c_before[t] = c
            step_gates = gates[t]
            step_gates.add_(multiply(h, transposed, h_part))
            step_gates[:, : 2 * size].sigmoid_()
            step_gates[:, 2 * size : 3 * size].tanh_()
            step_gates[:, 3 * size :].sigmoid_()
            i, f, g, o = step_gates.chunk(4, dim=1)
            c = torch.addcmul(f * c, i, g)
            h = torch.mul(o, torch.tanh(c, out=tanh_c[t]), out=outputs[t])
        ctx.save_for_backward(gates, h_before, c_before, tanh_c, weight, resets.factors)
        ctx.is_reset = resets.at_step
        return outputs, c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of gates, weight, h and c.

        dL/dgate = dL/dc (or, for o, dL/dh) times a factor that does not depend on the recurrence.
        """
        grad_outputs, grad_c = gradients
        gates, h_before, c_before, tanh_c, weight, reset_factors = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, dim=2)
        factors = torch.cat(
            [g * i * (1 - i), c_before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], dim=2
        )
        dh_dc = o * (1 - tanh_c * tanh_c)
        length, rows, size = h_before.shape
        grad_gates = torch.empty_like(gates)
        grad_h = torch.zeros_like(grad_c)
        for t in reversed(range(length)):
            grad_h = grad_h + grad_outputs[t]
            grad_c = torch.addcmul(grad_c, grad_h, dh_dc[t])
            grad_step_gates = grad_gates[t].view(rows, 4, size)
            step_factors = factors[t].view(rows, 4, size)
            torch.mul(grad_c.unsqueeze(1), step_factors[:, :3], out=grad_step_gates[:, :3])
            torch.mul(grad_h, step_factors[:, 3], out=grad_step_gates[:, 3])
            grad_h = multiply(grad_gates[t], weight, torch.empty_like(grad_h))
            grad_c = grad_c * f[t]
            if ctx.is_reset[t]:
                grad_h = grad_h * reset_factors[t]
                grad_c = grad_c * reset_factors[t]
        grad_weight = multiply(
            grad_gates.flatten(0, 1).t(), h_before.flatten(0, 1), torch.empty_like(weight)
        )
        return grad_gates, grad_weight, grad_h, grad_c, None


class _GRU(Function):
    """h' = n + z (h - n) with r, z = sigmoid of their gates, and n = tanh(x W_in + b_in + r (h W_hn + b_hn)).

    Source: Cho et al., arXiv:1406.1078; torch.nn.GRUCell, whose order of gates is r, z, n.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor, h: Tensor, starts: Tensor
    ) -> Tensor:
        """Return h of each step [L, rows, H]; `gates` [L, rows, 3H] hold x W_i + b_i."""
        size = h.shape[1]
        gates = gates.clone(memory_format=torch.contiguous_format)
        resets = _Resets.of(starts, gates.dtype)
        length, rows, _ = gates.shape
        h_before = gates.new_empty(length, rows, size)
        hidden_n = gates.new_empty(length, rows, size)
        outputs = gates.new_empty(length, rows, size)
        transposed = weight.t()
        for t, is_reset in enumerate(resets.at_step):
            if is_reset:
                h = h * resets.factors[t]
            h_before[t] = h
            hidden = multiply(h, transposed, torch.empty_like(gates[t]))
            hidden.add_(bias)
            hidden_n[t] = hidden[:, 2 * size :]
            rz = gates[t, :, : 2 * size]
            rz.add_(hidden[:, : 2 * size]).sigmoid_()
            n = gates[t, :, 2 * size :]
            n.addcmul_(rz[:, :size], hidden_n[t]).tanh_()
            h = torch.addcmul(n, rz[:, size:], h - n, out=outputs[t])
        ctx.save_for_backward(gates, h_before, hidden_n, weight, resets.factors)
        ctx.is_reset = resets.at_step
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of gates, weight, bias and h; each gate's is dL/dh times a factor."""
        (grad_outputs,) = gradients
        gates, h_before, hidden_n, weight, reset_factors = ctx.saved_tensors
        r, z, n = gates.chunk(3, dim=2)
        dh_dn_gate = (1 - z) * (1 - n * n)
        factors = torch.cat(
            [dh_dn_gate * hidden_n * r * (1 - r), (h_before - n) * z * (1 - z), dh_dn_gate * r],
            dim=2,
        )
        length, rows, size = h_before.shape
        grad_hidden = torch.empty_like(gates)
        grad_h = torch.zeros_like(grad_outputs[0])
        grad_each_h = torch.empty_like(h_before)
        for t in reversed(range(length)):
            grad_h = torch.add(grad_h, grad_outputs[t], out=grad_each_h[t])
            torch.mul(
                grad_h.unsqueeze(1),
                factors[t].view(rows, 3, size),
                out=grad_hidden[t].view(rows, 3, size),
            )
            grad_h = grad_h * z[t]
            grad_h.add_(multiply(grad_hidden[t], weight, torch.empty_like(grad_h)))
            if ctx.is_reset[t]:
                grad_h = grad_h * reset_factors[t]
        grad_hidden_rows = grad_hidden.flatten(0, 1)
        grad_rz = grad_hidden[..., : 2 * size]
        grad_gates = torch.cat([grad_rz, grad_each_h * dh_dn_gate], dim=2)
        h_rows = h_before.flatten(0, 1)
        grad_weight = multiply(grad_hidden_rows.t(), h_rows, torch.empty_like(weight))
        return grad_gates, grad_weight, grad_hidden_rows.sum(dim=0), grad_h, None
