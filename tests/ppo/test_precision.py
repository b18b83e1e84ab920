"""Learning in bfloat16: near float32, reproducible, refused where it is of no use; convolutions over blocks."""

from __future__ import annotations

from typing import Any

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
    samplers, trainer = parts_of(batch_of_128(kind, **changes))
    _, segments = collect(samplers, PolicySnapshot(0, trainer.weights()))
    return trainer, make_batch(segments, None, None, PPO())


def gradient_and_outputs(kind: str, arithmetic: str) -> tuple[Tensor, Tensor, Tensor]:
    trainer, batch = trainer_and_batch(kind, precision=arithmetic)
    network = trainer.model.network
    head, values, residuals = network.forward(batch.obs)
    head = head.clone()
    values = values.clone()
    rows = torch.linspace(0.5, 1.5, len(batch))  # of one sign: nothing cancels
    network.backward(residuals, rows.unsqueeze(1) * torch.ones_like(head), rows)
    return network.parameters.gradient.clone(), head, values


@pytest.mark.proves("learn_in_bfloat16")
@kinds
def test_gradients_and_outputs_are_those_of_float32_to_two_digits(kind: str) -> None:
    exact, exact_head, exact_values = gradient_and_outputs(kind, "float32")
    gradient, head, values = gradient_and_outputs(kind, "bfloat16")
    assert {tensor.dtype for tensor in (gradient, head, values)} == {torch.float32}
    assert not torch.equal(gradient, exact)  # else nothing was computed in bfloat16
    assert torch.linalg.vector_norm(gradient - exact) < 0.03 * torch.linalg.vector_norm(exact)
    assert_close(head, exact_head, atol=0.01, rtol=0.02)
    assert_close(values, exact_values, atol=0.02, rtol=0.02)  # 0.0098 apart at most


@kinds
def test_an_update_is_reproducible_and_leaves_weights_in_float32(kind: str) -> None:
    weights = []
    for _ in range(2):
        trainer, batch = trainer_and_batch(kind, precision="bfloat16")
        assert abs(train(trainer, batch)["old_approx_kl"]) < 0.05
        weights.append(trainer.weights())
    assert weights[0].dtype == np.float32
    assert weights[0].tobytes() == weights[1].tobytes()


def test_last_layers_compute_in_float32() -> None:
    torch.manual_seed(0)
    layer = Output(64, 3)
    hidden = torch.randn(8, 64).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(hidden)
    assert torch.equal(outputs, layer(hidden.float()))


def test_segments_do_not_depend_on_the_precision_of_learning() -> None:
    exact, lower = (
        dppo.train(
            batch_of_128("nature", precision=precision, total_timesteps=128, progress="off")
        ).metrics[0]
        for precision in ("float32", "bfloat16")
    )
    assert exact["charts/episodes"] == lower["charts/episodes"]
    assert exact["losses/value_loss"] != lower["losses/value_loss"]


def test_a_cpu_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cpu_has_bfloat16", lambda: False)
    with pytest.raises(
        ConfigError, match=r"this CPU .* would be slower than float32\. Use `precision=float32`"
    ):
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


ODD = [{"width": 22}, {"kernel": (6, 8)}, {"stride": (2, 2)}, {"padding": (1, 1)}]


@pytest.mark.parametrize(
    ("changes", "over_blocks"),
    [({}, True), ({"kernel": (4, 12)}, True), *((odd, False) for odd in ODD)],
    ids=str,
)
def test_other_convolutions_stay_over_pixels(
    changes: dict[str, Any], over_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        convolutions, "convolve_blocks", lambda *arguments: called.append(arguments)
    )
    shape: dict[str, Any] = {
        "width": 20,
        "kernel": (8, 8),
        "stride": (4, 4),
        "padding": (0, 0),
    } | changes
    pixels = torch.zeros(1, 1, 20, shape.pop("width"), dtype=torch.uint8)
    PixelConv(1, 2, *shape.values())(pixels)
    assert bool(called) is over_blocks
