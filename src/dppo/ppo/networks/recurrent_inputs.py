"""RecurrentInputs: the states and episode starts that a network with memory trains with, beside the observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float


class RecurrentInputs(NamedTuple):
    """The states from which S sequences of L steps start, and where episodes start inside them."""

    states: Float[Tensor, "S n"]
    """As they were when the segments were collected; zero where an episode starts."""
    starts: Bool[Tensor, "S L"]
    """True at the first step of an episode."""

    def of_each(self, change: Callable[[Tensor], Tensor]) -> RecurrentInputs:
        """Return the results of `change` for both, which must treat their first axis alike."""
        return RecurrentInputs(change(self.states), change(self.starts))

    def outputs(self, module: Callable[..., Any], obs: Any) -> tuple[Tensor, Tensor]:
        """Return a module's head [S * L, H] and values [S * L] of observations [S * L, *O], sequence by sequence."""
        count, length = self.starts.shape

        def over_time(leaf: Tensor) -> Tensor:
            return leaf.view(count, length, *leaf.shape[1:]).transpose(0, 1)

        head, values, _ = module(each_leaf(obs, over_time), self.states, self.starts.t())
        return head.transpose(0, 1).flatten(0, 1), values.t().flatten()
