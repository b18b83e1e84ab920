"""PPOModel: the policy as a trainer uses it; and what changes its weights: FlatAdam, and PopArt."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from dppo.errors import ConfigError
from dppo.ppo.distributions.base import ScoresWithGradient
from dppo.ppo.exchange.moments import Moments
from dppo.ppo.exchange.scales import VALUE_TARGETS, ValueScale, moments_of_targets
from dppo.ppo.learning.batch import Batch, zero_batch
from dppo.ppo.learning.parallel import Parallel, moments_of_all, row_moments
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike

ADAPTED = "learning_rate"  # its name in the state of the optimizer
OPTIONS: dict[str, Any] = {"fused": True, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
OPTIONS |= {"beta1": 0.9, "eps": 1e-5}  # detail 3; torch's default for eps is 1e-8
MEMORY = 1000  # steps: beta2 is 0.999
LOWEST, HIGHEST, FACTOR = 1e-5, 1e-2, 1.5
NONE = slice(0, 0)
LAST_LAYER = re.compile(r"value(?:\.(\d+))?\.(weight|bias)")


class Scored(NamedTuple):
    """Results of one forward pass; valid until the next."""

    policy: ScoresWithGradient
    values: Tensor
    """[rows]"""
    residuals: Any
    """State of the network for `backward`."""


class PPOModel:
    """Score actions under the weights in training: a learning network and its distribution.

    `PPOAgent` is the same function in an actor; tests compare the two.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        seed: int,
        *,
        device: str = "cpu",
        zeros_like: ZerosLike | None = None,
        log_std: float | None = None,
    ) -> None:
        """Draw the initial weights from `seed` alone; `log_std` is that of the free deviations, None: the network's."""
        self.spec = spec
        self.network = learning_network(spec, seed, device=device, zeros_like=zeros_like)
        self.parameters = self.network.parameters
        if log_std is not None:
            self.parameters.weights.data[free_deviations(spec)] = log_std

    def forward(
        self, obs: Any, actions: Tensor, masks: Tensor | None = None, recurrent: RecurrentInputs | None = None
    ) -> Scored:
        """Score `actions` [rows, *A] and estimate values, given observations [rows, *O] as a `Batch` holds them.

        `masks`: the choices that were allowed, [rows, M]; None if all were. `recurrent`: of the sequences that the rows
        are, for a network with memory.
        """
        head, values, residuals = self.network.forward(obs, recurrent)
        if masks is not None:
            head = self.spec.distribution.limited_in_torch(head, masks)
        return Scored(self.spec.distribution.scores_with_gradient(head, actions), values, residuals)

    def values(self, obs: Any, recurrent: RecurrentInputs | None = None) -> Tensor:
        """Return the values [rows] of observations; the next forward pass does not overwrite them."""
        with torch.no_grad():
            return self.network.forward(obs, recurrent)[1].detach().clone()

    def log_probs(self, pieces: Iterable[Batch]) -> Tensor:
        """Return the log-probabilities of the actions of all `pieces`, one after the other."""
        with torch.no_grad():
            scored = (self.forward(one.obs, one.actions, one.masks, one.recurrent) for one in pieces)
            return torch.cat([one.policy.logprobs.clone() for one in scored])

    def backward(self, scored: Scored, by_logprobs: Tensor, by_entropies: Tensor | float, by_values: Tensor) -> None:
        """Store the gradient of every parameter, given the gradients of the scores of the last `forward`."""
        self.network.backward(scored.residuals, scored.policy.gradient(by_logprobs, by_entropies), by_values)


class FlatAdam:
    """Adam for all parameters at once, in one pass over memory.

        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
        w <- w - lr / (1 - b1^k) * m / (sqrt(v) / sqrt(1 - b2^k) + eps)

    Source: Kingma, Ba, arXiv:1412.6980, algorithm 1. torch's fused kernel does the arithmetic, because these formulas,
    written line by line, would read the memory several times. The kernel is called without `torch.optim.Adam`, whose
    bookkeeping for many tensors and options takes a noticeable part of a small minibatch.
    """

    def __init__(
        self, parameters: FlatParameters, memory: int = MEMORY, slowed: slice = NONE, share: float = 1.0
    ) -> None:
        """Begin with moments of zero; v is a mean of `memory` = 1 / (1 - b2) steps.

        `slowed`: the weights that take only `share` of each step.
        """
        self._beta2, self._slowed, self._share = 1 - 1 / memory, slowed, share
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
        before = self._weights[self._slowed].clone() if self._share < 1 else None
        adam([self._weights], [self._gradient], *state, lr=learning_rate, beta2=self._beta2, **OPTIONS)
        if before is not None:
            self._weights[self._slowed].sub_(before).mul_(self._share).add_(before)

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


def free_deviations(spec: NetworkSpec) -> slice:
    """Return where the deviations that depend on no observation are in the flat vector; an empty slice without any."""
    places = spec.unflatten(np.arange(spec.num_parameters)).get("log_std")
    return NONE if places is None else slice(places.flat[0], places.flat[-1] + 1)


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


class PopArt:
    """Standardize targets by all targets seen so far, and correct the last layer so that no value changes.

        w' = w s / s'        b' = (s b + m - m') / s'        with mean m, deviation s before and m', s' after

    Source: van Hasselt et al., "Learning values across many orders of magnitude" (arXiv:1602.07714), proposition 1.
    Deviation: moments are those of all targets, not of the recent ones, as in Andrychowicz et al. (arXiv:2006.05990).
    """

    def __init__(self, model: PPOModel) -> None:
        """Begin without any target; raise ConfigError if the module has no linear layer called `value`."""
        self._model = model
        self._weight, self._bias = last_layer(model.spec)
        self._moments = Moments.empty(())
        self._check_end()

    def _check_end(self) -> None:
        """Raise ConfigError if values are not what the last layer returns: its correction would change them."""
        flat = self._model.parameters.weights.data
        rows, kept = zero_batch(self._model.spec, 1, 1).to(flat.device), flat.clone()
        before = self._model.values(rows.obs, rows.recurrent)
        flat[self._weight] *= 2
        flat[self._bias] = 2 * flat[self._bias] + 1
        after = self._model.values(rows.obs, rows.recurrent)
        flat.copy_(kept)
        if not torch.allclose(after, 2 * before + 1, rtol=1e-2, atol=1e-2):
            raise ConfigError(
                "norm_value=True: the network changes what its layer `value` returns, so that values would jump with "
                "their unit. Return the numbers of that layer as they are, or use `norm_value=False`."
            )

    @property
    def scale(self) -> ValueScale:
        """Return the unit of the network's values."""
        return ValueScale.of(self._moments)

    def learn(self, batch: Batch, parallel: Parallel) -> Batch:
        """Count the targets of `batch` on all ranks, change the unit, and return the batch with values in it."""
        weights = None if batch.weights is None else batch.weights.double().unsqueeze(0)
        own = row_moments(batch.returns.double().unsqueeze(0), weights)
        count, mean, m2 = moments_of_all(own, parallel)[0].tolist()
        before = self.scale
        self._moments = self._moments.merge(Moments(count, np.array(mean), np.array(m2)))
        after = self.scale
        with torch.no_grad():
            flat = self._model.parameters.weights
            flat[self._weight] *= before.std / after.std
            flat[self._bias] *= before.std / after.std
            flat[self._bias] += (before.mean - after.mean) / after.std
        return replace(batch, values=after.standardize(batch.values), returns=after.standardize(batch.returns))

    def state(self) -> dict[str, np.ndarray]:
        """Return the moments as a named array, which is part of the trainer's state."""
        moments = self._moments
        return {VALUE_TARGETS: np.array([moments.count, float(moments.mean), float(moments.m2)])}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`; the weights belong to it already."""
        self._moments = moments_of_targets(state)


def last_layer(spec: NetworkSpec) -> tuple[slice, slice]:
    """Return where weights and bias of the last layer of values are in the flat vector.

    It is the linear layer called `value`, or the last one of a sequence of that name. Raise ConfigError without one.
    """
    places = spec.unflatten(np.arange(spec.num_parameters))
    module: Any = spec.module(0)
    value = getattr(module, "value", None)
    parts = [*value] if isinstance(value, nn.Sequential) else [value]
    ends = next((one for one in reversed(parts) if not isinstance(one, nn.Flatten | nn.Identity)), None)
    last = {kind: slice(places[name].flat[0], places[name].flat[-1] + 1) for kind, name in value_layer(places).items()}
    if set(last) != {"weight", "bias"} or not isinstance(ends, nn.Linear):
        raise ConfigError(
            "norm_value=True: the network has no linear layer with one output and a bias that is called `value`, or "
            "that ends a Sequential of that name, to correct when the unit of values changes. Let values come from "
            "one, or use `norm_value=False`."
        )
    return last["weight"], last["bias"]


def value_layer(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the names of `weight` and `bias` of the last layer of values among named arrays; fewer without one."""
    found: dict[int, dict[str, str]] = {}
    for name, array in arrays.items():
        match = LAST_LAYER.fullmatch(name)
        if match and len(array) == 1:
            found.setdefault(int(match[1] or 0), {})[match[2]] = name
    return found[max(found)] if found else {}
