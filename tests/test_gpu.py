"""Learning on a GPU, as far as a CPU shows it: benchmarks/gpu.py does the rest on one."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import plan_of, tiny_run
from remedies import executes
from torch import Tensor, nn

import dppo
from dppo import streams
from dppo.errors import ConfigError, GPUFailed, OutOfMemory
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.hosts.trainer_builder import build_trainer
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.exchange.records import Experience, PolicySnapshot, SegmentRequest
from dppo.ppo.learning.gpu import gpu_failure, is_out_of_memory, repeatable_on, starting_on
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.modules import Autograd
from dppo.records.files import checkpoint as checkpoints

CUDA = torch.device("cuda")
FULL = "CUDA out of memory. Tried to allocate 2.00 MiB."


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> None:
    """Let no collection of garbage look at what earlier tests have left: memory that ends is released by one."""
    gc.freeze()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of the parts of benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("gpu_parts")
    for name in ("gpu_parts", "gpu_tasks", "gpu", "measure"):
        sys.modules.pop(name, None)


def trainer_and_segment(**changes: Any) -> tuple[LocalTrainer, Any]:
    """Return a trainer in this process, and a segment."""
    config = tiny_run(None, minibatch_size=16, norm_reward=False, **changes)
    built = build_sampler(sampler_plan(config), 0)
    local = LocalTrainer(plan_of(config, built.spaces.actions), built.spaces)
    snapshot = PolicySnapshot(0, local.weights())
    return local, built.sampler.collect(SegmentRequest(0, 0), snapshot)[1]


def update(local: LocalTrainer, segment: Any) -> None:
    local.update(Experience([segment], PolicySnapshot(0, local.weights()), None, 0))


def test_settings_of_torch_are_back_after_an_update_on_a_gpu() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    with warnings.catch_warnings(), repeatable_on(CUDA):  # torch warns that CUDA is not available
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert torch.get_float32_matmul_precision() == "highest"
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
    ) == before


def test_lower_precision_reads_the_weights_of_now_within_another_autocast() -> None:
    """Torch clears its copies of weights only when the outermost autocast ends."""
    layer = nn.Linear(3, 3)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.layer(obs)
            return outputs[:, :2], outputs[:, 2]

    module = Heads()
    network = Autograd(module, module.parameters())
    network.lower_precision = torch.bfloat16
    with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
        first = network.forward(torch.ones(2, 3))[0].clone()
        network.parameters.weights.data.add_(1.0)
        second = network.forward(torch.ones(2, 3))[0]
    assert torch.allclose(second - first, torch.tensor(4.0), atol=0.1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(FULL), MemoryError(), RuntimeError("CUDA out of memory")]
)
def test_every_error_of_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not gpu_failure(error)
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))


@executes("ppo/learning/gpu.py: rows at once do not fit into {}. Use `micro_batch_size={}`")
def test_a_run_out_of_memory_says_what_to_do_and_doing_so_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = PPOModel.forward

    def cramped(model: PPOModel, obs: Any, actions: Any, *arguments: Any) -> Any:
        if len(actions) > 16:
            full()
        return forward(model, obs, actions, *arguments)

    monkeypatch.setattr(PPOModel, "forward", cramped)
    config = tiny_run(tmp_path / "run", samplers=2, steps=32, iterations=2, minibatch_size=64)
    with pytest.raises(
        OutOfMemory, match=r"^micro_batch_size=none: 64 rows at once do not"
    ) as raised:
        dppo.train(config)

    saved = checkpoints.load(tmp_path / "run" / "checkpoints" / "iter_000000.safetensors")
    assert saved.state["iteration"] == 0
    remedy = re.search(r"`micro_batch_size=(\d+)`", str(raised.value))
    assert remedy is not None

    smaller = dataclasses.replace(config, micro_batch_size=int(remedy[1]))
    assert dppo.train(smaller, resume=tmp_path / "run").iterations == 2


def test_what_did_not_fit_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    local, segment = trainer_and_segment()
    references: list[Any] = []

    def cramped(model: PPOModel, obs: Any, *arguments: Any) -> Any:
        references.append(weakref.ref(obs))
        full()

    monkeypatch.setattr(PPOModel, "forward", cramped)
    with pytest.raises(OutOfMemory) as raised:
        update(local, segment)
    assert raised.value.__cause__ is not None
    assert [reference() for reference in references] == [None]


class FakeGPU:
    """Answers as torch.cuda does on a card of 80 GB; SGD runs on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, peak: float, free: float) -> None:
        answers = {
            "max_memory_allocated": int(peak),
            "memory_reserved": int(1e9),
            "reset_peak_memory_stats": None,
            "get_device_name": "H200",
            "mem_get_info": (int(free), int(80e9)),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize(
    ("free", "line"),
    [
        (79e9, "GPU: H200; an update takes about 5 GB of its memory, 80 GB are available."),
        (3e9, "available. If it does not fit, use `micro_batch_size=4`."),
    ],
)
def test_a_run_logs_the_memory_that_it_takes_on_a_gpu(
    free: float, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local, _ = trainer_and_segment()
    FakeGPU(monkeypatch, peak=5e9, free=free)
    local.device = CUDA
    with caplog.at_level("INFO", "dppo"), warnings.catch_warnings():
        local.check_gpu(16)
    assert caplog.messages[-1].endswith(line)


def full(*_: Any) -> Any:
    raise torch.OutOfMemoryError(FULL)


def test_a_minibatch_that_does_not_fit_is_refused_before_the_first_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, _ = trainer_and_segment()
    FakeGPU(monkeypatch, peak=5e9, free=3e9)
    monkeypatch.setattr(PPOModel, "forward", full)
    local.device = CUDA
    message = (
        r"^micro_batch_size=none: 16 rows at once do not fit into the memory of the GPU \(H200, 80 GB, of which "
        r"tensors of this process hold 1 GB, and CUDA and other processes 76 GB\)\. Use `micro_batch_size=4`"
    )
    with pytest.raises(ConfigError, match=message), warnings.catch_warnings():
        local.check_gpu(16)


def test_weights_are_kept_where_a_gpu_takes_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, segment = trainer_and_segment()
    trainer = local.trainer
    assert isinstance(trainer, PPOTrainer)

    weights = local.weights()
    state = local.state()

    def lost(*_: Any, **__: Any) -> Any:
        trainer.model.parameters.weights.data.zero_()
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ..."
        )

    monkeypatch.setattr(PPOModel, "forward", lost)
    local.device = CUDA
    monkeypatch.setattr(trainer, "restore", lost)
    monkeypatch.setattr(trainer, "update", lost)
    with pytest.raises(
        GPUFailed,
        match=r"failed in an update \(CUDA error: an illegal memory access was encountered\)",
    ):
        update(local, segment)
    assert np.array_equal(local.weights(), weights)
    assert np.array_equal(local.state()["exp_avg"], state["exp_avg"])


def test_a_module_that_works_on_the_cpu_alone_is_refused_in_words() -> None:
    message = r"^model=own:Net: it works on the CPU, and fails on device=cuda \(.*two devices.*device=obs\.device"
    with pytest.raises(ConfigError, match=message), starting_on("cuda", "own:Net"):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices"
        )
    with pytest.raises(RuntimeError), starting_on("cpu", "own:Net"):
        raise RuntimeError("it fails on the CPU, too")


def on_device(device: str, spec: Any) -> None:
    """Score made-up rows and compute the gradient on another device, on which tensors have no numbers."""
    from dppo.ppo.learning.batch import zero_batch

    model = PPOModel(spec, streams.integer(1, streams.Stream.WEIGHTS), device=device)
    batch = zero_batch(spec, 8, 1)

    def moved(column: torch.Tensor) -> torch.Tensor:
        return column.to(device)

    rows = dataclasses.replace(batch._changed(moved, moved), table=each_leaf(batch.table, moved))
    scored = model.forward(rows.obs, rows.actions)
    model.backward(scored, rows.logprobs, rows.values, rows.values)


@pytest.mark.slow  # torch imports a second of modules for tensors without numbers
def test_no_network_leaves_a_tensor_on_the_cpu(parts: Any) -> None:
    # others need numbers, or cuda
    names = [name for name in parts.KINDS if "MLP 2x64" in name or "module" in name]
    tried = set()
    for name in names:
        changes = {"seed": 2} | parts.KINDS[name]
        for key in ("precision", "reuse"):
            changes.pop(key, None)
        config = parts.config_of("cpu", **changes)
        spaces = build_sampler(sampler_plan(config), 0).spaces
        spec = build_trainer(plan_of(config, spaces.actions), spaces).spec
        if str(spec) in tried:
            continue
        tried.add(str(spec))
        on_device("meta", spec)


def test_a_part_of_the_benchmark_runs_on_a_cpu(parts: Any, tmp_path: Path) -> None:
    setting = parts.Setting("cpu", 1, tmp_path)
    small = {"num_steps": 8, "minibatch_size": 16, "update_epochs": 1}
    compared = parts.compared("MLP 2x64, choice", setting, parts.KINDS["MLP 2x64, choice"] | small)
    assert compared["passed"]
    assert compared["figures"]["of_the_way"] == "0.0000 %"
