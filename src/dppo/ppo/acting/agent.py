"""PPOAgent: the policy as an actor uses it."""

from __future__ import annotations

import numpy as np

from dppo.ppo.exchange.inputs import network_inputs, scale_for
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ObsScale, ValueScale
from dppo.ppo.networks.choice import acting_network
from dppo.ppo.networks.network import NetworkSpec, Outputs
from dppo.spaces.spaces import MaskSource, masks_of


class PPOAgent:
    """Choose actions and estimate values under the weights of a snapshot.

    Observations may have leading axes, so that several samplers act together; each gets the same bits as alone.
    """

    def __init__(self, spec: NetworkSpec, mask: MaskSource | None = None) -> None:
        """Build the acting network; `mask` is the source of the masks that observations are stored with."""
        self.spec = spec
        self.distribution = spec.distribution
        self.state_size = spec.state_size
        self._network = acting_network(spec)
        self._dtype = np.dtype(spec.dtype)
        self._obs_scale: ObsScale | None = None
        self._value_scale: ValueScale | None = None
        self._obs_fields: str | list[str] | None = None
        """Fields of stored observations that hold no mask; None: all."""
        if mask == "leaf":
            self._obs_fields = list(spec.spaces.obs.names or ())
        elif mask is not None:
            self._obs_fields = "obs"

    def load(self, snapshot: PolicySnapshot) -> None:
        """Use `snapshot` from now on. Its arrays are not modified."""
        self._network.load(snapshot.weights)
        self._obs_scale = scale_for(snapshot.obs_scale, self.spec.spaces.obs, self._dtype)
        self._value_scale = snapshot.value_scale

    def start(self, *rows: int) -> np.ndarray:
        """Return the state [*rows, S] with which episodes start: zeros."""
        return np.zeros((*rows, self.state_size), self._dtype)

    def act(
        self,
        obs: np.ndarray,
        noise: np.ndarray,
        state: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Outputs]:
        """Sample an action for each row of `obs` [..., E, *O], with `noise` [..., E, n] from `distribution.noise`.

        `state`: [..., E, S] before the step, of a network with memory.
        """
        outputs = self._outputs(obs, state)
        return self.distribution.sample(outputs.head, noise), outputs

    def decide(
        self, obs: np.ndarray, state: np.ndarray | None = None
    ) -> tuple[np.ndarray, Outputs]:
        """Take the most likely action for each row of `obs` [..., E, *O]; `state` as in `act`."""
        outputs = self._outputs(obs, state)
        return self.distribution.mode(outputs.head), outputs

    def values(self, obs: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """Return the value of each row of `obs` [..., E, *O]; `state` as in `act`."""
        return self._outputs(obs, state).values

    def split(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return stored observations [...] without their masks, as a view, and their masks [..., M] or None."""
        if self._obs_fields is None:
            return stored, None
        return stored[self._obs_fields], masks_of(stored)

    def _outputs(self, stored: np.ndarray, state: np.ndarray | None) -> Outputs:
        obs, masks = self.split(stored)
        inputs = network_inputs(obs, self.spec.spaces.obs, self._dtype, self._obs_scale)
        outputs = self._network.step(inputs, state)
        if masks is not None:
            head = self.distribution.limited(outputs.head, masks)
            outputs = outputs._replace(head=head)
        if self._value_scale is not None:
            values = self._value_scale.restore(outputs.values)
            outputs = outputs._replace(values=values)
        return outputs
