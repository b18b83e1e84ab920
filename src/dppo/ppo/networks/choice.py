"""The network that fits the spaces, unless settings or the user's own class choose another; and its two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dppo.config.parts import Network, default_of
from dppo.errors import ConfigError, counted
from dppo.ppo.networks.default.mlp import NumpyMemoryMLP, NumpyMLP
from dppo.ppo.networks.default.spec import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, NetworkSpec
from dppo.ppo.networks.user.model_class import ModelClass
from dppo.spaces.actions import boxes
from dppo.spaces.spaces import Spaces, is_image
from dppo.user_code import import_path

if TYPE_CHECKING:
    from dppo.ppo.networks.parameters import ZerosLike

SMALLEST_FOR_NATURE = 36  # pixels of a side; fewer leave nothing behind its convolutions
FEATURES = {"nature": 512, "impala": 256, "grid": 128, "flatten": 0}
WORDS = {"nature": "a Nature CNN", "impala": "an IMPALA CNN", "grid": "a grid CNN", "flatten": "an MLP over all pixels"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A network, and why it was chosen."""

    spec: NetworkSpec
    layers: str
    """Its layers in words, for the log."""
    reason: str | None
    """None where the user named it."""

    def __str__(self) -> str:
        because = "" if self.reason is None else f", because {self.reason}"
        return f"Network: {self.layers}, {self.spec.num_parameters:,} parameters{because}."


def choose_network(network: Network, spaces: Spaces) -> Choice:
    """Return the network for these spaces.

    Raise ConfigError if a setting has no effect on the network for these spaces, or the user's own breaks its contract.
    """
    spaces = spaces.of_network()
    if network.model is not None:
        return _own(network, network.model, spaces)
    encoder = _image_encoder(network, spaces)
    _check_effects(network, spaces, encoder)
    separate = encoder is None if network.trunk == "auto" else network.trunk == "separate"
    chosen = {name: getattr(network, name) for name in Layers.__slots__ if hasattr(network, name)}
    features = network.image_features or FEATURES[encoder or "flatten"]
    layers = Layers(**chosen | {"image_encoder": encoder, "image_features": features, "shared": not separate})
    spec = BuiltInSpec(spaces, layers, network.dtype)
    if spec.is_mlp:
        return Choice(spec, f"an MLP for the policy and another for the value{_hidden(network)}", _observed(spaces))
    hidden = "" if _is_cnn_alone(spaces, encoder) else _hidden(network)
    trunks = "one each for policy and value" if separate else "shared by policy and value"
    memory = {"none": "", "gru": ", a GRU of {} units", "lstm": ", an LSTM of {} units"}[network.memory]
    words = f"{_encoders(spaces, encoder)}{hidden}{memory.format(network.memory_size)}, {trunks}"
    return Choice(spec, words, _observed(spaces))


def _own(network: Network, model: ModelClass, spaces: Spaces) -> Choice:
    """Return the user's own; refuse a module with memory and no length of sequences, or the other way round."""
    from dppo.ppo.networks.user.module_spec import ModuleSpec

    spec, name = ModuleSpec(spaces, model, network.model_kwargs, network.dtype), import_path(model)
    if spec.state_size and network.sequence_length is None:
        raise ConfigError(
            f"model={name}: it has memory (state_size={spec.state_size}), so it learns from sequences. Set "
            f"`sequence_length` to a divisor of `num_steps`; 16 is usual."
        )
    if not spec.state_size and network.sequence_length is not None:
        raise ConfigError(
            f"sequence_length={network.sequence_length} has no effect: model={name} has no memory, "
            f"because it has no attribute state_size. Leave it out."
        )
    return Choice(spec, f"{name} (set by `model`)", None)


def _image_encoder(network: Network, spaces: Spaces) -> str | None:
    """Return the encoder for all images of an observation, None without any; refuse one that needs larger images."""
    images = {name: leaf.shape[-3:] for name, leaf in spaces.leaves().items() if is_image(leaf)}
    if not images:
        return None
    sides = {name: image[1:] if image[0] < image[2] else image[:2] for name, image in images.items()}
    small = [name for name, of_image in sides.items() if min(of_image) < SMALLEST_FOR_NATURE]
    if network.image_encoder == "auto":
        return "grid" if small else "nature"
    if network.image_encoder == "nature" and small:
        raise ConfigError(
            f"image_encoder=nature: its convolutions need images of {SMALLEST_FOR_NATURE} x {SMALLEST_FOR_NATURE} "
            f"pixels, and the observation has {_named(spaces, small[0])}. Use `image_encoder=grid` or impala."
        )
    return network.image_encoder


def _is_cnn_alone(spaces: Spaces, encoder: str | None) -> bool:
    return spaces.obs.names is None and encoder not in (None, "flatten")


def _check_effects(network: Network, spaces: Spaces, encoder: str | None) -> None:
    """Refuse settings other than the default that have no effect on the network for these spaces."""
    alone = "a single image goes from its encoder straight to the outputs; image_features sets its last layer"
    real = "actions are not real numbers"
    without = (
        (encoder is None, "image_encoder image_features", "the observation has no image"),
        (not list(boxes(spaces.actions)), "state_dependent_std log_std_init", f"{spaces.actions} {real}"),
        (_is_cnn_alone(spaces, encoder), "hidden_sizes activation layer_norm", alone),
        (encoder == "flatten", "image_features", "image_encoder=flatten has no layers of its own"),
    )
    for applies, names, reason in without:
        for name in names.split():
            if applies and getattr(network, name) != default_of(name):
                raise ConfigError(f"{name}={getattr(network, name)} has no effect: {reason}. Leave `{name}` out.")


def _hidden(network: Network) -> str:
    sizes = " x ".join(str(size) for size in network.hidden_sizes)
    return f" with {sizes} {network.activation} units" if sizes else " without hidden layers"


def _encoders(spaces: Spaces, encoder: str | None) -> str:
    used = [WORDS[encoder]] if encoder else []
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


# ------------------------------------------------------------------ its halves: for actors, and for trainers


def acting_network(spec: NetworkSpec) -> ActingNetwork:
    """Build the network for an actor, without torch if it acts in NumPy; raise ConfigError if a module is refused."""
    if isinstance(spec, BuiltInSpec) and spec.acts_in_numpy:
        return NumpyMLP(spec) if spec.is_mlp else NumpyMemoryMLP(spec)
    from dppo.ppo.networks.modules import TorchActing

    return TorchActing(spec.module(0), spec.spaces)


def learning_network(
    spec: NetworkSpec, seed: int, *, device: str = "cpu", zeros_like: ZerosLike | None = None
) -> LearningNetwork:
    """Build the network for a trainer, with initial weights drawn from `seed` alone; imports torch.

    `zeros_like`: allocates the vector of gradients, which several learners keep in shared memory.

    Raise ConfigError if a module of the user's does not keep the contract.
    """
    if isinstance(spec, BuiltInSpec) and spec.is_mlp:
        from dppo.ppo.networks.default.mlp_torch import HandwrittenMLP

        return HandwrittenMLP(spec, seed, device=device, zeros_like=zeros_like)
    from dppo.ppo.networks.modules import Autograd, quick
    from dppo.ppo.networks.parameters import settled, shapes_of

    name = spec.as_json().get("model", "the built-in network")
    module = quick(settled(lambda: spec.module(seed), name).to(device))
    assert list(shapes_of(module).items()) == list(spec.shapes.items()), "module and spec differ"
    return Autograd(module, module.parameters(), zeros_like)
