"""The default network, two separate multilayer perceptrons, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from typing_extensions import override

from dppo.ppo.distributions import Distribution, distribution_of
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces


@dataclass(frozen=True, slots=True)
class MLPSpec(NetworkSpec):
    """Two trunks with hidden layers of equal sizes, one for the policy and one for the value (details 13 and 26).

    The free part of the head, `log_std` of a Gaussian, is one parameter vector for all observations.
    """

    obs_shape: tuple[int, ...]
    distribution: Distribution
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: str
    state_dependent_std: bool = False

    state_size = 0

    @staticmethod
    def of(
        spaces: Spaces, hidden_sizes: tuple[int, ...], activation: str, dtype: str, *, state_dependent_std: bool = False
    ) -> MLPSpec:
        """Return the network for these spaces."""
        distribution = distribution_of(spaces.actions, state_dependent_std=state_dependent_std)
        return MLPSpec(spaces.obs.shape, distribution, hidden_sizes, activation, dtype, state_dependent_std)

    @property
    def obs_size(self) -> int:
        """Return the number of elements of one observation."""
        return math.prod(self.obs_shape)

    @property
    def policy_outputs(self) -> int:
        """Return the number of outputs of the policy trunk."""
        return self.distribution.head_size - self.distribution.free_size

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for trunk, outputs in (("policy", self.policy_outputs), ("value", 1)):
            sizes = (self.obs_size, *self.hidden_sizes, outputs)
            for layer, (inputs, units) in enumerate(pairwise(sizes)):
                shapes[f"{trunk}.{2 * layer}.weight"] = units, inputs  # as torch numbers them: activations count too
                shapes[f"{trunk}.{2 * layer}.bias"] = (units,)
        if self.distribution.free_size:
            shapes["log_std"] = (self.distribution.free_size,)
        return shapes

    @override
    def as_json(self) -> dict[str, Any]:
        described = {"hidden_sizes": list(self.hidden_sizes), "activation": self.activation, "dtype": self.dtype}
        return described | {"state_dependent_std": True} if self.state_dependent_std else described
