"""Hand-written kernels against their plain twins: one table of outputs and gradients, and what only kernels do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, mlp_of
from numpy.testing import assert_allclose
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
from dppo.ppo.networks.network import LearningNetwork
from dppo.spaces.actions import Actions
from dppo.spaces.spaces import Spaces

Results = list[Any]
Pair = Callable[[], tuple[Results, Results]]
"""Compute outputs and gradients with a kernel, and with its twin."""


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return tensors of float64 that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for shape in shapes:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn.append(tensor.requires_grad_())
    return drawn


def with_gradients(
    function: Callable[..., Any], inputs: list[Tensor], parameters: list[nn.Parameter]
) -> Results:
    """Return the outputs of `function`, and the gradients of all inputs and parameters for a random loss."""
    outputs = function(*inputs)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    dtype = outputs[0].dtype
    shapes = [output.shape for output in outputs]
    grad_outputs = [tensor.detach().to(dtype) for tensor in tensors(*shapes, seed=1)]

    leaves = [*inputs, *parameters]
    gradients = torch.autograd.grad(outputs, leaves, grad_outputs)
    return [*outputs, *gradients]


def results_of(module: nn.Module, inputs: list[Tensor]) -> Results:
    return with_gradients(module, inputs, list(module.parameters()))


def modules(
    kernel: nn.Module, twin: nn.Module, *shapes: tuple[int, ...]
) -> tuple[Results, Results]:
    """Compare two modules of equal structure."""
    twin.load_state_dict(kernel.state_dict())
    inputs = tensors(*shapes)
    return results_of(kernel, inputs), results_of(twin, inputs)


def products(rows: int, num_threads: int) -> tuple[Results, Results]:
    first, second = tensors((rows, 200), (200, 300))
    a = first.detach()
    b = second.detach()
    separate = torch.empty(rows, 300, dtype=torch.float64)
    whole = torch.zeros(rows, 301, dtype=torch.float64)
    columns = whole[:, 1:]

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    results = [
        multiply(a, b, separate),
        multiply(a, b, columns),
        linear(a, b.t(), None),
        tanh_(a.clone()),
    ]
    torch.set_num_threads(before)

    product = a @ b
    return results, [product, product, product, a.tanh()]


def linear_layer(bias: bool) -> tuple[Results, Results]:
    shapes: list[tuple[int, ...]] = [(4, 7, 5), (3, 5)]
    if bias:
        shapes.append((3,))
    inputs = tensors(*shapes)

    def results(function: Callable[..., Tensor]) -> Results:
        def layer(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return function(rows, weight, bias)

        return with_gradients(layer, inputs, [])

    return results(linear), results(nn.functional.linear)


def chain(activation: type[nn.Module], ends_with_it: bool, *axes: int) -> tuple[Results, Results]:
    plain = nn.Sequential()
    plain.append(nn.Linear(5, 4))
    plain.append(activation())
    plain.append(nn.Linear(4, 4))
    plain.append(nn.Linear(4, 3))
    if ends_with_it:
        plain.append(activation())
    plain.double()

    kernel = copy.deepcopy(plain)
    use_in(kernel)
    # a copy computes alike, as user code may make one
    copied = copy.deepcopy(kernel)
    return modules(copied, plain, (*axes, 7, 5))


def handwritten_mlp(
    actions: Actions, hidden_sizes: tuple[int, ...], activation: str
) -> tuple[Results, Results]:
    obs_dtype = np.dtype((np.float32, (2, 2)))
    spaces = Spaces(obs_dtype, actions)
    spec = mlp_of(spaces, hidden_sizes, activation, "float64")
    kernel = HandwrittenMLP(spec.mlp(1))
    plain = spec.mlp(1)
    twin = Autograd(plain, spec.ordered_parameters(plain))
    obs = tensors((9, 2, 2), seed=4)[0].detach()

    def results(network: LearningNetwork) -> Results:
        load_random(network, spec)
        gradients = []
        # 5: two sizes take turns
        for size in (9, 3, 5):
            pieces = obs.split(size)
            gradient = gradient_of(network, *pieces)
            gradients.append(gradient)
        head, values, _ = network.forward(obs)
        return [head.clone(), values.clone(), *gradients]

    return results(kernel), results(twin)


def recurrent_cell(kind: str, length: int, share_of_starts: float) -> tuple[Results, Results]:
    torch.manual_seed(0)
    cell = CELLS[kind](5, 6).double()
    parameters = list(cell.parameters())
    state_size = 6 * NUM_STATE_VECTORS[kind]
    inputs = tensors((length, 4, 5), (4, state_size))
    generator = torch.Generator().manual_seed(1)
    random = torch.rand((length, 4), generator=generator)
    starts = random < share_of_starts

    def results(function: Callable[..., Any]) -> Results:
        def run(rows: Tensor, state: Tensor) -> Any:
            return function(cell, rows, state, starts)

        return with_gradients(run, inputs, parameters)

    return results(over_time), results(over_time_in_torch)


def pixel_convolution(
    kernel_size: Any, stride: int, padding: int, shape: tuple[int, ...] = (3, 20, 24)
) -> tuple[Results, Results]:
    make = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    channels = shape[0]
    kernel = PixelConv(channels, 5, **make)
    twin = nn.Conv2d(channels, 5, **make)
    twin.load_state_dict(kernel.state_dict())

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, *shape), generator=generator, dtype=torch.uint8)
    as_stored = pixels.permute(0, 2, 3, 1).contiguous()
    channels_last = as_stored.permute(0, 3, 1, 2)

    def results(module: nn.Module, image: Tensor) -> Results:
        parameters = list(module.parameters())
        return with_gradients(lambda: module(image), [], parameters)

    kernel_results = results(kernel, pixels) + results(kernel, channels_last)
    twin_results = results(twin, pixels / 255)
    return kernel_results, 2 * twin_results


def dense() -> tuple[Results, Results]:
    kernel = Dense(64, 7)
    twin = nn.Linear(64, 7)
    twin.load_state_dict(kernel.state_dict())
    (random,) = tensors((9, 64))
    code = random.detach().float().requires_grad_()
    return results_of(kernel, [code]), results_of(twin, [code])


def quick_module() -> tuple[Results, Results]:
    plain = nn.Sequential()
    plain.append(nn.Linear(4, 8))
    plain.append(nn.Tanh())
    plain.append(nn.LayerNorm(8))
    plain.append(nn.Linear(8, 2))
    plain.double()
    quick = without_call_overhead(copy.deepcopy(plain))
    return modules(quick, plain, (3, 4))


EXACT = 1e-11
SINGLE = 2e-5
KERNELS: dict[str, tuple[Pair, float]] = {}


def add(name: str, tolerance: float, function: Callable[..., Any], *arguments: Any) -> None:
    """Add a kernel to the table."""
    KERNELS[name] = (partial(function, *arguments), tolerance)


add("products of one thread", EXACT, products, 8, 2)
add("products of two threads", EXACT, products, 400, 2)
add("linear", EXACT, linear_layer, True)
add("linear without bias", EXACT, linear_layer, False)
add("module without call overhead", EXACT, quick_module)
add("dense layer", SINGLE, dense)
add("pixels", SINGLE, pixel_convolution, 3, 1, 1)
add("pixels in blocks", SINGLE, pixel_convolution, 8, 4, 0)
add("four channels in blocks", SINGLE, pixel_convolution, 8, 4, 0, (4, 20, 24))
_wide = "pixels of one channel in wide blocks"
add(_wide, SINGLE, pixel_convolution, (4, 12), 4, 0, (1, 20, 24))
add("chain over three axes", EXACT, chain, nn.Tanh, True, 2)
for _activation in (nn.Tanh, nn.ReLU):
    for _ends in (False, True):
        _name = f"chain of {_activation.__name__} {_ends}"
        add(_name, EXACT, chain, _activation, _ends)
for _actions in (DISCRETE, BOX):
    for _sizes in ((), (32,), (64, 64, 16)):
        for _kind in ("tanh", "relu"):
            _name = f"{_kind} mlp {_sizes} {type(_actions).__name__}"
            add(_name, EXACT, handwritten_mlp, _actions, _sizes, _kind)
for _kind in ("gru", "lstm"):
    for _length in (1, 7):
        for _share in (0.0, 0.3, 1.0):
            _name = f"{_kind} over {_length} steps, {_share} starts"
            add(_name, EXACT, recurrent_cell, _kind, _length, _share)


def as_array(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    return result


@pytest.mark.proves("_LSTM", "_GRU")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_its_plain_twin(kernel: str) -> None:
    compute, tolerance = KERNELS[kernel]
    results, expected = compute()
    assert len(results) == len(expected)
    for result, twin in zip(results, expected, strict=True):
        assert_allclose(as_array(result), as_array(twin), rtol=tolerance, atol=tolerance)


def gradient_of_gradient(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the gradient of the squared length of the gradient of a loss, for the first weights."""
    weight = next(module.parameters())
    loss = module(inputs).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    length = gradient.square().sum()
    (second,) = torch.autograd.grad(length, weight)
    return second


def test_a_gradient_of_a_gradient_goes_through_a_chain() -> None:
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    kernel = copy.deepcopy(plain)
    use_in(kernel)
    inputs = torch.randn(7, 5, dtype=torch.float64)
    expected = gradient_of_gradient(plain, inputs)
    torch.testing.assert_close(gradient_of_gradient(kernel, inputs), expected)


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
    outputs = layer(torch.ones(4, 3))
    outputs.sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [4.0, 4.0]


def test_other_dtypes_are_left_to_torch() -> None:
    layer = nn.Linear(2, 3).half()
    rows = torch.ones(4, 2).half()
    outputs = linear(rows, layer.weight, layer.bias)
    assert outputs.dtype == torch.float16


class Doubled(nn.GRUCell):
    def forward(self, *inputs: Any) -> Any:
        return 2 * super().forward(*inputs)


NEEDS_A_CELL = r"Pass an nn\.GRUCell or an nn\.LSTMCell with biases"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (nn.Linear(2, 2), NEEDS_A_CELL),
        (nn.GRUCell(2, 2, bias=False), NEEDS_A_CELL),
        (Doubled(2, 2), r"which has hooks or its own forward\(\)"),
    ],
)
def test_a_cell_without_a_kernel_or_that_does_more_is_refused(cell: Any, words: str) -> None:
    inputs = torch.zeros(1, 1, 2)
    state = torch.zeros(1, 4)
    starts = torch.zeros((1, 1), dtype=torch.bool)
    with pytest.raises(TypeError, match=words):
        over_time(cell, inputs, state, starts)


def test_the_recurrence_is_not_computed_in_lower_precision() -> None:
    cell = nn.GRUCell(5, 6)
    state = torch.zeros(2, 6)
    starts = torch.zeros((3, 2), dtype=torch.bool)
    inputs = torch.randn(3, 2, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = over_time(cell, inputs, state, starts)
    assert outputs.dtype == torch.float32
    assert last.dtype == torch.float32

    expected, _ = over_time(cell, inputs.float(), state, starts)
    assert torch.equal(outputs, expected)
