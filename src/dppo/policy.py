"""A trained policy, loaded from a run, without torch and without Ray."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dppo import streams
from dppo.errors import CheckpointError
from dppo.ppo.agent import PPOAgent
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.normalizer import Moments, Statistics
from dppo.ppo.segment import PolicySnapshot
from dppo.records import checkpoint as checkpoints
from dppo.spaces import BoxActions, DiscreteActions, Spaces
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

        Args:
            generator: draw the action from the policy with it; None takes the likeliest action.
        Raises:
            ValueError: `obs` has another shape than the environment's observations.
        """
        rows = np.asarray(obs)
        shape = self.spaces.obs_shape
        single = rows.shape == shape
        if not single and rows.shape[1:] != shape:
            raise ValueError(f"obs has shape {rows.shape}. Give {shape}, or (n, {', '.join(map(str, shape))}).")
        if single:
            rows = rows[None]
        if np.issubdtype(rows.dtype, np.floating):
            rows = rows.astype(np.float32)  # as in training
        if generator is None:
            actions = self._agent.best_action(rows)
        else:
            noise = self._agent.distribution.noise(generator, 1, len(rows), self._agent.spec.dtype)[0]
            actions = self._agent.act(rows, noise).actions
        actions = self._for_env(actions)
        return actions[0] if single else actions

    def _for_env(self, actions: np.ndarray) -> np.ndarray:
        space = self.spaces.actions
        if isinstance(space, DiscreteActions):
            return actions + space.start
        shaped = actions.reshape(len(actions), *space.shape)
        clipped: np.ndarray = np.clip(shaped, space.low, space.high).astype(space.low.dtype)
        return clipped


def load_policy(path: str | Path) -> Policy:
    """The policy of a run's newest good checkpoint, or of the checkpoint at `path`. Runs no code from it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = checkpoints.find(Path(path))
    for problem in found.damaged:
        # A warning, for whoever calls this has no terminal of ours to be told on.
        warnings.warn(f"passed over a newer checkpoint, which is damaged: {problem}", stacklevel=2)
    checkpoint = checkpoints.load(found.path)
    try:
        spaces, spec = model_from(checkpoint.state)
        weights = spec.flatten(checkpoint.arrays["model"])
        arrays = checkpoint.arrays["normalizer"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{found.path}: holds no policy of dppo ({error!r}). Give the folder of a run.") from None
    obs_mean = obs_std = None
    if "obs.count" in arrays:
        statistics = Statistics(obs=Moments.empty(spaces.obs_shape)).loaded(arrays)
        assert statistics.obs is not None
        obs_mean, obs_std = statistics.obs.mean_and_std()
    snapshot = PolicySnapshot(checkpoint.state["iteration"], weights, obs_mean, obs_std)
    return Policy(spaces, PPOAgent(spec), snapshot, checkpoint.state)


def evaluation_generator(seed: int, episode: int) -> np.random.Generator:
    """The stream from which a stochastic policy draws in an evaluation episode."""
    return streams.generator(seed, Stream.EVALUATION, episode)


# ------------------------------------------------------------------ spaces and model as JSON


def model_state(spaces: Spaces, spec: ModelSpec) -> dict[str, Any]:
    """What `model_from` needs, as JSON values."""
    actions = spaces.actions
    if isinstance(actions, DiscreteActions):
        described: dict[str, Any] = {"discrete": {"n": actions.n, "start": actions.start}}
    else:
        dtype = str(actions.low.dtype)
        described = {"box": {"low": actions.low.tolist(), "high": actions.high.tolist(), "dtype": dtype}}
    return {
        "obs_shape": list(spaces.obs_shape),
        "obs_dtype": spaces.obs_dtype,
        "deterministic": spaces.deterministic,
        "actions": described,
        "hidden_sizes": list(spec.hidden_sizes),
        "activation": spec.activation,
        "dtype": spec.dtype,
    }


def model_from(state: dict[str, Any]) -> tuple[Spaces, ModelSpec]:
    """Spaces and model of a checkpoint, from its state."""
    model = state["model"]
    actions: DiscreteActions | BoxActions
    if "discrete" in model["actions"]:
        actions = DiscreteActions(**model["actions"]["discrete"])
    else:
        box = model["actions"]["box"]
        actions = BoxActions(np.array(box["low"], box["dtype"]), np.array(box["high"], box["dtype"]))
    spaces = Spaces(tuple(model["obs_shape"]), model["obs_dtype"], actions, model["deterministic"])
    return spaces, ModelSpec.of(spaces, tuple(model["hidden_sizes"]), model["activation"], model["dtype"])
