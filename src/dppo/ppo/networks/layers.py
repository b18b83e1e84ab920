"""Layers: the settings of the built-in networks, and the names of their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dppo.spaces.spaces import Categories

NUM_STATE_VECTORS = {"none": 0, "gru": 1, "lstm": 2}
"""Vectors of `memory_size` elements in the state of a cell: h, or h and c."""
NUM_GATES = {"gru": 3, "lstm": 4}
MAX_ONE_HOT = 1024  # columns of a one-hot code; more categories are embedded
CELL_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def is_one_hot(categories: Categories) -> bool:
    """Return whether categories are read as one-hot codes, of sum(counts) columns."""
    return sum(categories.counts) <= MAX_ONE_HOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of `EncoderNetwork`, or of the `MLP`."""

    image_encoder: str | None = "nature"
    """nature, impala, grid or flatten; None where there are no images."""
    image_features: int = 512
    """Units of the last layer of an image's encoder."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = False
    memory: str = "none"
    """none, gru or lstm."""
    memory_size: int = 64
    shared: bool = True
    """Policy and value have all layers in common but the last."""
    state_dependent_std: bool = False

    @property
    def state_size(self) -> int:
        """S, the size of the memory's state for one environment; 0 without memory."""
        return len(self.trunks) * NUM_STATE_VECTORS[self.memory] * self.memory_size

    @property
    def trunks(self) -> tuple[str, ...]:
        """The prefixes of the names of the policy's and of the value's own layers in `EncoderNetwork`."""
        return ("",) if self.shared else ("", "value_")


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names of the modules that hold the parameters of a network of linear layers."""

    hidden: tuple[str, ...]
    """The sequence of hidden layers of each trunk."""
    cells: tuple[str, ...]
    """The cell of each trunk, if the network has memory."""
    policy: str
    """The last layer of the policy."""
    value: str
