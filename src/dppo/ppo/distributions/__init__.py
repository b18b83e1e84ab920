"""Action distributions: pure functions of the network's head, in NumPy for actors and in torch for trainers.

Noise is passed in, so that an action is a pure function of the head and the noise. Written by hand, because
`torch.distributions` costs as much as a small network; tested against it.
"""

from dppo.ppo.distributions.base import Distribution, Evaluation
from dppo.ppo.distributions.categorical import Categorical
from dppo.ppo.distributions.gaussian import DiagonalGaussian
from dppo.ppo.distributions.joint import Joint
from dppo.spaces import BoxActions, DiscreteActions

__all__ = ["Categorical", "DiagonalGaussian", "Distribution", "Evaluation", "Joint", "distribution_of"]


def distribution_of(actions: DiscreteActions | BoxActions) -> Distribution:
    """Return the distribution over `actions`."""
    return Categorical(actions.n) if isinstance(actions, DiscreteActions) else DiagonalGaussian(actions.size)
