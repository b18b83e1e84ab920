"""PPOAgent: the policy as an actor uses it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dppo.ppo.distributions import allowed
from dppo.ppo.exchange.inputs import normalized, scale_for, unprocessed_inputs
from dppo.ppo.exchange.normalizer import ObsScale, ValueScale
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.building import acting_network
from dppo.ppo.networks.network import NetworkSpec, Outputs
from dppo.spaces.spaces import MaskSource, is_image, masks_of, without_mask


class Decision(NamedTuple):
    """The agent's actions for E observations, and what the sampler records with them."""

    actions: np.ndarray
    """[..., E, *A]"""
    head: np.ndarray
    """[..., E, H], input of `PPOAgent.log_prob`."""
    values: np.ndarray
    """[..., E]"""
    state: np.ndarray | None = None
    """[..., E, S] after the step, of a network with memory."""


class PPOAgent:
    """Choose actions and estimate values under the weights of a snapshot.

    Combines an acting network with its distribution. Observations may have leading axes, so that several samplers act
    together; each gets the same bits as it would alone.
    """

    def __init__(self, spec: NetworkSpec, mask: MaskSource | None = None) -> None:
        """Build the acting network.

        Args:
            mask: source of the action masks that observations are stored with; None if they have none.
        """
        self.spec = spec
        self.mask = mask
        self.distribution = spec.distribution
        self.state_size = spec.state_size
        self._network = acting_network(spec)
        self._may_be_images = is_image(np.dtype((np.uint8, spec.obs_shape)))
        self._dtype = np.dtype(spec.dtype)
        self._obs_scale: ObsScale | None = None
        self._value_scale: ValueScale | None = None
        self._scales: dict[np.dtype[Any], ObsScale | None] = {}  # by the dtype of observations

    def load(self, snapshot: PolicySnapshot) -> None:
        """Use `snapshot` from now on. Its arrays are not modified."""
        self._network.load(snapshot.weights)
        self._obs_scale, self._value_scale = snapshot.obs_scale, snapshot.value_scale
        self._scales = {}

    def start(self, *rows: int) -> np.ndarray:
        """Return the state [*rows, S] with which episodes start: zeros."""
        return np.zeros((*rows, self.state_size), self._dtype)

    def act(self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None = None) -> Decision:
        """Sample an action for each row of `obs` [..., E, *O], with `noise` [..., E, n] from `distribution.noise`.

        Args:
            state: [..., E, S] before the step, of a network with memory.
        """
        head, values, after = self._outputs(obs, state)
        return Decision(self.distribution.sample(head, noise), head, values, after)

    def decide(self, obs: np.ndarray, state: np.ndarray | None = None) -> Decision:
        """Take the most likely action for each row of `obs` [..., E, *O]; `state` as in `act`."""
        head, values, after = self._outputs(obs, state)
        return Decision(self.distribution.mode(head), head, values, after)

    def values(self, obs: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """Return the value of each row of `obs` [..., E, *O]; `state` as in `act`."""
        return self._outputs(obs, state).values

    def log_prob(self, head: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return log-probabilities [...] of `actions` [..., *A] under the heads [..., H] they were sampled from."""
        return self.distribution.log_prob(head, actions)

    def readable(self, obs: np.ndarray) -> np.ndarray:
        """Return a view of stored observations [...] without their masks."""
        return obs if self.mask is None else without_mask(obs, self.mask)

    def masks(self, obs: np.ndarray) -> np.ndarray | None:
        """Return the masks [..., M] of stored observations [...]; None if there are none."""
        return None if self.mask is None else masks_of(obs)

    def _outputs(self, stored: np.ndarray, state: np.ndarray | None) -> Outputs:
        obs, masks = self.readable(stored), self.masks(stored)
        scale = self._scale(obs.dtype)
        if obs.dtype.names is not None or (self._may_be_images and obs.dtype == np.uint8):
            outputs = self._network.step(unprocessed_inputs(obs, self._dtype, scale), state)
        else:
            inputs = obs.astype(self._dtype) if scale is None else normalized(obs, self._dtype, scale)
            outputs = self._network.step(inputs, state)
        if masks is not None:
            outputs = outputs._replace(head=allowed(outputs.head, masks))
        if self._value_scale is not None:
            outputs = outputs._replace(values=self._value_scale.restore(outputs.values))
        return outputs

    def _scale(self, obs: np.dtype[Any]) -> ObsScale | None:
        if self._obs_scale is not None and obs not in self._scales:
            self._scales[obs] = scale_for(self._obs_scale, obs, self._dtype)
        return self._scales.get(obs)
