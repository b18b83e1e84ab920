"""The network that fits the spaces, unless settings or the user's own class choose another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dppo.config.parts import Network, default_of
from dppo.errors import ConfigError, counted
from dppo.ppo.networks.default.mlp import MLPSpec
from dppo.ppo.networks.memory.memory_mlp import MEMORY_NETWORK, MemoryMLPSpec
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.torch_module import ModuleSpec, model_name
from dppo.spaces.actions import boxes
from dppo.spaces.spaces import Spaces, is_image

ENCODER_NETWORK = "dppo.ppo.networks.encoders.encoder_network:EncoderNetwork"
BUILT_IN = (ENCODER_NETWORK, MEMORY_NETWORK)
SMALLEST_FOR_NATURE = 36  # pixels of a side; fewer leave nothing behind its convolutions
FEATURES = {"nature": 512, "impala": 256, "grid": 128, "flatten": 0}
ENCODERS = {
    "nature": "a Nature CNN",
    "impala": "an IMPALA CNN",
    "grid": "a grid CNN",
    "flatten": "an MLP over all pixels",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A network, and why it was chosen."""

    spec: NetworkSpec
    layers: str
    """Its layers in words, for the log."""
    reason: str

    def in_words(self) -> str:
        """Return network, size and reason in one sentence."""
        return f"Network: {self.layers}, {self.spec.num_parameters:,} parameters, because {self.reason}."


def choose_network(network: Network, spaces: Spaces) -> Choice:
    """Return the network for these spaces.

    Raises:
        ConfigError: a setting has no effect on the network for these spaces.
    """
    spaces = spaces.of_network()
    if network.model is not None:
        own = ModuleSpec.of(spaces, network.model, network.model_kwargs, network.dtype)
        return _checked_own(own, network)
    images = [name for name, leaf in spaces.leaves().items() if is_image(leaf)]
    vector = spaces.obs.names is None and not images and not spaces.categories
    separate = not images if network.trunk == "auto" else network.trunk == "separate"
    if not images:
        _refuse_without_effect(network, ("image_encoder", "image_features"), "the observation has no image")
    own_std = _own_std(network, spaces)
    if vector and separate and network.memory == "none" and not network.layer_norm:
        mlp = MLPSpec.of(spaces, network.hidden_sizes, network.activation, network.dtype, state_dependent_std=own_std)
        return Choice(mlp, f"an MLP for the policy and another for the value{_hidden(network)}", _observed(spaces))
    encoder = _image_encoder(network, spaces, images)
    lone_image = spaces.obs.names is None and images and encoder != "flatten"
    if lone_image:
        why = "a single image goes from its encoder straight to the outputs; image_features sets its last layer"
        _refuse_without_effect(network, ("hidden_sizes", "activation", "layer_norm"), why)
    if images and encoder == "flatten":
        _refuse_without_effect(network, ("image_features",), "image_encoder=flatten has no layers of its own")
    kwargs: dict[str, Any] = {
        "hidden_sizes": list(network.hidden_sizes),
        "activation": network.activation,
        "shared": not separate,
        "layer_norm": network.layer_norm,
    } | ({"state_dependent_std": True} if own_std else {})
    if images:
        kwargs |= {"image_encoder": encoder, "image_features": network.image_features or FEATURES[encoder]}
    if lone_image:
        del kwargs["hidden_sizes"], kwargs["activation"], kwargs["layer_norm"]
    layers = _layers(spaces, encoder if images else None) + ("" if lone_image else _hidden(network)) + _memory(network)
    whole = f"{layers}, {'one each for policy and value' if separate else 'shared by policy and value'}"
    return Choice(_built(network, spaces, kwargs, vector=vector), whole, _observed(spaces))


def _built(network: Network, spaces: Spaces, kwargs: dict[str, Any], *, vector: bool) -> NetworkSpec:
    """Return a network of encoders, in NumPy for acting where that is possible."""
    if network.memory == "none":
        return ModuleSpec.of(spaces, ENCODER_NETWORK, kwargs, network.dtype)
    kwargs = kwargs | {"memory": network.memory, "memory_size": network.memory_size}
    if vector and not network.layer_norm:
        return MemoryMLPSpec.of(spaces, network.dtype, kwargs)
    return ModuleSpec.of(spaces, MEMORY_NETWORK, kwargs, network.dtype)


def _checked_own(spec: ModuleSpec, network: Network) -> Choice:
    """Return the user's own; refuse a module with memory and no length of sequences, or the other way round."""
    name = model_name(spec.model)
    if spec.state_size and network.sequence_length is None:
        raise ConfigError(
            f"model={name}: it has memory (state_size={spec.state_size}), so it learns from sequences. Set "
            f"sequence_length to a divisor of num_steps; 16 is usual."
        )
    if not spec.state_size and network.sequence_length is not None:
        raise ConfigError(
            f"sequence_length={network.sequence_length} has no effect: model={name} has no memory, "
            f"because it has no attribute state_size. Leave it out."
        )
    return Choice(spec, f"your own {name}", "model names it")


def _own_std(network: Network, spaces: Spaces) -> bool:
    """Return whether the standard deviation of real-valued actions depends on the observation."""
    if not list(boxes(spaces.actions)):
        why = f"{spaces.actions} actions are not real numbers"
        _refuse_without_effect(network, ("state_dependent_std",), why)
    return network.state_dependent_std


def _image_encoder(network: Network, spaces: Spaces, images: list[str]) -> str:
    """Return the encoder for all images of an observation.

    Raises:
        ConfigError: an image is too small for the one that was asked for.
    """
    small = [name for name in images if not _fits_nature(spaces.leaves()[name].shape)]
    if network.image_encoder == "auto":
        return "grid" if small else "nature"
    if network.image_encoder == "nature" and small:
        raise ConfigError(
            f"image_encoder=nature: its convolutions need images of {SMALLEST_FOR_NATURE} x {SMALLEST_FOR_NATURE} "
            f"pixels, and the observation has {_named(spaces, small[0])}. Use image_encoder=grid or impala."
        )
    return network.image_encoder


def _fits_nature(shape: tuple[int, ...]) -> bool:
    image = shape[-3:]
    return min(image[1:] if image[0] < image[2] else image[:2]) >= SMALLEST_FOR_NATURE


def _refuse_without_effect(network: Network, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(network, name) != default_of(name):
            raise ConfigError(f"{name}={getattr(network, name)} has no effect: {reason}. Leave {name} out.")


# ------------------------------------------------------------------ in words


def _memory(network: Network) -> str:
    kind = {"none": "", "gru": ", a GRU", "lstm": ", an LSTM"}[network.memory]
    return kind and f"{kind} of {network.memory_size} units"


def _hidden(network: Network) -> str:
    sizes = " x ".join(str(size) for size in network.hidden_sizes)
    return f" with {sizes} {network.activation} units" if sizes else " without hidden layers"


def _layers(spaces: Spaces, encoder: str | None) -> str:
    """Return what encodes the leaves."""
    used = [ENCODERS[encoder]] if encoder else []
    if spaces.categories:
        used.append("one-hot codes")
    named = spaces.leaves()
    if any(not is_image(leaf) and name not in spaces.categories for name, leaf in named.items()):
        used.append("the numbers as they are")
    joined = ", ".join(used)
    if encoder and len(named) == 1:
        return joined
    return f"{joined}, {'joined ' if len(named) > 1 else ''}into an MLP"


def _observed(spaces: Spaces) -> str:
    named = spaces.leaves()
    if spaces.obs.names is None:
        return f"the observation is {_named(spaces, '')}"
    parts = ", ".join(f"{name} ({_named(spaces, name)})" for name in list(named)[:6])
    more = f" and {len(named) - 6} more" if len(named) > 6 else ""
    return f"the observation has {counted(len(named), 'leaf', 'leaves')}: {parts}{more}"


def _named(spaces: Spaces, name: str) -> str:
    leaf = spaces.leaves()[name]
    shape = " x ".join(map(str, leaf.shape)) or "1"
    if is_image(leaf):
        return f"an image of {shape} bytes"
    if name in spaces.categories:
        counts = spaces.categories[name].counts
        return f"{' x '.join(map(str, counts))} categories" if len(counts) < 5 else f"{len(counts)} choices"
    return f"{shape} numbers" if shape != "1" else "1 number"
