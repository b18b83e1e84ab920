"""FlatAdam: Adam on one vector; and a learning rate that adapts to the KL divergence of old and new policy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from dppo.ppo.networks.parameters import FlatParameters

ADAPTED = "learning_rate"  # its name in the state of the optimizer
OPTIONS: dict[str, Any] = {"fused": True, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
OPTIONS |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-5}  # detail 3; torch's default for eps is 1e-8
LOWEST, HIGHEST, FACTOR = 1e-5, 1e-2, 1.5


class FlatAdam:
    """Adam for all parameters at once, in one pass over memory.

        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
        w <- w - lr / (1 - b1^k) * m / (sqrt(v) / sqrt(1 - b2^k) + eps)

    Source: Kingma, Ba, arXiv:1412.6980, algorithm 1. torch's fused kernel does the arithmetic, because these formulas,
    written line by line, would read the memory several times. The kernel is called without `torch.optim.Adam`, whose
    bookkeeping for many tensors and options takes a noticeable part of a small minibatch.
    """

    def __init__(self, parameters: FlatParameters) -> None:
        self._weights = parameters.weights.detach()
        self._gradient = parameters.gradient
        self._mean = torch.zeros_like(self._weights)
        self._square = torch.zeros_like(self._weights)
        # float32 for weights of any dtype, as in torch's own Adam: exact up to 16 million steps.
        self._steps = torch.zeros((), dtype=torch.float32, device=self._weights.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the weights in place from the stored gradient."""
        state = [self._mean], [self._square], list[Tensor](), [self._steps]
        adam([self._weights], [self._gradient], *state, lr=learning_rate, **OPTIONS)

    def state(self) -> dict[str, np.ndarray]:
        """Return both moments [P] and the number of steps, under torch's names; the next step may overwrite them."""
        return {
            "exp_avg": self._mean.numpy(force=True),
            "exp_avg_sq": self._square.numpy(force=True),
            "step": np.array(int(self._steps)),
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._mean.copy_(torch.tensor(state["exp_avg"]))
        self._square.copy_(torch.tensor(state["exp_avg_sq"]))
        self._steps.fill_(float(state["step"]))


def adapted_rate(learning_rate: float, kl: float, desired_kl: float) -> float:
    """Return the learning rate for the next SGD step: lower if the policy moves too fast, higher if too slowly.

        kl > 2 desired: max(1e-5, rate / 1.5)        kl < desired / 2: min(1e-2, 1.5 rate)

    Source: rsl_rl, `algorithms/ppo.py`.
    """
    if kl > 2 * desired_kl:
        return max(LOWEST, learning_rate / FACTOR)
    if kl < desired_kl / 2:
        return min(HIGHEST, learning_rate * FACTOR)
    return learning_rate
