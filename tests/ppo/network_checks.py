"""Random weights for a network, and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from builders import random_weights

from dppo.ppo.networks.network import LearningNetwork, NetworkSpec, RecurrentInputs


def load_random(network: LearningNetwork, spec: NetworkSpec, scale: float = 0.4) -> None:
    """Give the network the weights of `builders.agent_of`."""
    with torch.no_grad():
        network.parameters.weights.copy_(torch.from_numpy(random_weights(spec, scale=scale)))


def gradient_of(
    network: LearningNetwork, *pieces: Any, recurrent: RecurrentInputs | None = None
) -> np.ndarray:
    """Return the gradient of the sum of head ** 2 and exp(values) over the pieces of a batch.

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
