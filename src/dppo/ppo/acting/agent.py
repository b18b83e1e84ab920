"""PPOAgent: the policy as an actor uses it."""

from __future__ import annotations

import numpy as np

from dppo.ppo.exchange.inputs import reader_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.networks.choice import acting_network
from dppo.ppo.networks.network import ActingNetwork, NetworkOutputs, NetworkSpec
from dppo.spaces.spaces import MaskSource, masks_of


class PPOAgent:
    """Choose actions and estimate values under the weights of a snapshot.

    Observations may have leading axes, so that several samplers act together; each gets the same bits as if it acted
    alone.
    """

    def __init__(
        self, spec: NetworkSpec, mask: MaskSource | None = None, *, estimates_values: bool = True
    ) -> None:
        """Keep the network's spec; `mask` is the source of masks in stored observations, None if there are none.

        Without `estimates_values`, values are zero, and cost nothing if the network is built in.
        """
        self.spec = spec
        self.distribution = spec.distribution
        self.state_size = spec.state_size
        self.estimates_values = estimates_values
        self._network: ActingNetwork | None = None
        self._dtype = np.dtype(spec.dtype)
        self._reader = reader_of(spec.spaces.obs, self._dtype)
        self._value_scale: ValueScale | None = None
        self._obs_fields: str | list[str] | None = None
        """Fields of stored observations that hold no mask; None: all."""
        if mask == "leaf":
            self._obs_fields = list(spec.spaces.obs.names or ())
        elif mask is not None:
            self._obs_fields = "obs"

    def build(self) -> ActingNetwork:
        """Build the network if it is not there yet, and return it.

        Of several samplers that act together, only the first one's agent acts. A user's network may take seconds.
        """
        if self._network is None:
            self._network = acting_network(self.spec, estimates_values=self.estimates_values)
        return self._network

    def load(self, snapshot: PolicySnapshot) -> None:
        """Use `snapshot` from now on. Its arrays are not modified."""
        self.build().load(snapshot.weights)
        self._reader.load(snapshot.obs_scale)
        self._value_scale = snapshot.value_scale

    def start(self, *rows: int) -> np.ndarray:
        """Make the network state [*rows, S] at the start of an episode: zeros."""
        return np.zeros((*rows, self.state_size), self._dtype)

    def act(
        self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None = None
    ) -> tuple[np.ndarray, NetworkOutputs]:
        """Sample an action for each row of `obs` [..., E, *O], with `noise` [..., E, n] from `distribution.noise`.

        Args:
            state: for a network with memory, its state [..., E, S] before the step.

        Returns:
            The actions, and the outputs of the network.
        """
        outputs = self.outputs(obs, state)
        return self.distribution.sample(outputs.head, noise), outputs

    def decide(
        self, obs: np.ndarray, state: np.ndarray | None = None
    ) -> tuple[np.ndarray, NetworkOutputs]:
        """Return the most likely action for each row of `obs` [..., E, *O]; `state` and the result are as in `act`."""
        outputs = self.outputs(obs, state)
        return self.distribution.mode(outputs.head), outputs

    def outputs(self, obs: np.ndarray, state: np.ndarray | None = None) -> NetworkOutputs:
        """Return the outputs for each row of `obs` [..., E, *O]: masked heads, and values in units of rewards.

        `state` is as in `act`.
        """
        unmasked, masks = self.split(obs)
        assert self._network is not None, "load a snapshot first"
        outputs = self._network.step(self._reader.read(unmasked), state)
        if masks is not None:
            head = self.distribution.limited(outputs.head, masks)
            outputs = outputs._replace(head=head)
        if self._value_scale is not None:
            values = self._value_scale.restore(outputs.values)
            outputs = outputs._replace(values=values)
        return outputs

    def split(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a view of stored observations [...] without their masks, and the masks [..., M] or None."""
        if self._obs_fields is None:
            return stored, None
        return stored[self._obs_fields], masks_of(stored)
