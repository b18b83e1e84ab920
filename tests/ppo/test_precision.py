"""Learning in bfloat16: near float32, reproducible, refused where it is of no use; convolutions over blocks."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from builders import collect, parts_of
from encoder_kinds import config_of
from torch import Tensor
from torch.testing import assert_close
from updates import train

import dppo
from dppo.config import PPO, Config
from dppo.errors import ConfigError
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.kernels import convolutions
from dppo.ppo.kernels.convolutions import PixelConv
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks import modules
from dppo.ppo.networks.encoders import Output

pytestmark = pytest.mark.usefixtures("on_any_cpu")
kinds = pytest.mark.parametrize(
    "kind", ["nature", "impala", "grid", "flatten", "everything", "own module"]
)


@pytest.fixture
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in bfloat16 on any CPU."""
    monkeypatch.setattr(modules, "cpu_has_bfloat16", lambda: True)


def batch_of_128(kind: str, **changes: Any) -> Config:
    return config_of(kind, envs_per_sampler=4, **changes)


def trainer_and_batch(kind: str, **changes: Any) -> tuple[PPOTrainer, Batch]:
    config = batch_of_128(kind, **changes)
    samplers, trainer = parts_of(config)
    policy = PolicySnapshot(0, trainer.weights())
    _, segments = collect(samplers, policy)
    return trainer, make_batch(segments, None, None, PPO())


class Learned(NamedTuple):
    """The gradient of a loss that weighs rows by numbers of one sign, so that nothing cancels, and the outputs."""

    gradient: Tensor
    head: Tensor
    values: Tensor


def learned(kind: str, arithmetic: str) -> Learned:
    trainer, batch = trainer_and_batch(kind, precision=arithmetic)
    network = trainer.model.network
    head, values, residuals = network.forward(batch.obs)
    head = head.clone()
    values = values.clone()
    grad_values = torch.linspace(0.5, 1.5, len(batch))
    grad_head = grad_values.unsqueeze(1) * torch.ones_like(head)
    network.backward(residuals, grad_head, grad_values)
    gradient = network.parameters.gradient.clone()
    return Learned(gradient, head, values)


@pytest.mark.proves("learn_in_bfloat16")
@kinds
def test_gradients_and_outputs_are_those_of_float32_to_two_digits(kind: str) -> None:
    exact = learned(kind, "float32")
    lower = learned(kind, "bfloat16")
    assert {tensor.dtype for tensor in lower} == {torch.float32}

    difference = lower.gradient - exact.gradient
    assert difference.any()  # else nothing was computed in bfloat16

    norm = torch.linalg.vector_norm
    assert norm(difference) < 0.03 * norm(exact.gradient)
    assert_close(lower.head, exact.head, atol=0.01, rtol=0.02)
    assert_close(lower.values, exact.values, atol=0.02, rtol=0.02)  # 0.0098 apart at most


@kinds
def test_an_update_is_reproducible_and_leaves_weights_in_float32(kind: str) -> None:
    weights = []
    for _ in range(2):
        trainer, batch = trainer_and_batch(kind, precision="bfloat16")
        figures = train(trainer, batch)
        assert abs(figures["old_approx_kl"]) < 0.05
        weights.append(trainer.weights())

    first, second = weights
    assert first.dtype == np.float32
    assert first.tobytes() == second.tobytes()


def test_last_layers_compute_in_float32() -> None:
    torch.manual_seed(0)
    layer = Output(64, 3)
    hidden = torch.randn(8, 64).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(hidden)
    assert torch.equal(outputs, layer(hidden.float()))


def test_segments_do_not_depend_on_the_precision_of_learning() -> None:
    def metrics(precision: str) -> Any:
        config = batch_of_128("nature", precision=precision, total_timesteps=128, progress="off")
        return dppo.train(config).metrics[0]

    exact = metrics("float32")
    lower = metrics("bfloat16")
    assert exact["charts/episodes"] == lower["charts/episodes"]
    assert exact["losses/value_loss"] != lower["losses/value_loss"]


def test_a_cpu_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cpu_has_bfloat16", lambda: False)
    words = r"this CPU .* would be slower than float32\. Use `precision=float32`"
    with pytest.raises(ConfigError, match=words):
        trainer_and_batch("nature", precision="bfloat16")


@pytest.mark.parametrize(
    ("name", "has"), [("avx512_bf16", True), ("bf16", True), ("avx512_f", False)]
)
def test_the_instructions_are_those_that_torch_finds(
    name: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    capabilities = {"avx512_f": False, "avx512_bf16": False, "amx_bf16": False, name: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert modules.cpu_has_bfloat16() is has


SHAPE: dict[str, Any] = {"width": 20, "kernel": (8, 8), "stride": (4, 4), "padding": (0, 0)}
OTHER_SHAPES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"kernel": (4, 12)}, True),
    ({"width": 22}, False),
    ({"kernel": (6, 8)}, False),
    ({"stride": (2, 2)}, False),
    ({"padding": (1, 1)}, False),
]


@pytest.mark.parametrize(("changes", "over_blocks"), OTHER_SHAPES, ids=str)
def test_other_convolutions_stay_over_pixels(
    changes: dict[str, Any], over_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve = mock.Mock()
    monkeypatch.setattr(convolutions, "convolve_blocks", convolve)
    shape = SHAPE | changes
    width = shape.pop("width")
    pixels = torch.zeros(1, 1, 20, width, dtype=torch.uint8)
    convolution = PixelConv(1, 2, *shape.values())
    convolution(pixels)
    assert convolve.called is over_blocks
