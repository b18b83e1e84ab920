"""Spaces and network of a policy as JSON values, as a checkpoint stores them, and a network in words."""

import json
from typing import Any

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ModelClass, NetworkSpec
from dppo.spaces.actions import actions_from_json
from dppo.spaces.spaces import Categories, Spaces, dtype_as_json, dtype_from_json


def model_state(spaces: Spaces, spec: NetworkSpec) -> dict[str, Any]:
    """Return spaces and network as JSON values, for `model_from`."""
    optional: dict[str, Any] = {"categories": {name: [of.counts, of.starts] for name, of in spaces.categories.items()}}
    optional |= {name: getattr(spaces, name) for name in ("one_of", "dropped", "normalized", "mask")}
    described = {
        "obs": dtype_as_json(spaces.obs),
        "deterministic": spaces.deterministic,
        "actions": spaces.actions.as_json(),
        **{name: value for name, value in optional.items() if value},
        **spec.as_json(),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(described))  # tuples as lists
    return read_back


def model_from(state: dict[str, Any], own: ModelClass | None = None) -> tuple[Spaces, NetworkSpec]:
    """Return the spaces and the network that a checkpoint's state describes; `own` replaces the class that it names."""
    model = state["model"]
    categories = model.get("categories", {}).items()
    spaces = Spaces(
        dtype_from_json(model["obs"]),
        actions_from_json(model["actions"]),
        model["deterministic"],
        categories={name: Categories(tuple(counts), tuple(starts)) for name, (counts, starts) in categories},
        one_of=tuple(model.get("one_of", ())),
        dropped=tuple(model.get("dropped", ())),
        normalized=tuple(model["normalized"]) if "normalized" in model else None,
        mask=model.get("mask"),
    )
    read = spaces.of_network()
    if "model" in model:
        from dppo.ppo.networks.user_module import ModuleSpec

        return spaces, ModuleSpec(read, own or model["model"], model["model_kwargs"], model["dtype"])
    own_std = {"state_dependent_std": model.get("state_dependent_std", False)}
    layers = model.get("layers") or {"shared": False, "activation": model["activation"]} | own_std
    hidden_sizes = tuple(model.get("layers", model)["hidden_sizes"])
    return spaces, BuiltInSpec(read, Layers(**layers | {"hidden_sizes": hidden_sizes}), model["dtype"])


def network_summary(spec: NetworkSpec) -> str:
    """Return `MLP 64x64 tanh, lstm 64`."""
    if not isinstance(spec, BuiltInSpec):
        return f"network {spec.as_json()['model']}"
    of = spec.layers
    memory = f", {of.memory} {of.memory_size}" if of.memory != "none" else ""
    if not spec.acts_in_numpy:
        return f"network of encoders {of.image_encoder or ''}".rstrip() + memory
    return f"MLP {'x'.join(map(str, of.hidden_sizes)) or 'without hidden layers'} {of.activation}{memory}"
