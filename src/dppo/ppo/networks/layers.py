"""Layers: the settings of the built-in network of encoders."""

from dataclasses import dataclass

STATES = {"none": 0, "gru": 1, "lstm": 2}
"""Vectors of `memory_size` numbers in the state of a cell: h, or h and c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of `EncoderNetwork`."""

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
        """Return S, the size of the memory's state for one environment; 0 without memory."""
        return len(self.trunks) * STATES[self.memory] * self.memory_size

    @property
    def trunks(self) -> tuple[str, ...]:
        """Return the prefixes of the names of the policy's and of the value's own layers."""
        return ("",) if self.shared else ("", "value_")
