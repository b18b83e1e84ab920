"""Networks that use torch in ways of their own compute the same in actors and learners as they do in torch alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from builders import DISCRETE, make_config
from numpy.random import default_rng
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
        used = [nn.Linear(3, 16), nn.Tanh()]
        unused = [nn.Linear(16, 16), nn.ReLU()]
        self.net = nn.Sequential(*used, *unused)

    def hidden(self, obs: Tensor) -> Tensor:
        return self.net[:2](obs)


class Copied(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        other = copy.deepcopy(self.body)
        other.bias.data += 1
        return (other(obs) + self.body(obs)).tanh()


class GeneratedBias(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        generated = {"bias": self.body.bias + self.shift}
        return functional_call(self.body, generated, (obs,)).tanh()


class GeneratedBiasOfChain(Base):
    net: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh())

    def hidden(self, obs: Tensor) -> Tensor:
        generated = {"0.bias": self.net[0].bias + self.shift}
        return functional_call(self.net, generated, (obs,))


class GeneratedBiasOfConvolution(Base):
    conv: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.conv = nn.Conv1d(1, 16, 3)

    def hidden(self, obs: Tensor) -> Tensor:
        generated = {"bias": self.conv.bias + self.shift}
        channel = obs[:, None]
        return functional_call(self.conv, generated, (channel,)).flatten(1)


class Rotated(Base):
    turns: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        angles = torch.arange(8.0)
        self.register_buffer("turns", torch.polar(torch.ones(8), angles))

    def hidden(self, obs: Tensor) -> Tensor:
        pairs = self.body(obs).view(-1, 8, 2)
        turned = torch.view_as_complex(pairs) * self.turns
        return torch.view_as_real(turned).flatten(1)


class Mapped(Base):
    def hidden(self, obs: Tensor) -> Tensor:
        return vmap(lambda tensor: self.body(tensor).tanh())(obs)


class Potential(Base):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.back = nn.Linear(3, 16)

    def hidden(self, obs: Tensor) -> Tensor:
        force = grad(self.potential)(obs)
        return self.back(force)

    def potential(self, obs: Tensor) -> Tensor:
        return self.body(obs).tanh().sum()


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
            self.linear(3, 65),
            nn.Tanh(),
            shared,
            nn.Tanh(),
            shared,
            nn.ReLU(),
            self.linear(65, 16),
        )  # fmt: skip

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


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def computed_by_torch(plain: Base, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return head and values, and the gradient of the sum of head ** 2 and values."""
    plain.zero_grad()
    head, values = plain(rows)
    loss = head.square().sum() + values.sum()
    loss.backward()
    gradients = []
    for parameter in plain.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradients.append(gradient)

    return head.detach(), values.detach(), flat(gradients)


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
    first = flat(plain.parameters()).numpy(force=True)
    actor = acting_network(spec)
    learner = learning_network(spec, 0)
    random = default_rng(0).normal(size=(8, 3))
    obs = from_numpy(random.astype(dtype))
    tolerance = TOLERANCE[dtype]

    for weights in (first, 2 * first + np.float32(0.3)):
        as_tensor = from_numpy(weights.copy())
        nn.utils.vector_to_parameters(as_tensor, plain.parameters())
        actor.load(weights)
        with torch.no_grad():
            learner.parameters.weights.copy_(as_tensor)
        for rows in (obs, obs[:1]):
            expected = computed_by_torch(plain, rows)
            acted = actor.step(rows.numpy())
            head, values, residuals = learner.forward(rows)
            assert_array_equal(acted.head, head)
            assert_array_equal(acted.values, values)
            learner.backward(residuals, 2 * head, torch.ones_like(values))
            learned = (head, values, learner.parameters.gradient)
            assert_close(learned, expected, rtol=1e3 * tolerance, atol=tolerance)


class MakesBuffer(Base):
    scale: Tensor

    def hidden(self, obs: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((3,), 0.5), persistent=False)
        return self.body(obs * self.scale).tanh()


def test_a_buffer_that_is_made_in_a_forward_pass_is_refused() -> None:
    spec = ModuleSpec(SPACES, MakesBuffer, {}, "float32")
    words = r"its buffer scale is made in a forward pass. Make it in the constructor"
    with pytest.raises(ConfigError, match=words):
        assert spec.num_parameters


class Bits(nn.Module):
    """Reads a leaf of zeros and ones as codes."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(2, 8)
        self.head = nn.Linear(9, head_size)
        self.value = nn.Linear(9, 1)

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        codes = self.codes(obs["bits"].long())
        hidden = torch.cat([codes.mean(1), obs["level"]], 1)
        return self.head(hidden), self.value(hidden).squeeze(-1)


def test_a_network_may_look_up_the_integers_of_a_leaf() -> None:
    bits = ("bits", np.int8, (4,))
    level = ("level", np.float32, (1,))
    spaces = Spaces(np.dtype([bits, level]), DISCRETE)
    spec = ModuleSpec(spaces, Bits, {}, "float32")
    assert spec.num_parameters


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
    folder = tmp_path_factory.mktemp("unusual")
    settings = {
        "env_id": "Pendulum-v1",
        "model": Base,
        "num_samplers": 1,
        "num_steps": 16,
        "total_timesteps": 16,
        "minibatch_size": 16,
        "num_actors": 0,
        "progress": "off",
        "run_dir": folder / "run",
    }
    return dppo.train(make_config(settings))


@pytest.mark.parametrize("state", [default_device, autocast, torch.inference_mode])
def test_a_policy_is_loaded_and_acts_whatever_a_program_has_set(
    trained: dppo.Result, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obs = np.ones((2, 3), np.float32)
    policy = dppo.load_policy(trained)
    expected = policy.act(obs)
    monkeypatch.setattr(user_module, "_facts_of_class", WeakKeyDictionary())

    with state():
        acted = policy.act(obs)
        loaded = dppo.load_policy(trained)
        acted_by_loaded = loaded.act(obs)

    assert np.array_equal(acted, expected)
    assert np.array_equal(acted_by_loaded, expected)
