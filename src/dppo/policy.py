"""A trained policy, loaded from a run, without torch and without Ray."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo import streams
from dppo.envs.rows import rows_of
from dppo.errors import CheckpointError, ConfigError
from dppo.ppo.agent import PPOAgent
from dppo.ppo.choice import BUILT_IN
from dppo.ppo.inputs import measured_shape
from dppo.ppo.mlp import MLPSpec
from dppo.ppo.module import ModelClass, ModuleSpec
from dppo.ppo.network import NetworkSpec
from dppo.ppo.normalizer import Moments, ObsScale, Statistics
from dppo.ppo.segment import PolicySnapshot
from dppo.records import checkpoint as checkpoints
from dppo.records.checkpoint import Checkpoint
from dppo.spaces import (
    BoxActions,
    Categories,
    DiscreteActions,
    Spaces,
    dtype_as_json,
    dtype_from_json,
    is_image,
)
from dppo.streams import Stream


class Policy:
    """Chooses actions as the environment wants them."""

    def __init__(self, spaces: Spaces, agent: PPOAgent, snapshot: PolicySnapshot, state: dict[str, Any]) -> None:
        self.spaces = spaces
        self.weights = snapshot.weights
        """[P] all parameters, flat."""
        self.state = state
        """What the checkpoint says of itself: iteration, global_step, config, versions."""
        self._agent = agent
        self._agent.load(snapshot)

    def act(self, obs: Any, *, generator: np.random.Generator | None = None) -> Any:
        """The action for one observation [*O], or actions for a batch of them [n, *O].

        Of a Dict or a Tuple space, a batch has such an axis in front of each leaf.

        Args:
            generator: draw the action from the policy with it; None takes the likeliest action.

        Raises:
            ValueError: `obs` has another shape than the environment's observations.
        """
        rows, single = self._rows(obs)
        if generator is None:
            actions = self._agent.best_action(rows)
        else:
            noise = self._agent.distribution.noise(generator, 1, len(rows), self._agent.spec.dtype)[0]
            actions = self._agent.act(rows, noise).actions
        actions = self._for_env(actions)
        return actions[0] if single else actions

    def _rows(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Return observations [n, *O] as they are stored in training, and whether `obs` is a single one."""
        if self.spaces.obs.names is not None:
            return rows_of(obs, self.spaces)
        rows = np.asarray(obs)
        shape = self.spaces.obs.shape
        single = rows.shape == shape
        if not single and rows.shape[1:] != shape:
            raise ValueError(f"obs has shape {rows.shape}. Give {shape}, or (n, {', '.join(map(str, shape))}).")
        if single:
            rows = rows[None]
        if np.issubdtype(rows.dtype, np.floating):
            rows = rows.astype(np.float32)  # as in training
        elif is_image(self.spaces.obs):
            rows = rows.astype(np.uint8, casting="same_kind", copy=False)
        return rows, single

    def _for_env(self, actions: np.ndarray) -> np.ndarray:
        space = self.spaces.actions
        if isinstance(space, DiscreteActions):
            return actions + space.start
        shaped = actions.reshape(len(actions), *space.shape)
        clipped: np.ndarray = np.clip(shaped, space.low, space.high).astype(space.low.dtype)
        return clipped


def load_policy(path: str | Path, *, model: ModelClass | None = None) -> Policy:
    """Return the policy of a run's newest good checkpoint, or of the checkpoint at `path`.

    Loading runs no code from the folder, with one exception: for a network of your own the checkpoint holds the import
    path of its class, and that module is imported. Load such a policy from folders that you trust, or give `model`.

    Args:
        model: the class of the run's own network, or its import path, in place of what the checkpoint names.

    Raises:
        CheckpointError: there is none, it is damaged, or its network cannot be made here.
    """
    return read(path).policy(model)


@dataclass(frozen=True, slots=True)
class Read:
    """A checkpoint of a policy as it was read: nothing of it has run."""

    path: Path
    checkpoint: Checkpoint

    @property
    def model_name(self) -> str | None:
        """The import path of the network that the checkpoint names; None for the default network."""
        model = self.checkpoint.state.get("model")
        name = model.get("model") if isinstance(model, dict) else None
        return None if name is None or name == BUILT_IN else str(name)

    def policy(self, model: ModelClass | None = None) -> Policy:
        """Return the policy; imports what `model_name` names, or `model` in place of it.

        Raises:
            CheckpointError: it is not a policy, or its network cannot be made here.
        """
        state, arrays = self.checkpoint.state, self.checkpoint.arrays
        try:
            spaces, spec = model_from(state, model)
            weights = spec.flatten(arrays["model"])
            agent = PPOAgent(spec)
            statistics = arrays["normalizer"]
        except ConfigError as error:
            raise CheckpointError(
                f"{self.path}: its network cannot be made here: {error} If its module is elsewhere, add that to "
                f"PYTHONPATH, or give the class: load_policy(path, model=Class)."
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            if self.model_name is not None and isinstance(error, ValueError):
                raise CheckpointError(
                    f"{self.path}: {self.model_name} is not the network that was trained: {error}. Use the class as it "
                    f"was then."
                ) from None
            raise CheckpointError(
                f"{self.path}: holds no policy of dppo ({error!r}). Give the folder of a run."
            ) from None
        obs_scale = None
        if "obs.count" in statistics:
            moments = Statistics(obs=Moments.empty(measured_shape(spaces.obs))).loaded(statistics).obs
            assert moments is not None
            obs_scale = ObsScale.of(moments)
        return Policy(spaces, agent, PolicySnapshot(state["iteration"], weights, obs_scale), state)


def read(path: str | Path) -> Read:
    """Read a run's newest good checkpoint, or the checkpoint at `path`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = checkpoints.find(Path(path))
    for problem in found.damaged:
        # A warning: whoever calls this has no terminal of ours.
        warnings.warn(f"passed over a newer checkpoint, which is damaged: {problem}", stacklevel=3)
    return Read(found.path, checkpoints.load(found.path))


def evaluation_generator(seed: int, episode: int) -> np.random.Generator:
    """The stream from which a stochastic policy draws in an evaluation episode."""
    return streams.generator(seed, Stream.EVALUATION, episode)


# ------------------------------------------------------------------ spaces and model as JSON


def model_state(spaces: Spaces, spec: NetworkSpec) -> dict[str, Any]:
    """Return what `model_from` needs, as JSON values."""
    actions = spaces.actions
    if isinstance(actions, DiscreteActions):
        described: dict[str, Any] = {"discrete": {"n": actions.n, "start": actions.start}}
    else:
        dtype = str(actions.low.dtype)
        described = {"box": {"low": actions.low.tolist(), "high": actions.high.tolist(), "dtype": dtype}}
    network: dict[str, Any] = json.loads(json.dumps(spec.as_json()))  # a tuple as the list that is read back
    return {
        "obs": dtype_as_json(spaces.obs),
        "deterministic": spaces.deterministic,
        "actions": described,
        **_observations_as_json(spaces),
        **network,
    }


def _observations_as_json(spaces: Spaces) -> dict[str, Any]:
    """Return what else is known of the observations, without what is empty."""
    described = {
        "categories": {name: [list(of.counts), list(of.starts)] for name, of in spaces.categories.items()},
        "one_of": list(spaces.one_of),
        "dropped": list(spaces.dropped),
    }
    return {name: value for name, value in described.items() if value}


def model_from(state: dict[str, Any], own: ModelClass | None = None) -> tuple[Spaces, NetworkSpec]:
    """Return spaces and network of a checkpoint, from its state.

    Args:
        own: the class of the user's network, in place of the one that the state names.
    """
    model = state["model"]
    actions: DiscreteActions | BoxActions
    if "discrete" in model["actions"]:
        actions = DiscreteActions(**model["actions"]["discrete"])
    else:
        box = model["actions"]["box"]
        actions = BoxActions(np.array(box["low"], box["dtype"]), np.array(box["high"], box["dtype"]))
    categories = model.get("categories", {}).items()
    spaces = Spaces(
        dtype_from_json(model["obs"]),
        actions,
        model["deterministic"],
        categories={name: Categories(tuple(counts), tuple(starts)) for name, (counts, starts) in categories},
        one_of=tuple(model.get("one_of", ())),
        dropped=tuple(model.get("dropped", ())),
    )
    if "model" in model:
        return spaces, ModuleSpec.of(spaces, own or model["model"], model["model_kwargs"], model["dtype"])
    return spaces, MLPSpec.of(spaces, tuple(model["hidden_sizes"]), model["activation"], model["dtype"])
