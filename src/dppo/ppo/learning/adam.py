"""FlatAdam: the optimizer; its settings with reuse, and a learning rate that is adapted to the KL."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from dppo.config.parts import ResolvedPPO
from dppo.ppo.learning.model import PPOModel, free_deviations
from dppo.ppo.networks.parameters import FlatParameters

ADAPTED = "learning_rate"  # name of an adapted learning rate in the state of the optimizer
OPTIONS: dict[str, Any] = {
    "fused": True,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "beta1": 0.9,
}
EPSILON = 1e-5  # detail 3; torch's default is 1e-8
MEMORY = 1000  # steps: beta2 is 0.999
MIN_RATE = 1e-5
MAX_RATE = 1e-2
RATE_FACTOR = 1.5
NO_WEIGHTS = slice(0, 0)


class FlatAdam:
    """Adam for all parameters at once, in one pass over memory.

        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
        w <- w - lr / (1 - b1^k) * m / (sqrt(v) / sqrt(1 - b2^k) + eps)

    Source: Kingma, Ba, arXiv:1412.6980, algorithm 1. torch's fused kernel does the arithmetic, because these formulas,
    written line by line, would read the memory several times. The kernel is called without `torch.optim.Adam`, whose
    bookkeeping for many tensors and options takes a noticeable part of a small minibatch.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        memory: int = MEMORY,
        slowed: slice = NO_WEIGHTS,
        share: float = 1.0,
        eps: float = EPSILON,
    ) -> None:
        """Begin with moments of zero; v is a mean of `memory` = 1 / (1 - b2) steps.

        `slowed`: the weights that take only `share` of each step.
        """
        self._eps = eps
        self._beta2 = 1 - 1 / memory
        self._slowed = slowed
        self._share = share
        self._weights = parameters.weights.detach()
        self._gradient = parameters.gradient
        self._mean = torch.zeros_like(self._weights)
        self._square = torch.zeros_like(self._weights)
        # float32 for weights of any dtype, as in torch's own Adam: exact up to 16 million steps.
        self._steps = torch.zeros((), dtype=torch.float32, device=self._weights.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the weights in place from the stored gradient."""
        weights_before = self._weights[self._slowed].clone() if self._share < 1 else None
        adam(
            [self._weights],
            [self._gradient],
            [self._mean],
            [self._square],
            list[Tensor](),
            [self._steps],
            lr=learning_rate,
            beta2=self._beta2,
            eps=self._eps,
            **OPTIONS,
        )
        if weights_before is not None:
            self._weights[self._slowed].sub_(weights_before).mul_(self._share).add_(weights_before)

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


def optimizer_for(model: PPOModel, ppo: ResolvedPPO) -> FlatAdam:
    """Return the optimizer of a model; with reuse, two of its rates follow env steps as they do without.

    With `reuse` R, each env step is followed by R times as many SGD steps. (1) Without standardized advantages, the
    second moment averages R times as many steps; otherwise it decays during long uneventful phases, and the next reward
    causes too large a step. (2) State-independent standard deviations of two or more components take 1 / R of each
    step, so that exploration lasts equally long; the deviation of a single component starts at 1 and is not slowed.
    """
    memory = MEMORY if ppo.norm_adv else MEMORY * ppo.reuse
    deviations = free_deviations(model.spec)
    components = deviations.stop - deviations.start
    slowed = deviations if components > 1 else NO_WEIGHTS
    return FlatAdam(model.parameters, memory, slowed, 1 / ppo.reuse)


def adapted_rate(learning_rate: float, kl: float, desired_kl: float, max_rate: float) -> float:
    """Return the learning rate for the next SGD step: lower if the policy moves too fast, higher if too slowly.

        kl > 2 desired: max(1e-5, rate / 1.5)        kl < desired / 2: min(max_rate, 1.5 rate)

    Source: rsl_rl, `algorithms/ppo.py`.
    """
    if kl > 2 * desired_kl:
        return max(MIN_RATE, learning_rate / RATE_FACTOR)
    if kl < desired_kl / 2:
        return min(max_rate, learning_rate * RATE_FACTOR)
    return learning_rate
