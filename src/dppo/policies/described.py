"""Spaces and network of a policy as JSON values, as a checkpoint stores them, and a network in words."""

from __future__ import annotations

import json
from typing import Any

from dppo.ppo.networks.choice import BUILT_IN
from dppo.ppo.networks.default.mlp import MLPSpec
from dppo.ppo.networks.memory.memory_mlp import MEMORY_NETWORK, MemoryMLPSpec
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.torch_module import ModelClass, ModuleSpec
from dppo.spaces.actions import actions_from_json
from dppo.spaces.spaces import Categories, Spaces, dtype_as_json, dtype_from_json


def model_state(spaces: Spaces, spec: NetworkSpec) -> dict[str, Any]:
    """Return spaces and network as JSON values, for `model_from`."""
    network: dict[str, Any] = json.loads(json.dumps(spec.as_json()))  # as it will be read back: tuples as lists
    return {
        "obs": dtype_as_json(spaces.obs),
        "deterministic": spaces.deterministic,
        "actions": spaces.actions.as_json(),
        **_observations_as_json(spaces),
        **network,
    }


def _observations_as_json(spaces: Spaces) -> dict[str, Any]:
    """Return what else is known of the observations, without what is empty."""
    described = {
        "categories": {name: [list(of.counts), list(of.starts)] for name, of in spaces.categories.items()},
        "one_of": list(spaces.one_of),
        "dropped": list(spaces.dropped),
        "normalized": list(spaces.normalized or ()),
        "mask": spaces.mask,
    }
    return {name: value for name, value in described.items() if value}


def model_from(state: dict[str, Any], own: ModelClass | None = None) -> tuple[Spaces, NetworkSpec]:
    """Return the spaces and the network that a checkpoint's state describes.

    Args:
        own: the class of the user's network, in place of the one that the state names.
    """
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
        return spaces, ModuleSpec.of(read, own or model["model"], model["model_kwargs"], model["dtype"])
    if "memory_mlp" in model:
        return spaces, MemoryMLPSpec.of(read, model["dtype"], model["memory_mlp"])
    return spaces, MLPSpec.of(
        read,
        tuple(model["hidden_sizes"]),
        model["activation"],
        model["dtype"],
        state_dependent_std=model.get("state_dependent_std", False),
    )


def network_in_words(spec: NetworkSpec) -> str:
    """Return `MLP 64x64 tanh, lstm 64`."""
    if isinstance(spec, MLPSpec | MemoryMLPSpec):
        mlp = f"MLP {'x'.join(map(str, spec.hidden_sizes)) or 'without hidden layers'} {spec.activation}"
        return mlp if isinstance(spec, MLPSpec) else f"{mlp}, {spec.memory} {spec.memory_size}"
    described = spec.as_json()
    model, kwargs = described["model"], described["model_kwargs"]
    if model not in BUILT_IN:
        return f"network {model}"
    memory = f", {kwargs['memory']} {kwargs['memory_size']}" if model == MEMORY_NETWORK else ""
    return f"network of encoders {kwargs.get('image_encoder', '')}".rstrip() + memory
