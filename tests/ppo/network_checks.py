"""Checks that hold for every network, with memory or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_same_bytes, random_weights

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.network import LearningNetwork, NetworkSpec, RecurrentInputs


def load_random(network: LearningNetwork, spec: NetworkSpec) -> None:
    """Give the network the weights of `builders.agent_of`."""
    with torch.no_grad():
        network.parameters.weights.copy_(torch.from_numpy(random_weights(spec)))


def gradient_of(
    network: LearningNetwork, *pieces: Any, recurrent: RecurrentInputs | None = None
) -> np.ndarray:
    """Return the gradient of `loss_of` the pieces of a batch together.

    The network's gradient starts as a loud number, so that one that is added to and not replaced shows.
    """
    gradient = network.parameters.gradient
    total = np.zeros_like(gradient.numpy())
    for obs in pieces:
        gradient.fill_(1e6)
        head, values, residuals = network.forward(obs, recurrent)
        network.backward(residuals, (2 * head).clone(), values.exp())
        total += gradient.numpy()
    return total


def loss_of(network: LearningNetwork, obs: Any, recurrent: RecurrentInputs | None = None) -> float:
    """Return a loss that depends on all outputs."""
    head, values, _ = network.forward(obs, recurrent)
    return float(head.square().sum() + values.exp().sum())


def gradient_by_differences(
    gradient: np.ndarray,
    network: LearningNetwork,
    obs: Any,
    indices: Iterable[int],
    *,
    recurrent: RecurrentInputs | None = None,
    rel: float = 1e-3,
    atol: float = 1e-5,
) -> None:
    """Compare elements of the gradient of a network in float64 with central differences of `loss_of`."""
    weights = network.parameters.weights.data
    for index in indices:
        kept = weights[index].item()
        losses = []
        for step in (1e-6, -1e-6):
            weights[index] = kept + step
            losses.append(loss_of(network, obs, recurrent))
        weights[index] = kept
        difference = (losses[0] - losses[1]) / 2e-6
        assert gradient[index] == pytest.approx(difference, rel=rel, abs=atol)


def acting_together(agent: PPOAgent, obs: np.ndarray, state: np.ndarray | None = None) -> None:
    """Check that samplers that act together, on `obs` [samplers, rows, *O], get the bits of each alone."""
    samplers, rows = obs.shape[:2]
    dtype = agent.spec.dtype
    noise = np.stack(
        [
            agent.distribution.noise(np.random.default_rng(s), 1, rows, dtype)[0]
            for s in range(samplers)
        ]
    )
    together = agent.act(obs, noise, state)
    best = agent.decide(obs, state)
    values = agent.values(obs, state)
    assert values.shape == together[1].values.shape == (samplers, rows)
    for s in range(samplers):
        sampler_state = None if state is None else state[s]
        pairs: list[Any] = [(values, agent.values(obs[s], sampler_state))]
        for together_result, alone_result in (
            (together, agent.act(obs[s], noise[s], sampler_state)),
            (best, agent.decide(obs[s], sampler_state)),
        ):
            pairs += [
                (together_result[0], alone_result[0]),
                *zip(together_result[1], alone_result[1], strict=True),
            ]
        for stacked, alone in pairs:
            assert_same_bytes(None if stacked is None else stacked[s], alone)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Set torch's default dtype, as an environment in the same process may do."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parameters_of(make: Callable[[str], NetworkSpec], dtype: str) -> None:
    """Check the parameters of a network that `make` describes for a dtype.

    Flat weights and named parameters are the same numbers. They follow from their seed, not from torch's global state
    or default dtype. Descriptions are compared by value.
    """
    spec = make(dtype)
    state = torch.get_rng_state()
    weights = learning_network(spec, 3).parameters.weights.detach().numpy()
    assert torch.equal(torch.get_rng_state(), state)
    assert weights.shape == (spec.num_parameters,)
    assert str(weights.dtype) == dtype
    named = spec.unflatten(weights)
    shapes = {name: array.shape for name, array in named.items()}
    assert shapes == dict(spec.shapes)
    np.testing.assert_array_equal(spec.flatten(dict(reversed(named.items()))), weights)
    torch.rand(10)
    with float64_by_default():
        again, other = (
            learning_network(spec, seed).parameters.weights.detach().numpy() for seed in (3, 4)
        )
    np.testing.assert_array_equal(again, weights)
    assert not np.array_equal(other, weights)
    other_dtype = "float64" if dtype == "float32" else "float32"
    assert make(dtype) == spec
    assert make(other_dtype) != spec
    assert make(dtype).as_json() == spec.as_json()
