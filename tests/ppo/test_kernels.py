"""Hand-written kernels against their plain twins: one table of outputs and gradients, and what only kernels do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, mlp_of
from torch import Tensor, nn
from updates import gradient_of, load_random

from dppo.ppo.kernels.calls import without_call_overhead
from dppo.ppo.kernels.convolutions import Dense, PixelConv
from dppo.ppo.kernels.linear_layers import linear, use_in
from dppo.ppo.kernels.mlp import HandwrittenMLP
from dppo.ppo.kernels.products import multiply, tanh_
from dppo.ppo.kernels.recurrence import over_time, over_time_in_torch
from dppo.ppo.networks.encoders import CELLS
from dppo.ppo.networks.layers import NUM_STATE_VECTORS
from dppo.ppo.networks.modules import Autograd
from dppo.spaces.actions import Actions
from dppo.spaces.spaces import Spaces

Results = list[Any]
Pair = Callable[[], tuple[Results, Results]]
"""Compute outputs and gradients with a kernel, and with its twin."""


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return tensors of float64 that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def with_gradients(
    function: Callable[..., Any], inputs: list[Tensor], parameters: list[nn.Parameter]
) -> Results:
    """Return the outputs of `function`, and the gradients of all inputs and parameters for a random loss."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grad_outputs = [
        output.detach() for output in tensors(*(output.shape for output in outputs), seed=1)
    ]
    leaves = [*inputs, *parameters]
    return [
        *outputs,
        *torch.autograd.grad(outputs, leaves, [by.to(outputs[0].dtype) for by in grad_outputs]),
    ]


def modules(
    kernel: nn.Module, twin: nn.Module, *shapes: tuple[int, ...]
) -> tuple[Results, Results]:
    """Compare two modules of equal structure."""
    twin.load_state_dict(kernel.state_dict())
    inputs = tensors(*shapes)
    return tuple(
        with_gradients(module, inputs, list(module.parameters())) for module in (kernel, twin)
    )  # type: ignore[return-value]


def products(rows: int, num_threads: int) -> tuple[Results, Results]:
    a, b = (tensor.detach() for tensor in tensors((rows, 200), (200, 300)))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    whole = torch.zeros(rows, 301, dtype=torch.float64)
    results = [
        multiply(a, b, torch.empty(rows, 300, dtype=torch.float64)),
        multiply(a, b, whole[:, 1:]),
    ]
    results += [linear(a, b.t(), None), tanh_(a.clone())]
    torch.set_num_threads(before)
    return results, [a @ b, a @ b, a @ b, a.tanh()]


def linear_layer(bias: bool) -> tuple[Results, Results]:
    weights = tensors((4, 7, 5), (3, 5), *([(3,)] if bias else []))

    def run(function: Callable[..., Tensor]) -> Results:
        return with_gradients(
            lambda inputs, weight, bias=None: function(inputs, weight, bias), weights, []
        )

    return run(linear), run(nn.functional.linear)


def chain(activation: type[nn.Module], ends_with_it: bool, *axes: int) -> tuple[Results, Results]:
    layers = [nn.Linear(5, 4), activation(), nn.Linear(4, 4), nn.Linear(4, 3)]
    plain = nn.Sequential(*layers, *([activation()] if ends_with_it else [])).double()
    kernel = copy.deepcopy(plain)
    use_in(kernel)
    # a copy computes alike, as user code may make one
    return modules(copy.deepcopy(kernel), plain, (*axes, 7, 5))


def handwritten_mlp(
    actions: Actions, hidden_sizes: tuple[int, ...], activation: str
) -> tuple[Results, Results]:
    spec = mlp_of(
        Spaces(np.dtype((np.float32, (2, 2))), actions), hidden_sizes, activation, "float64"
    )
    plain = spec.mlp(1)
    kernel = HandwrittenMLP(spec.mlp(1))
    twin = Autograd(plain, spec.ordered_parameters(plain))
    obs = torch.randn(9, 2, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    for network in (kernel, twin):
        load_random(network, spec)
        # 5: two sizes take turns
        pieces = [gradient_of(network, *obs.split(size)) for size in (9, 3, 5)]
        results.append([output.clone() for output in network.forward(obs)[:2]] + pieces)
    return results[0], results[1]


def recurrent_cell(kind: str, length: int, share_of_starts: float) -> tuple[Results, Results]:
    torch.manual_seed(0)
    cell = CELLS[kind](5, 6).double()
    starts = torch.rand((length, 4), generator=torch.Generator().manual_seed(1)) < share_of_starts
    inputs = tensors((length, 4, 5), (4, NUM_STATE_VECTORS[kind] * 6))

    def run(function: Callable[..., Any]) -> Results:
        return with_gradients(
            lambda *arguments: function(cell, *arguments, starts), inputs, list(cell.parameters())
        )

    return run(over_time), run(over_time_in_torch)


def pixel_convolution(
    kernel_size: Any, stride: int, padding: int, shape: tuple[int, ...] = (3, 20, 24)
) -> tuple[Results, Results]:
    kernel = PixelConv(shape[0], 5, kernel_size, stride=stride, padding=padding)
    twin = nn.Conv2d(shape[0], 5, kernel_size, stride=stride, padding=padding)
    twin.load_state_dict(kernel.state_dict())
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, *shape), generator=generator, dtype=torch.uint8)
    of_twin = with_gradients(lambda: twin(pixels / 255), [], list(twin.parameters()))
    channels_last = pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    results: Results = []
    for image in (pixels, channels_last):
        results += with_gradients(lambda: kernel(image), [], list(kernel.parameters()))  # noqa: B023
    return results, 2 * of_twin


def dense() -> tuple[Results, Results]:
    kernel = Dense(64, 7)
    twin = nn.Linear(64, 7)
    twin.load_state_dict(kernel.state_dict())
    code = tensors((9, 64))[0].detach().float().requires_grad_()
    return tuple(
        with_gradients(module, [code], list(module.parameters())) for module in (kernel, twin)
    )  # type: ignore[return-value]


def quick_module() -> tuple[Results, Results]:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    return modules(without_call_overhead(copy.deepcopy(plain)), plain, (3, 4))


EXACT = 1e-11
SINGLE = 2e-5
KERNELS: dict[str, tuple[Pair, float]] = {
    "products of one thread": (partial(products, 8, 2), EXACT),
    "products of two threads": (partial(products, 400, 2), EXACT),
    "linear": (partial(linear_layer, bias=True), EXACT),
    "linear without bias": (partial(linear_layer, bias=False), EXACT),
    "module without call overhead": (quick_module, EXACT),
    "chain over three axes": (partial(chain, nn.Tanh, True, 2), EXACT),
    "dense layer": (dense, SINGLE),
    "pixels in blocks": (partial(pixel_convolution, 8, 4, 0), SINGLE),
    "pixels of one channel in wide blocks": (
        partial(pixel_convolution, (4, 12), 4, 0, (1, 20, 24)),
        SINGLE,
    ),
    "four channels in blocks": (partial(pixel_convolution, 8, 4, 0, (4, 20, 24)), SINGLE),
    "pixels": (partial(pixel_convolution, 3, 1, 1), SINGLE),
}
for _activation, _ends in itertools.product((nn.Tanh, nn.ReLU), (False, True)):
    KERNELS[f"chain of {_activation.__name__} {_ends}"] = (
        partial(chain, _activation, _ends),
        EXACT,
    )
for _name, _actions in {"discrete": DISCRETE, "box": BOX}.items():
    for _sizes, _kind in itertools.product(((), (32,), (64, 64, 16)), ("tanh", "relu")):
        KERNELS[f"{_kind} mlp {_sizes} {_name}"] = (
            partial(handwritten_mlp, _actions, _sizes, _kind),
            EXACT,
        )
for _kind, _length, _share in itertools.product(("gru", "lstm"), (1, 7), (0.0, 0.3, 1.0)):
    KERNELS[f"{_kind} over {_length} steps, {_share} starts"] = (
        partial(recurrent_cell, _kind, _length, _share),
        EXACT,
    )


@pytest.mark.proves("_LSTM", "_GRU")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_its_plain_twin(kernel: str) -> None:
    compute, tolerance = KERNELS[kernel]
    results, expected = compute()
    assert len(results) == len(expected)
    for result, twin in zip(results, expected, strict=True):
        array, twin_array = (
            value.detach() if isinstance(value, Tensor) else value for value in (result, twin)
        )
        np.testing.assert_allclose(array, twin_array, rtol=tolerance, atol=tolerance)


def test_a_gradient_of_a_gradient_goes_through_a_chain() -> None:
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    kernel = copy.deepcopy(plain)
    use_in(kernel)
    inputs = torch.randn(7, 5, dtype=torch.float64)
    second = []
    for module in (kernel, plain):
        weight = next(module.parameters())
        gradient = torch.autograd.grad(module(inputs).square().sum(), weight, create_graph=True)[0]
        second.append(torch.autograd.grad(gradient.square().sum(), weight)[0])
    torch.testing.assert_close(*second)


def test_a_chain_notices_that_an_array_that_it_needs_has_changed() -> None:
    kernel = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    use_in(kernel)
    outputs = kernel(torch.ones(1, 2))
    outputs.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_the_bias_of_a_layer_with_frozen_weights_is_learned() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    use_in(layer)
    layer(torch.ones(4, 3)).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [4.0, 4.0]


def test_other_dtypes_are_left_to_torch() -> None:
    layer = nn.Linear(2, 3).half()
    assert linear(torch.ones(4, 2).half(), layer.weight, layer.bias).dtype == torch.float16


class Doubled(nn.GRUCell):
    def forward(self, *inputs: Any) -> Any:
        return 2 * super().forward(*inputs)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (nn.Linear(2, 2), r"Pass an nn\.GRUCell or an nn\.LSTMCell with biases"),
        (nn.GRUCell(2, 2, bias=False), r"Pass an nn\.GRUCell or an nn\.LSTMCell with biases"),
        (Doubled(2, 2), r"which has hooks or its own forward\(\)"),
    ],
)
def test_a_cell_without_a_kernel_or_that_does_more_is_refused(cell: Any, words: str) -> None:
    starts = torch.zeros((1, 1), dtype=torch.bool)
    with pytest.raises(TypeError, match=words):
        over_time(cell, torch.zeros(1, 1, 2), torch.zeros(1, 4), starts)


def test_the_recurrence_is_not_computed_in_lower_precision() -> None:
    cell = nn.GRUCell(5, 6)
    state = torch.zeros(2, 6)
    starts = torch.zeros((3, 2), dtype=torch.bool)
    inputs = torch.randn(3, 2, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = over_time(cell, inputs, state, starts)
    assert (outputs.dtype, last.dtype) == (torch.float32, torch.float32)
    expected, _ = over_time(cell, inputs.float(), state, starts)
    assert torch.equal(outputs, expected)
