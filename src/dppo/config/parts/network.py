"""The settings of the networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dppo.config.field import setting
from dppo.user_code import import_path


@dataclass(frozen=True, kw_only=True)
class Network:
    """The policy and value networks."""

    model: str | Callable[..., Any] | None = setting(
        None,
        "A network of your own, as module:Class (in Python, also the class itself): a torch.nn.Module, built with "
        "(spaces, head_size), that maps observations to head and values; see examples/own_network.py. Default: a "
        "network that fits the observations.",
        branch=False,
    )
    model_kwargs: dict[str, Any] = setting(
        {}, "Further keyword arguments of the model's class, as JSON: '{\"units\": 32}'.", branch=False
    )
    hidden_sizes: tuple[int, ...] = setting(
        (64, 64),
        "Units of the hidden layers, the same for policy and value. Not used if a CNN reads the whole observation.",
        gt=0,
        branch=False,
    )
    activation: Literal["tanh", "relu"] = setting("tanh", "Activation between hidden layers.", branch=False)
    image_encoder: Literal["auto", "nature", "impala", "grid", "flatten"] = setting(
        "auto",
        "Layers that read images: the CNN of the Nature paper, that of IMPALA, a small one over the bits of each byte "
        "(grid), or none (flatten); auto: nature, and grid below 36 x 36 pixels.",
        branch=False,
    )
    image_features: int | None = setting(
        None,
        "Units of the last layer of an image's encoder; none: 512 for nature, 256 for impala, 128 for grid.",
        gt=0,
        branch=False,
    )
    trunk: Literal["auto", "shared", "separate"] = setting(
        "auto",
        "Layers of policy and value: shared (all but the last) or separate; auto: shared if there are images.",
        branch=False,
    )
    layer_norm: bool = setting(
        False, "Normalize the inputs of each activation between hidden layers over the layer's units.", branch=False
    )
    state_dependent_std: bool = setting(
        False,
        "Let the standard deviation of real-valued actions depend on the observation; else it is a parameter.",
        branch=False,
    )
    log_std_init: float | None = setting(
        None,
        "Log of the standard deviation of real-valued actions at the start; none: -0.5 for two numbers or more, "
        "whose noise adds up, else 0.",
        ge=-20,
        le=2,
        branch=False,
    )
    memory: Literal["none", "gru", "lstm"] = setting(
        "none",
        "Memory of past observations behind the hidden layers: a GRU or an LSTM, from zero in each episode.",
        branch=False,
    )
    memory_size: int = setting(64, "Units of the memory.", gt=0, branch=False)
    sequence_length: int | None = setting(
        None,
        "Steps of the sequences that a network with memory learns from; must divide num_steps. Gradients do not reach "
        "further back. A network of your own with memory needs it; none: the largest divisor of num_steps up to 16.",
        gt=0,
    )
    dtype: Literal["float32", "float64"] = setting(
        "float32", "Precision of the networks; float64 is for comparing implementations.", branch=False
    )

    def first_log_std(self, size: int) -> float | None:
        """Return the log of the deviation of `size` numbers at the start; None if the network has its own."""
        if not size or self.model is not None:
            return None
        return (-0.5 if size > 1 else 0.0) if self.log_std_init is None else self.log_std_init

    @property
    def model_name(self) -> str | None:
        """Return the import path of the user's network; None for the default network."""
        return None if self.model is None else import_path(self.model)
