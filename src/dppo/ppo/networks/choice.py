"""The network that fits the spaces, unless settings or the user's own class choose another; and its two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dppo.config.parts import Network, default_of
from dppo.errors import ConfigError, counted
from dppo.ppo.kernels.acting import NumpyMLP
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, ModelClass, NetworkSpec
from dppo.spaces.actions import boxes
from dppo.spaces.spaces import Spaces, is_image
from dppo.user_code import import_path

if TYPE_CHECKING:
    from dppo.ppo.networks.parameters import ZerosLike

SMALLEST_FOR_NATURE = 36  # pixels of a side; fewer leave nothing behind its convolutions
FEATURES = {"nature": 512, "impala": 256, "grid": 128, "flatten": 0}
WORDS = {"nature": "a Nature CNN", "impala": "an IMPALA CNN", "grid": "a grid CNN", "flatten": "an MLP over all pixels"}


class Choice(NamedTuple):
    """A network, and why it was chosen."""

    spec: NetworkSpec
    layers: str
    """Its layers in words, for the log."""
    because: str
    """", because" and the reason; "" where the user named it."""

    def __str__(self) -> str:
        return f"Network: {self.layers}, {self.spec.num_parameters:,} parameters{self.because}."


def choose_network(network: Network, spaces: Spaces) -> Choice:
    """Return the network for these spaces.

    Raise ConfigError if a setting has no effect on the network for these spaces, or the user's own breaks its contract.
    """
    spaces = spaces.of_network()
    if network.model is not None:
        return _own(network, network.model, spaces)
    encoder = _image_encoder(network, spaces)
    _check_effects(network, spaces, encoder)
    shared = encoder is not None if network.trunk == "auto" else network.trunk == "shared"
    chosen = {name: getattr(network, name) for name in Layers.__slots__ if hasattr(network, name)}
    features = network.image_features or FEATURES[encoder or "flatten"]
    layers = Layers(**chosen | {"image_encoder": encoder, "image_features": features, "shared": shared})
    spec = BuiltInSpec(spaces, layers, network.dtype)
    return Choice(spec, _layers_in_words(spec), f", because {_observed(spaces)}")


def _own(network: Network, model: ModelClass, spaces: Spaces) -> Choice:
    """Return the user's own; refuse a module with memory and no length of sequences, or the other way round."""
    from dppo.ppo.networks.user_module import ModuleSpec

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
    return Choice(spec, f"{name} (set by `model`)", "")


def _image_encoder(network: Network, spaces: Spaces) -> str | None:
    """Return the encoder for all images of an observation, None without any; refuse one that needs larger images."""
    images = {name: leaf.shape[-3:] for name, leaf in spaces.leaves().items() if is_image(leaf)}
    if not images:
        return None
    sides = {name: min(image[1:] if image[0] < image[2] else image[:2]) for name, image in images.items()}
    small = [name for name, side in sides.items() if side < SMALLEST_FOR_NATURE]
    if network.image_encoder == "auto":
        return "grid" if small else "nature"
    if network.image_encoder == "nature" and small:
        raise ConfigError(
            f"image_encoder=nature: its convolutions need images of {SMALLEST_FOR_NATURE} x {SMALLEST_FOR_NATURE} "
            f"pixels, and the observation has {_named(spaces, small[0])}. Use `image_encoder=grid` or impala."
        )
    return network.image_encoder


def _is_cnn_alone(spaces: Spaces, encoder: str | None) -> bool:
    return [is_image(leaf) for leaf in spaces.leaves().values()] == [True] and encoder not in (None, "flatten")


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


def _layers_in_words(spec: BuiltInSpec) -> str:
    of, spaces, named = spec.layers, spec.spaces, spec.spaces.leaves()
    sizes = " x ".join(map(str, of.hidden_sizes))
    hidden = f" with {sizes} {of.activation} units" if sizes else " without hidden layers"
    if spec.is_mlp:
        return f"an MLP for the policy and another for the value{hidden}"
    used = [WORDS[of.image_encoder]] if of.image_encoder else []
    if spaces.categories:
        used.append("one-hot codes")
    if any(not is_image(leaf) and name not in spaces.categories for name, leaf in named.items()):
        used.append("the numbers as they are")
    if not of.image_encoder or len(named) > 1:
        used.append(f"{'joined ' if len(named) > 1 else ''}into an MLP")
    memory = {"none": "", "gru": f", a GRU of {of.memory_size} units", "lstm": f", an LSTM of {of.memory_size} units"}
    trunks = "shared by policy and value" if of.shared else "one each for policy and value"
    alone = _is_cnn_alone(spaces, of.image_encoder)
    return f"{', '.join(used)}{'' if alone else hidden}{memory[of.memory]}, {trunks}"


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
        return NumpyMLP(spec)
    from dppo.ppo.networks.modules import TorchActing

    return TorchActing(spec.module(0), spec.spaces)


def learning_network(
    spec: NetworkSpec, seed: int, *, device: str = "cpu", zeros_like: ZerosLike | None = None
) -> LearningNetwork:
    """Build the network for a trainer, with initial weights drawn from `seed` alone; imports torch.

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
    assert list(shapes_of(module).items()) == list(spec.shapes.items()), "module and spec differ"
    return Autograd(without_call_overhead(module), module.parameters(), zeros_like)
