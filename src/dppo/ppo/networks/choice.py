"""The network that fits the spaces, unless settings or the user's own class choose another; and its two halves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dppo.config.parts import Network, default_of
from dppo.errors import ConfigError, counted, refuse
from dppo.ppo.kernels.acting import NumpyMemory, NumpyMLP
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, ModelClass, NetworkSpec
from dppo.spaces.actions import boxes
from dppo.spaces.spaces import Spaces, is_image
from dppo.user_code import import_path

if TYPE_CHECKING:
    from dppo.ppo.networks.parameters import ZerosLike

MIN_NATURE_SIDE = 36  # pixels; the convolutions of a Nature CNN have no output for smaller images
MAX_LISTED_LEAVES = 6
MAX_LISTED_COUNTS = 4
# default number of units of the last layer of each encoder
FEATURES = {"nature": 512, "impala": 256, "grid": 128, "flatten": 0}
ENCODERS = {
    "nature": "a Nature CNN",
    "impala": "an IMPALA CNN",
    "grid": "a grid CNN",
    "flatten": "an MLP over all pixels",
}


class NetworkChoice(NamedTuple):
    """A network, and why it was chosen."""

    spec: NetworkSpec
    layers: str
    """Description of its layers, for the log."""
    policy_layers: str
    """Description of the layers of the policy alone."""
    because: str
    """", because" and the reason; "" where the user named it."""

    def __str__(self) -> str:
        return f"Network: {self.layers}, {self.spec.num_parameters:,} parameters{self.because}."

    def describe_policy(self) -> str:
        """Describe the policy of an algorithm that does not learn the network's own value."""
        parameters = self.spec.num_parameters
        if isinstance(self.spec, BuiltInSpec):
            shapes = self.spec.shapes.items()
            parameters -= sum(
                math.prod(shape) for name, shape in shapes if name.startswith("value")
            )
        return (
            f"Network: {self.policy_layers} for the policy, {parameters:,} parameters{self.because}"
        )


def choose_network(network: Network, spaces: Spaces) -> NetworkChoice:
    """Return the network for these spaces.

    Raise ConfigError if a setting has no effect on the network for these spaces, or the user's own breaks its contract.
    """
    spaces = spaces.of_network()
    if network.model is not None:
        return _user_network(network, network.model, spaces)
    encoder = _image_encoder(network, spaces)
    _check_effects(network, spaces, encoder)
    layers = Layers(
        image_encoder=encoder,
        image_features=network.image_features or FEATURES[encoder or "flatten"],
        hidden_sizes=network.hidden_sizes,
        activation=network.activation,
        layer_norm=network.layer_norm,
        memory=network.memory,
        memory_size=network.memory_size,
        shared=_is_shared(network, spaces, encoder),
        state_dependent_std=network.state_dependent_std,
    )
    spec = BuiltInSpec(spaces, layers, network.dtype)
    return NetworkChoice(
        spec,
        layers=_describe_layers(spec),
        policy_layers=_describe_policy_layers(spec),
        because=f", because {_describe_observation(spaces)}",
    )


def _is_shared(network: Network, spaces: Spaces, encoder: str | None) -> bool:
    if network.trunk == "auto":
        return encoder is not None and not spaces.critic_obs
    return network.trunk == "shared"


def _user_network(network: Network, model: ModelClass, spaces: Spaces) -> NetworkChoice:
    """Return the user's network; refuse memory without a length of sequences, and a length without memory."""
    from dppo.ppo.networks.user_module import ModuleSpec

    spec = ModuleSpec(spaces, model, network.model_kwargs, network.dtype)
    name = import_path(model)
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
    description = f"{name} (set by `model`)"
    return NetworkChoice(spec, description, description, because="")


def _image_encoder(network: Network, spaces: Spaces) -> str | None:
    """Return the encoder for all images of an observation, None without any; refuse one that needs larger images."""
    images = {name: leaf.shape[-3:] for name, leaf in spaces.leaves().items() if is_image(leaf)}
    if not images:
        return None
    small = [name for name, shape in images.items() if _shorter_side(shape) < MIN_NATURE_SIDE]
    if network.image_encoder == "auto":
        return "grid" if small else "nature"
    if network.image_encoder == "nature" and small:
        raise ConfigError(
            f"image_encoder=nature: its convolutions need images of {MIN_NATURE_SIDE} x {MIN_NATURE_SIDE} "
            f"pixels, and the observation has {_describe_leaf(spaces, small[0])}. Use `image_encoder=grid` or impala."
        )
    return network.image_encoder


def _shorter_side(image: tuple[int, ...]) -> int:
    """Return the smaller of height and width; the channels are first or last, as in `images.Image`."""
    is_channels_first = image[0] < image[2]
    return min(image[1:] if is_channels_first else image[:2])


def _is_cnn_alone(spaces: Spaces, encoder: str | None) -> bool:
    leaves = list(spaces.leaves().values())
    return len(leaves) == 1 and is_image(leaves[0]) and encoder != "flatten"


def _check_effects(network: Network, spaces: Spaces, encoder: str | None) -> None:
    """Refuse settings other than the default that have no effect on the network for these spaces."""
    without_effect: dict[str, str] = {}
    if encoder is None:
        for name in ("image_encoder", "image_features"):
            without_effect[name] = "the observation has no image"
    if not list(boxes(spaces.actions)):
        for name in ("state_dependent_std", "log_std_init"):
            without_effect[name] = f"{spaces.actions} actions are not real numbers"
    if _is_cnn_alone(spaces, encoder):
        for name in ("hidden_sizes", "activation", "layer_norm"):
            without_effect[name] = (
                "a single image goes from its encoder straight to the outputs; image_features sets its last layer"
            )
    if encoder == "flatten":
        without_effect["image_features"] = "image_encoder=flatten has no layers of its own"
    refuse(
        ConfigError(f"{name}={getattr(network, name)} has no effect: {reason}. Leave `{name}` out.")
        for name, reason in without_effect.items()
        if getattr(network, name) != default_of(name)
    )


def _describe_layers(spec: BuiltInSpec) -> str:
    if spec.is_mlp:
        return f"an MLP for the policy and another for the value{_describe_hidden(spec.layers)}"
    trunks = "shared by policy and value" if spec.layers.shared else "one each for policy and value"
    if spec.spaces.critic_obs:
        trunks += f", and only the value reads {', '.join(spec.spaces.critic_obs)}"
    return f"{_describe_policy_layers(spec)}, {trunks}"


def _describe_hidden(layers: Layers) -> str:
    sizes = " x ".join(map(str, layers.hidden_sizes))
    return f" with {sizes} {layers.activation} units" if sizes else " without hidden layers"


def _describe_policy_layers(spec: BuiltInSpec) -> str:
    layers = spec.layers
    hidden = _describe_hidden(layers)
    if spec.is_mlp:
        return f"an MLP{hidden}"
    leaves = spec.spaces.leaves()
    categories = spec.spaces.categories
    inputs = [ENCODERS[layers.image_encoder]] if layers.image_encoder else []
    if categories:
        inputs.append("one-hot codes")
    if any(not is_image(leaf) and name not in categories for name, leaf in leaves.items()):
        inputs.append("the numbers as they are")
    if len(leaves) > 1:
        inputs.append("joined into an MLP")
    elif not layers.image_encoder:
        inputs.append("into an MLP")
    if _is_cnn_alone(spec.spaces, layers.image_encoder):
        hidden = ""
    memory = {
        "none": "",
        "gru": f", a GRU of {layers.memory_size} units",
        "lstm": f", an LSTM of {layers.memory_size} units",
    }[layers.memory]
    return f"{', '.join(inputs)}{hidden}{memory}"


def _describe_observation(spaces: Spaces) -> str:
    if spaces.obs.names is None:
        return f"the observation is {_describe_leaf(spaces, '')}"
    names = list(spaces.leaves())
    listed = ", ".join(
        f"{name} ({_describe_leaf(spaces, name)})" for name in names[:MAX_LISTED_LEAVES]
    )
    num_unlisted = len(names) - MAX_LISTED_LEAVES
    if num_unlisted > 0:
        listed += f" and {num_unlisted} more"
    return f"the observation has {counted(len(names), 'leaf', 'leaves')}: {listed}"


def _describe_leaf(spaces: Spaces, name: str) -> str:
    leaf = spaces.leaves()[name]
    shape = " x ".join(map(str, leaf.shape)) or "1"
    if is_image(leaf):
        return f"an image of {shape} bytes"
    if name in spaces.categories:
        counts = spaces.categories[name].counts
        if len(counts) > MAX_LISTED_COUNTS:
            return f"{len(counts)} choices"
        return f"{' x '.join(map(str, counts))} categories"
    return f"{shape} numbers" if shape != "1" else "1 number"


# ------------------------------------------------------------------ networks of actors and of trainers


def acting_network(spec: NetworkSpec, *, estimates_values: bool = True) -> ActingNetwork:
    """Build the network of an actor, without torch if it acts in NumPy; then its values need not be computed.

    Raise ConfigError if a user's module does not keep the contract.
    """
    if isinstance(spec, BuiltInSpec) and spec.acts_in_numpy:
        in_numpy = NumpyMLP if spec.is_mlp else NumpyMemory
        return in_numpy(spec, estimates_values=estimates_values)
    from dppo.ppo.networks.modules import TorchActing

    # any seed will do: actors act with the weights of the trainer
    module = spec.module(seed=0)
    return TorchActing(module, spec.ordered_parameters(module), spec.spaces)


def learning_network(
    spec: NetworkSpec, seed: int, *, device: str = "cpu", zeros_like: ZerosLike | None = None
) -> LearningNetwork:
    """Build the network of a trainer, with initial weights drawn from `seed` alone; imports torch.

    `zeros_like` allocates the vector of gradients, which several learners share in memory. Raise ConfigError if a
    user's module does not keep the contract.
    """
    if isinstance(spec, BuiltInSpec) and spec.is_mlp:
        from dppo.ppo.kernels.mlp import HandwrittenMLP

        return HandwrittenMLP(spec.mlp(seed).to(device), zeros_like)
    from dppo.ppo.kernels.calls import without_call_overhead
    from dppo.ppo.networks.modules import Autograd
    from dppo.ppo.networks.parameters import rebuilt_deterministically, shapes_of

    name = spec.as_json().get("model", "the built-in network")
    module = rebuilt_deterministically(lambda: spec.module(seed), name).to(device)
    assert shapes_of(module) == dict(spec.shapes), "module and spec differ"
    return Autograd(without_call_overhead(module), spec.ordered_parameters(module), zeros_like)
