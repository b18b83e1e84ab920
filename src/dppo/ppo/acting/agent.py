"""PPOAgent: the policy as an actor uses it; and the recurrent states of several samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.ppo.distributions.base import allowed
from dppo.ppo.exchange.normalizer import ObsScale, ValueScale, normalized, scale_for, unprocessed_inputs
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.choice import acting_network
from dppo.ppo.networks.network import NetworkSpec, Outputs
from dppo.spaces.spaces import MaskSource, is_image, masks_of, without_mask

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float


class PPOAgent:
    """Choose actions and estimate values under the weights of a snapshot.

    Combines an acting network with its distribution. Observations may have leading axes, so that several samplers act
    together; each gets the same bits as it would alone.
    """

    def __init__(self, spec: NetworkSpec, mask: MaskSource | None = None) -> None:
        """Build the acting network; `mask` is the source of the masks that observations are stored with."""
        self.spec, self.distribution, self.state_size = spec, spec.distribution, spec.state_size
        self.mask = mask
        self._network = acting_network(spec)
        self._reads_image = is_image(spec.spaces.obs)
        self._dtype = np.dtype(spec.dtype)
        self._obs_scale: ObsScale | None = None
        self._value_scale: ValueScale | None = None

    def load(self, snapshot: PolicySnapshot) -> None:
        """Use `snapshot` from now on. Its arrays are not modified."""
        self._network.load(snapshot.weights)
        self._obs_scale = scale_for(snapshot.obs_scale, self.spec.spaces.obs, self._dtype)
        self._value_scale = snapshot.value_scale

    def start(self, *rows: int) -> np.ndarray:
        """Return the state [*rows, S] with which episodes start: zeros."""
        return np.zeros((*rows, self.state_size), self._dtype)

    def act(self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None = None) -> tuple[np.ndarray, Outputs]:
        """Sample an action for each row of `obs` [..., E, *O], with `noise` [..., E, n] from `distribution.noise`.

        `state`: [..., E, S] before the step, of a network with memory.
        """
        outputs = self._outputs(obs, state)
        return self.distribution.sample(outputs.head, noise), outputs

    def decide(self, obs: np.ndarray, state: np.ndarray | None = None) -> tuple[np.ndarray, Outputs]:
        """Take the most likely action for each row of `obs` [..., E, *O]; `state` as in `act`."""
        outputs = self._outputs(obs, state)
        return self.distribution.mode(outputs.head), outputs

    def values(self, obs: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """Return the value of each row of `obs` [..., E, *O]; `state` as in `act`."""
        return self._outputs(obs, state).values

    def split(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return stored observations [...] without their masks, as a view, and their masks [..., M] or None."""
        return (stored, None) if self.mask is None else (without_mask(stored, self.mask), masks_of(stored))

    def _outputs(self, stored: np.ndarray, state: np.ndarray | None) -> Outputs:
        obs, masks = self.split(stored)
        scale = self._obs_scale
        if obs.dtype.names is not None or self._reads_image:
            inputs: Any = unprocessed_inputs(obs, self._dtype, scale)
        else:
            inputs = obs.astype(self._dtype) if scale is None else normalized(obs, self._dtype, scale)
        outputs = self._network.step(inputs, state)
        if masks is not None:
            outputs = outputs._replace(head=allowed(outputs.head, masks))
        if self._value_scale is not None:
            outputs = outputs._replace(values=self._value_scale.restore(outputs.values))
        return outputs


class RecurrentStates:
    """The recurrent states of S samplers with E environments each, before and after the current step.

    An episode starts from zero, in whatever row of the segment.
    """

    def __init__(
        self, first: Float[np.ndarray, "samplers E S"], steps: int, sequence_length: int, *, keep_all: bool = False
    ) -> None:
        """Start a segment of `steps` steps, cut into sequences of `sequence_length`, from the states `first`."""
        samplers, envs, size = first.shape
        self.before = first
        """[samplers, E, S]"""
        self.after = first
        """[samplers, E, S] after the step, also where the episode ended in it."""
        self.of_sequences = np.empty((samplers, steps // sequence_length, envs, size), first.dtype)
        """States before the first step of each sequence; `after_steps` are those after all steps, with `keep_all`."""
        self.after_steps = np.empty((samplers, steps if keep_all else 0, envs, size), first.dtype)
        self._sequence_length, self._keep_all = sequence_length, keep_all

    def enter(self, t: int) -> Float[np.ndarray, "*samplers E S"]:
        """Return the states before step `t`, of a single sampler without leading axis."""
        if t % self._sequence_length == 0:
            self.of_sequences[:, t // self._sequence_length] = self.before
        return self.before[0] if len(self.before) == 1 else self.before

    def act(self, t: int, after: Float[np.ndarray, "*samplers E S"] | None) -> None:
        """Take the states after step `t` from the network."""
        assert after is not None, "a network with memory returns its state"
        self.after = after.reshape(self.before.shape)
        if self._keep_all:
            self.after_steps[:, t] = self.after

    def leave(self, done: Bool[np.ndarray, "samplers E"]) -> None:
        """Go on to the next step, from zero where an episode is `done`."""
        self.before = np.where(done[..., None], self.after.dtype.type(0), self.after) if done.any() else self.after
