"""Measure each hand-written kernel of dppo in a run: the time of an iteration with it, and with its plain twin.

    python benchmarks/kernels.py                         # all kernels: about ten minutes
    python benchmarks/kernels.py --only mlp recurrence --repeats 5

Each row is a kernel and a task: milliseconds of acting and of the update of one iteration, the least over the
iterations of several runs in this process, in which kernel and twin take turns: other processes only add time.
A kernel that saves less than 5 % of either goes,
unless equal results on all CPUs need it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

import dppo

dppo.portable_numerics()  # as the commands do


class Constant(gym.Env):
    """Cost nothing, and return the same random observation always; an episode has 200 steps."""

    def __init__(self, obs: Box, actions: Box | Discrete) -> None:
        self.observation_space = obs
        self.action_space = actions
        self._obs = obs.sample()
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return self._obs, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._obs, float(np.sum(action)), False, self._steps == 200, {}


def cartpole() -> Constant:
    """Make an environment of CartPole's sizes."""
    return Constant(Box(-1, 1, (4,), np.float32), Discrete(2))


def halfcheetah() -> Constant:
    """Make an environment of HalfCheetah's sizes."""
    return Constant(Box(-1, 1, (17,), np.float32), Box(-1, 1, (6,), np.float32))


def atari() -> Constant:
    """Make an environment with four stacked frames of Atari's preprocessing."""
    return Constant(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6))


class Task(NamedTuple):
    """A run with the sizes that users have."""

    env: Callable[[], Constant]
    settings: dict[str, Any]


TASKS = {
    "cartpole 64x64": Task(cartpole, {"num_steps": 128, "minibatch_size": 256, "update_epochs": 4}),
    "halfcheetah 64x64": Task(
        halfcheetah, {"num_steps": 256, "minibatch_size": 64, "update_epochs": 10}
    ),
    "halfcheetah 256x256": Task(
        halfcheetah,
        {"num_steps": 256, "minibatch_size": 256, "update_epochs": 4, "hidden_sizes": (256, 256)},
    ),
    "shared trunk 64x64": Task(
        cartpole, {"num_steps": 128, "minibatch_size": 256, "update_epochs": 4, "trunk": "shared"}
    ),
    "lstm 64": Task(
        cartpole,
        {
            "num_steps": 128,
            "minibatch_size": 256,
            "update_epochs": 4,
            "memory": "lstm",
            "sequence_length": 16,
        },
    ),
    "gru 64": Task(
        cartpole,
        {
            "num_steps": 128,
            "minibatch_size": 256,
            "update_epochs": 4,
            "memory": "gru",
            "sequence_length": 16,
        },
    ),
    "atari": Task(atari, {"num_steps": 16, "minibatch_size": 64, "update_epochs": 1}),
}


@contextlib.contextmanager
def replaced(target: str, twin: Any) -> Iterator[None]:
    """Use `twin` in place of what the dotted path `target` names."""
    with patch(target, twin):
        yield


def plain_products() -> Any:
    """Return a context in which torch multiplies."""
    import torch
    from torch import nn

    stack = contextlib.ExitStack()

    def multiply(a: Any, b: Any, out: Any) -> Any:
        return torch.mm(a, b, out=out)

    for module in ("mlp", "recurrence"):
        stack.enter_context(replaced(f"dppo.ppo.kernels.{module}.multiply", multiply))
    stack.enter_context(replaced("dppo.ppo.kernels.mlp.tanh_", torch.Tensor.tanh_))
    stack.enter_context(replaced("dppo.ppo.kernels.recurrence.linear", nn.functional.linear))
    stack.enter_context(plain_linear_layers())
    return stack


def plain_linear_layers() -> Any:
    """Return a context in which torch's own layers compute."""
    from torch import nn

    stack = contextlib.ExitStack()
    stack.enter_context(replaced("dppo.ppo.networks.modules.use_in", lambda module: None))
    stack.enter_context(replaced("dppo.ppo.kernels.linear_layers.forward_of", lambda module: None))
    for module in ("networks.encoders", "kernels.convolutions"):
        stack.enter_context(replaced(f"dppo.ppo.{module}.layer_forward", nn.Linear.forward))
    return stack


def plain_mlp() -> Any:
    """Return a context in which autograd takes the gradient of the default network."""
    from dppo.ppo.networks.modules import Autograd

    def autograd(mlp: Any, zeros_like: Any) -> Autograd:
        trunks = (*mlp.policy.parameters(), *mlp.value.parameters())
        parameters = trunks if mlp.log_std is None else (*trunks, mlp.log_std)
        return Autograd(mlp, parameters, zeros_like)

    return replaced("dppo.ppo.kernels.mlp.HandwrittenMLP", autograd)


def plain_recurrence() -> Any:
    """Return a context in which autograd goes through the cells step by step."""
    from dppo.ppo.kernels.recurrence import over_time_in_torch

    return replaced("dppo.ppo.networks.encoders.over_time", over_time_in_torch)


def plain_blocks() -> Any:
    """Return a context in which the first convolution reads pixels, one channel beside the other."""
    import torch
    from torch.nn.functional import conv2d

    def over_pixels(pixels: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
        return conv2d(pixels.to(dtype, memory_format=torch.channels_last), weight, bias, stride=4)

    return replaced("dppo.ppo.kernels.convolutions.convolve_blocks", over_pixels)


def plain_convolutions() -> Any:
    """Return a context in which convolutions are torch's."""
    from torch import nn

    class OverPixels(nn.Conv2d):
        def forward(self, pixels: Any) -> Any:
            return self._conv_forward(pixels.to(self.weight.dtype) / 255, self.weight, self.bias)

    return replaced("dppo.ppo.networks.images.PixelConv", OverPixels)


def plain_dense() -> Any:
    """Return a context in which the layer behind convolutions multiplies like all others."""
    from torch import nn

    return replaced("dppo.ppo.networks.images.Dense", nn.Linear)


def plain_calls() -> Any:
    """Return a context in which layers are called through torch's `__call__`."""
    from dppo.ppo.kernels.linear_layers import use_in

    def unchanged(module: Any) -> Any:
        use_in(module)
        return module

    stack = contextlib.ExitStack()
    stack.enter_context(replaced("dppo.ppo.kernels.calls.without_call_overhead", unchanged))
    stack.enter_context(replaced("dppo.ppo.networks.modules.without_call_overhead", unchanged))
    return stack


def plain_acting() -> Any:
    """Return a context in which actors use torch."""

    def in_torch(spec: Any, *, estimates_values: bool) -> Any:
        from dppo.ppo.networks.modules import TorchActing

        module = spec.module(0)
        return TorchActing(module, spec.ordered_parameters(module), spec.spaces)

    return replaced("dppo.ppo.networks.choice.NumpyMLP", in_torch)


def plain_scores() -> Any:
    """Return a context in which autograd goes through the scores of actions."""
    from dppo.ppo.distributions.base import Distribution

    stack = contextlib.ExitStack()
    for kind in ("Categorical", "DiagonalGaussian"):
        path = f"dppo.ppo.distributions.simple.{kind}.scores_with_gradient"
        stack.enter_context(replaced(path, Distribution.scores_with_gradient))
    return stack


class Kernel(NamedTuple):
    """A kernel, and the tasks that run through it."""

    twin: Callable[[], Any]
    tasks: tuple[str, ...]


MLPS = ("cartpole 64x64", "halfcheetah 64x64", "halfcheetah 256x256")
KERNELS = {
    "products": Kernel(plain_products, (*MLPS, "lstm 64")),
    "linear_layers": Kernel(plain_linear_layers, ("shared trunk 64x64",)),
    "mlp": Kernel(plain_mlp, MLPS),
    "recurrence": Kernel(plain_recurrence, ("lstm 64", "gru 64")),
    "convolutions: blocks": Kernel(plain_blocks, ("atari",)),
    "convolutions: pixels": Kernel(plain_convolutions, ("atari",)),
    "convolutions: dense": Kernel(plain_dense, ("atari",)),
    "calls": Kernel(plain_calls, ("shared trunk 64x64", "lstm 64", "atari")),
    "acting": Kernel(plain_acting, (*MLPS, "lstm 64", "gru 64")),
    "scores": Kernel(plain_scores, ("cartpole 64x64", "halfcheetah 64x64")),
}


@dataclass
class Times(dppo.Observer):
    """Seconds of acting and of the update of each iteration but the first."""

    act: list[float]
    update: list[float]

    def on_iteration(self, row: dict[str, float]) -> None:
        """Store the times of an iteration."""
        if row["iteration"] > 1:
            self.act.append(row["perf/act_s"])
            self.update.append(row["perf/update_s"])


def run(task: Task, iterations: int, times: Times) -> None:
    """Train in this process, with a batch of 8 samplers."""
    steps = 8 * task.settings["num_steps"]
    with tempfile.TemporaryDirectory() as folder:
        config = dppo.Config(
            env_id=task.env,
            num_samplers=8,
            num_actors=0,
            total_timesteps=iterations * steps,
            run_dir=Path(folder) / "run",
            progress="off",
            target_kl=1e9,  # all epochs, whatever the weights are
            **task.settings,
        )
        dppo.train(config, observers=[times])


def measure(kernel: Kernel, task: Task, repeats: int, iterations: int) -> tuple[Times, Times]:
    """Return the times with the kernel and with its twin, which take turns."""
    with_kernel = Times([], [])
    with_twin = Times([], [])
    for _ in range(repeats):
        run(task, iterations, with_kernel)
        with kernel.twin():
            run(task, iterations, with_twin)
    return with_kernel, with_twin


def compared(kernel_s: list[float], twin_s: list[float]) -> str:
    """Return both times in milliseconds, and the share of the twin's time that the kernel saves."""
    ours = 1e3 * min(kernel_s)
    plain = 1e3 * min(twin_s)
    return f"{ours:8.1f} {plain:8.1f} {1 - ours / plain:6.0%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(KERNELS), metavar="KERNEL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=5)
    wanted = parser.parse_args()
    print(
        f"{'':22} {'':20} acting: {'kernel':>6} {'twin':>8} {'saves':>6}   update: {'kernel':>6} {'twin':>8} saves"
    )
    for name, kernel in KERNELS.items():
        if not any(name.startswith(prefix) for prefix in wanted.only):
            continue
        for task in kernel.tasks:
            ours, plain = measure(kernel, TASKS[task], wanted.repeats, wanted.iterations)
            acting = compared(ours.act, plain.act)
            update = compared(ours.update, plain.update)
            print(f"{name:22} {task:20} {acting:>22}   {update:>22}", flush=True)


if __name__ == "__main__":
    main()
