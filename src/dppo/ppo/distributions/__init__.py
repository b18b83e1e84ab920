"""Action distributions: pure functions of the network's head, in NumPy for actors and in torch for trainers.

Noise is passed in, so that an action is a pure function of the head and the noise. Written by hand, because
`torch.distributions` costs as much as a small network; tested against it.
"""

from dppo.ppo.distributions.base import IMPOSSIBLE, Distribution, Evaluation, allowed
from dppo.ppo.distributions.categorical import Categorical, MultiCategorical
from dppo.ppo.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from dppo.ppo.distributions.joint import Joint
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions, MultiDiscreteActions, NestedActions

__all__ = [
    "IMPOSSIBLE",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "Evaluation",
    "Joint",
    "MultiCategorical",
    "SquashedGaussian",
    "allowed",
    "distribution_of",
]


def distribution_of(actions: Actions, *, state_dependent_std: bool = False) -> Distribution:
    """Return the distribution over `actions`; the std of real-valued ones may depend on the state."""
    if isinstance(actions, DiscreteActions):
        return Categorical(actions.n)
    if isinstance(actions, MultiDiscreteActions):
        return MultiCategorical(actions.counts)
    if isinstance(actions, BoxActions):
        kind = SquashedGaussian if actions.bounds == "squash" else DiagonalGaussian
        return kind(actions.width, state_dependent_std)
    assert isinstance(actions, NestedActions)
    return Joint(tuple(distribution_of(part, state_dependent_std=state_dependent_std) for part in actions.parts))
