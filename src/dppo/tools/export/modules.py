"""A whole policy as one torch module of torch's own layers, from observations to the environment's actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dppo.numerics.torch_modes import default_dtype
from dppo.ppo.exchange.inputs import each_leaf, leaf_scales, scale_for
from dppo.ppo.exchange.scales import CLIP, ObsScale
from dppo.ppo.kernels.convolutions import Dense
from dppo.ppo.networks.encoders import Output
from dppo.ppo.networks.images import Bits
from dppo.ppo.networks.mlp import MLP
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.actions import (
    Actions,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    NestedActions,
)
from dppo.spaces.spaces import MASK, Spaces, joined, leaves

EXAMPLE_ROWS = 3


class ExportedPolicy(nn.Module):
    """Normalizer, network, mask, most likely action and its bounds: the function of `Policy.act`, for n observations.

    Inputs: `obs`, or `obs.KEY` for each leaf of a Dict or Tuple; `action_mask` [n, M], unless it is a leaf; with
    memory, `state` [n, S], zeros at the start of an episode. Outputs: `action`, or `action.KEY` for each part; with
    memory, `next_state`; and the parameters of the distribution, of each part: `logits`, or `mean` and `log_std` of a
    Gaussian before its bounds.
    """

    def __init__(
        self, spaces: Spaces, spec: NetworkSpec, weights: np.ndarray, scale: ObsScale | None
    ) -> None:
        """Build it with the flat vector `weights`; raise ConfigError if a network of the user's is refused."""
        super().__init__()
        self._spaces = spaces
        self._spec = spec
        self._read = spaces.of_network()
        self._network = _network(spec, weights)
        scale = scale_for(scale, self._read.obs, spec.dtype)
        self._scales = {} if scale is None else leaf_scales(scale, self._read.obs)
        self.inputs = leaves(spaces.of_policy().returned, name="obs")
        """Name of each input, and its dtype with the shape of one row."""
        if spaces.mask in ("method", "info"):
            self.inputs[MASK] = spaces.obs[MASK]
        if spec.state_size:
            self.inputs["state"] = np.dtype((spec.dtype, (spec.state_size,)))
        self.example = tuple(
            torch.from_numpy(np.zeros(EXAMPLE_ROWS, dtype)) for dtype in self.inputs.values()
        )
        example = dict(zip(self.inputs, self.example, strict=True))
        self.output_names = list(self.outputs(example))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(dict(zip(self.inputs, inputs, strict=True))).values())

    def outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        obs: Any = {key: self._leaf(key, inputs) for key in self._read.leaves()}
        obs = obs.get("", obs)
        next_state = dict[str, Tensor]()
        with default_dtype(getattr(torch, self._spec.dtype)):
            if self._spec.state_size:
                state = inputs["state"]
                sequence = each_leaf(obs, lambda leaf: leaf[None])  # of one step
                starts = torch.zeros_like(state[:, 0], dtype=torch.bool)
                outputs = self._network(sequence, state, starts[None])
                heads, _, next_state["next_state"] = outputs
                head = heads[0]
            else:
                head, _ = self._network(obs)
        if self._spaces.mask is not None:
            head = self._spec.distribution.limited_in_torch(head, self._masks(inputs))
        decisions = dict(decided(self._spaces.actions, self._spec.distribution, head))
        actions = {
            name: tensor for name, tensor in decisions.items() if name.partition(".")[0] == "action"
        }
        return actions | next_state | decisions

    def _masks(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return masks [n, M]; of a part of the observation that is nested, the arrays side by side."""
        if self._spaces.mask != "leaf":
            return inputs[MASK].bool()
        names = leaves(self._spaces.obs[MASK], name=f"obs.{MASK}")
        return torch.cat([inputs[name].bool() for name in names], dim=1)

    def _leaf(self, key: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return a leaf of the observations as the network reads it; zeros for one that only the value reads."""
        if key in self._spaces.critic_obs:
            rows = next(iter(inputs.values())).shape[0]
            shape = self._read.leaves()[key].shape
            leaf = torch.zeros((rows, *shape))
        else:
            leaf = inputs[named("obs", key)]
        if key in self._scales:
            scale = self._scales[key]
            mean = torch.tensor(scale.mean)
            std = torch.tensor(scale.std)
            leaf = ((leaf.to(mean.dtype) - mean) / std).clamp(-CLIP, CLIP)
        return leaf.to(getattr(torch, self._spec.dtype))


def named(kind: str, key: str) -> str:
    """Return the name of an input or output: `obs` of all, `obs.KEY` of a part."""
    return f"{kind}.{key}" if key else kind


def _network(spec: NetworkSpec, weights: np.ndarray) -> nn.Module:
    module = spec.module(0)
    parameters = {
        name: torch.from_numpy(array.copy()) for name, array in spec.unflatten(weights).items()
    }
    module.load_state_dict(parameters, strict=False)  # it may have buffers
    if isinstance(module, MLP):
        del module.value
        module.forward = partial(_policy_alone, module)  # type: ignore[method-assign, assignment]
    for part in module.modules():
        if isinstance(part, Dense | Output):
            part.forward = partial(nn.Linear.forward, part)  # type: ignore[method-assign]
        elif isinstance(part, Bits):
            part.forward = partial(_bits, part)  # type: ignore[method-assign]
    return module.eval().requires_grad_(False)


def _policy_alone(mlp: MLP, obs: Tensor) -> tuple[Tensor, None]:
    """Do as `MLP.forward`, without the value."""
    return mlp.head(obs.reshape(obs.shape[0], -1)), None


def _bits(part: Bits, leaf: Tensor) -> Tensor:
    """Do as `Bits.forward`, by arithmetic: torch's exporter to ONNX has no shifts."""
    cells = part.image(leaf).unsqueeze(2)
    shifted = torch.floor(cells / 2.0 ** part.shift.to(leaf.dtype))
    return torch.remainder(shifted, 2).flatten(1, 2)


def decided(
    actions: Actions, distribution: Any, head: Tensor, key: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the most likely actions, as `Actions.to_env` returns them, and of their distribution.

    Args:
        distribution: the distribution with the parameters `head` [n, H].
        key: the part of an action that these are.
    """
    if isinstance(actions, NestedActions):
        keys = actions.keys or map(str, range(len(actions.parts)))
        heads = distribution.heads(head, torch.cat)
        for part_key, part, part_distribution, part_head in zip(
            keys, actions.parts, distribution.parts, heads, strict=True
        ):
            yield from decided(part, part_distribution, part_head, joined(key, part_key))
        return
    if isinstance(actions, BoxActions):
        mean, log_std = head.chunk(2, dim=1)
        tensors = {"action": _bounded(actions, mean), "mean": mean, "log_std": log_std}
    elif isinstance(actions, DiscreteActions):
        tensors = {"action": head.argmax(dim=1) + actions.start, "logits": head}
    else:
        assert isinstance(actions, MultiDiscreteActions)
        logits_of_parts = head.split(actions.counts, dim=1)
        chosen = torch.stack([logits.argmax(dim=1) for logits in logits_of_parts], dim=1)
        shifted = chosen + torch.tensor(actions.starts)
        shifted = shifted.to(getattr(torch, actions.dtype))
        tensors = {"action": shifted.reshape(-1, *actions.shape), "logits": head}
    for kind, tensor in tensors.items():
        yield named(kind, key), tensor


def _bounded(actions: BoxActions, mean: Tensor) -> Tensor:
    """Return what `BoxActions.to_env` does, in float32 unless the space has float64."""
    dtype = torch.float32
    if actions.low.dtype == np.float64:
        dtype = torch.float64
    low = torch.tensor(actions.low, dtype=dtype)
    high = torch.tensor(actions.high, dtype=dtype)
    action = mean.reshape(-1, *actions.shape)
    # in NumPy: torch.export refuses branches on the elements of a tensor
    is_mapped = actions.mapped()
    if is_mapped.any():
        if actions.bounds == "squash":
            unit = action.tanh()
        else:
            unit = action.clamp(-1, 1)
        half_width = 0.5 * (high - low)
        mapped = low + (unit + 1).to(dtype) * half_width
        if is_mapped.all():
            action = mapped
        else:
            action = torch.where(torch.tensor(is_mapped), mapped, action.to(dtype))
    action = action.to(dtype).clamp(low, high)
    return action.to(getattr(torch, str(actions.low.dtype)))
