"""Spaces and network of a policy as JSON values, as a checkpoint stores them, and a network in words."""

import json
from typing import Any

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ModelClass, NetworkSpec
from dppo.spaces.actions import actions_from_json
from dppo.spaces.spaces import Categories, Spaces, dtype_as_json, dtype_from_json

# attributes of Spaces, stored if they are not empty
OPTIONAL = ("one_of", "dropped", "normalized", "critic_obs", "mask")


def model_state(spaces: Spaces, spec: NetworkSpec) -> dict[str, Any]:
    """Describe spaces and network as JSON values, for `model_from`."""
    described: dict[str, Any] = {
        "obs": dtype_as_json(spaces.obs),
        "deterministic": spaces.deterministic,
        "actions": spaces.actions.as_json(),
    }
    categories = {name: [leaf.counts, leaf.starts] for name, leaf in spaces.categories.items()}
    if categories:
        described["categories"] = categories
    for name in OPTIONAL:
        value = getattr(spaces, name)
        if value:
            described[name] = value
    described |= spec.as_json()
    # turns tuples into lists, as a checkpoint returns them
    read_back: dict[str, Any] = json.loads(json.dumps(described))
    return read_back


def spaces_from(state: dict[str, Any]) -> Spaces:
    """Return the spaces in a checkpoint's state."""
    model = state["model"]
    categories = model.get("categories", {}).items()
    return Spaces(
        dtype_from_json(model["obs"]),
        actions_from_json(model["actions"]),
        model["deterministic"],
        categories={
            name: Categories(tuple(counts), tuple(starts)) for name, (counts, starts) in categories
        },
        one_of=tuple(model.get("one_of", ())),
        dropped=tuple(model.get("dropped", ())),
        normalized=tuple(model["normalized"]) if "normalized" in model else None,
        critic_obs=tuple(model.get("critic_obs", ())),
        mask=model.get("mask"),
    )


def model_from(state: dict[str, Any], network: ModelClass | None) -> tuple[Spaces, NetworkSpec]:
    """Return the spaces and the network in a checkpoint's state; `network` replaces the class that it names."""
    model = state["model"]
    spaces = spaces_from(state)
    network_spaces = spaces.of_network()
    if "model" in model:
        from dppo.ppo.networks.user_module import ModuleSpec

        spec = ModuleSpec(
            network_spaces, network or model["model"], model["model_kwargs"], model["dtype"]
        )
        return spaces, spec
    layers = model.get("layers")
    # a checkpoint of an earlier version
    if not layers:
        layers = {
            "shared": False,
            "activation": model["activation"],
            "hidden_sizes": model["hidden_sizes"],
            "state_dependent_std": model.get("state_dependent_std", False),
        }
    layers = layers | {"hidden_sizes": tuple(layers["hidden_sizes"])}
    return spaces, BuiltInSpec(network_spaces, Layers(**layers), model["dtype"])


def network_summary(spec: NetworkSpec) -> str:
    """Return a short description of a network, such as `MLP 64x64 tanh, lstm 64`."""
    if not isinstance(spec, BuiltInSpec):
        return f"network {spec.as_json()['model']}"
    layers = spec.layers
    if spec.acts_in_numpy:
        sizes = "x".join(map(str, layers.hidden_sizes)) or "without hidden layers"
        summary = f"MLP {sizes} {layers.activation}"
    else:
        # `image_encoder` is None if the observation has no image
        summary = f"network of encoders {layers.image_encoder or ''}".rstrip()
    if layers.memory != "none":
        summary += f", {layers.memory} {layers.memory_size}"
    return summary
