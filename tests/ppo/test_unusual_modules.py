"""Networks that use torch in ways of their own compute the same in actors and learners as they do in torch alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from builders import DISCRETE
from numpy.testing import assert_array_equal
from torch import Tensor, from_numpy, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrize import register_parametrization
from torch.testing import assert_close

import dppo
from dppo.errors import ConfigError
from dppo.ppo.networks import user_module
from dppo.ppo.networks.choice import acting_network, learning_network
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.spaces import Spaces

SPACES = Spaces(np.dtype((np.float32, (3,))), DISCRETE)


class Base(nn.Module):
    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        self.body = nn.Linear(3, 16)
        self.shift = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, head_size)
        self.value = nn.Linear(16, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(obs)
        return self.head(hidden), self.value(hidden).squeeze(-1)

    def hidden(self, obs: Tensor) -> Tensor:
        return self.body(obs).tanh() + self.shift


class Sliced(Base):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU())

    def hidden(self, obs: Tensor) -> Tensor:
        return self.net[:2](obs)


class Copied(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        other = copy.deepcopy(self.body)
        other.bias.data += 1
        return (other(obs) + self.body(obs)).tanh()


class GeneratedBias(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        return functional_call(self.body, {"bias": self.body.bias + self.shift}, (obs,)).tanh()


class GeneratedBiasOfChain(Base):
    net: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh())

    def hidden(self, obs: Tensor) -> Tensor:
        return functional_call(self.net, {"0.bias": self.net[0].bias + self.shift}, (obs,))


class GeneratedBiasOfConvolution(Base):
    conv: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.conv = nn.Conv1d(1, 16, 3)

    def hidden(self, obs: Tensor) -> Tensor:
        return functional_call(
            self.conv, {"bias": self.conv.bias + self.shift}, (obs[:, None],)
        ).flatten(1)


class Rotated(Base):
    turns: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))

    def hidden(self, obs: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.body(obs).view(-1, 8, 2)) * self.turns
        return torch.view_as_real(turned).flatten(1)


class Mapped(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        return vmap(lambda tensor: self.body(tensor).tanh())(obs)


class Potential(Base):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.back = nn.Linear(3, 16)

    def hidden(self, obs: Tensor) -> Tensor:
        return self.back(grad(lambda tensor: self.body(tensor).tanh().sum())(obs))


class Keyword(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        return self.body(input=obs).tanh()


class Double(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


class ParametrizedBias(Base):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        register_parametrization(self.body, "bias", Double())


class Chain(Base):
    """Uses a layer twice in a chain."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shared = self.linear(65, 65)
        self.chain = nn.Sequential(
            self.linear(3, 65), nn.Tanh(), shared, nn.Tanh(), shared, nn.ReLU(), self.linear(65, 16)
        )

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs)

    def hidden(self, obs: Tensor) -> Tensor:
        return self.chain(obs)


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class OfSubclasses(Chain):
    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return Doubled(inputs, outputs)


class Hooked(Chain):
    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        layer = super().linear(inputs, outputs)
        layer.register_forward_hook(lambda _, __, output: 2 * output)
        return layer


class HookedActivation(Chain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chain[1].register_forward_hook(lambda _, __, output: 2 * output)


class Replaced(Chain):
    """Each layer has a forward pass of its own."""

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        layer = super().linear(inputs, outputs)
        layer.forward = lambda inputs: 3 * nn.Linear.forward(layer, inputs)  # type: ignore[method-assign, assignment]
        return layer


class Transposed(Chain):
    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        layer = super().linear(inputs, outputs)
        layer.weight = nn.Parameter(torch.randn(inputs, outputs).t() / 8)
        return layer


TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [Base, *Base.__subclasses__(), *Chain.__subclasses__()])
def test_actors_and_learners_compute_what_torch_does_and_the_same_bits(
    kind: type[Base], dtype: str
) -> None:
    """Also with the weights after the next update."""
    torch.manual_seed(0)
    spec = ModuleSpec(SPACES, kind, {}, dtype)
    plain = kind(SPACES, 3)
    if dtype == "float64":
        plain.double()
    actor = acting_network(spec)
    learner = learning_network(spec, 0)
    first = torch.cat([parameter.flatten() for parameter in plain.parameters()]).numpy(force=True)
    obs = from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype(dtype))
    for number in range(2):
        weights = first * (1 + number) + np.float32(0.3) * number
        nn.utils.vector_to_parameters(from_numpy(weights.copy()), plain.parameters())
        actor.load(weights)
        with torch.no_grad():
            learner.parameters.weights.copy_(from_numpy(weights))
        for rows in (obs, obs[:1]):
            plain.zero_grad()
            head, values = plain(rows)
            (head.square().sum() + values.sum()).backward()
            expected = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in plain.parameters()
            ]
            learned, learned_values, residuals = learner.forward(rows)
            acted = actor.step(rows.numpy())
            assert_array_equal(acted.head, learned)
            assert_array_equal(acted.values, learned_values)
            learner.backward(residuals, 2 * learned, torch.ones_like(learned_values))
            assert_close(
                (learned, learned_values, learner.parameters.gradient),
                (head.detach(), values.detach(), torch.cat([part.flatten() for part in expected])),
                rtol=1e3 * TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )


class MakesBuffer(Base):
    scale: Tensor

    def hidden(self, obs: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((3,), 0.5), persistent=False)
        return self.body(obs * self.scale).tanh()


def test_a_buffer_that_is_made_in_a_forward_pass_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"its buffer scale is made in a forward pass. Make it in the constructor"
    ):
        assert ModuleSpec(SPACES, MakesBuffer, {}, "float32").num_parameters


class Bits(nn.Module):
    """Reads a leaf of zeros and ones as codes."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(2, 8)
        self.head = nn.Linear(9, head_size)
        self.value = nn.Linear(9, 1)

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = torch.cat([self.codes(obs["bits"].long()).mean(1), obs["level"]], 1)
        return self.head(hidden), self.value(hidden).squeeze(-1)


def test_a_network_may_look_up_the_integers_of_a_leaf() -> None:
    obs = np.dtype([("bits", np.int8, (4,)), ("level", np.float32, (1,))])
    assert ModuleSpec(Spaces(obs, DISCRETE), Bits, {}, "float32").num_parameters


@contextmanager
def default_device() -> Iterator[None]:
    """Set one on which no tensor has numbers, as a program sets cuda."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    sizes: dict[str, Any] = {
        "num_samplers": 1,
        "num_steps": 16,
        "total_timesteps": 16,
        "minibatch_size": 16,
    }
    run_dir: Path = tmp_path_factory.mktemp("unusual") / "run"
    options: dict[str, Any] = {"num_actors": 0, "progress": "off", "run_dir": run_dir}
    return dppo.train(dppo.Config(env_id="Pendulum-v1", model=Base, **sizes, **options))


@pytest.mark.parametrize("state", [default_device, autocast, torch.inference_mode])
def test_a_policy_is_loaded_and_acts_whatever_a_program_has_set(
    trained: dppo.Result, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obs = np.ones((2, 3), np.float32)
    policy = dppo.load_policy(trained)
    wanted = policy.act(obs)
    monkeypatch.setattr(user_module, "_facts_of_class", WeakKeyDictionary())
    with state():
        assert np.array_equal(policy.act(obs), wanted)
        assert np.array_equal(dppo.load_policy(trained).act(obs), wanted)
