"""Environments with images and nested observations, from end to end: train, play."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config, random_weights
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from kinds import KINDS, RunOf, settings, small
from recorder import Notes
from worlds import observed
from worlds.faulty import Faulty

import dppo
from dppo.envs.make import make_env
from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.choice import choose_network
from dppo.run.factory import max_parameters

IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
FLOAT64 = spaces.Box(-9, 9, (2,), np.float64)
EITHER = spaces.OneOf([spaces.Discrete(3, start=7), spaces.Box(-9, 9, (2,))])
NEST = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-9, 9, ()))


def tiny(run_dir: Path, **changes: Any) -> dppo.Config:
    """Return a run of 2 iterations of 20 steps, by two samplers of one environment."""
    base = {"envs_per_sampler": 1, "num_steps": 10, "total_timesteps": 40}
    return small(run_dir, **base | changes)


def plain(kind: str) -> dict[str, Any]:
    return {"env_id": "worlds.observed:Plain", "env_kwargs": {"kind": kind}}


PLAIN = ("discrete", "many", "multidiscrete", "multibinary", "number", "grid", "one of", "tuple")


@pytest.mark.parametrize(
    "changes",
    [
        *map(plain, PLAIN),
        {"env_id": "worlds.observed:Film"},
        {"env_id": "worlds.observed:Film", "trunk": "separate", "image_features": 16},
        {"env_id": "worlds.observed:Film", "image_encoder": "impala"},
        {"env_id": "worlds.observed:Codes", "memory": "gru"},
        {"env_id": "worlds.observed:Picture", "env_kwargs": {"size": 36, "channels": 4}},
        {
            "env_id": "worlds.observed:Picture",
            "image_encoder": "flatten",
            "hidden_sizes": (8,),
            "layer_norm": True,
        },
        {
            "env_id": "worlds.observed:Numbers",
            "norm_obs": True,
            "trunk": "shared",
            "layer_norm": True,
        },
        {"env_id": "CartPole-v1", "trunk": "shared"},
        {"env_id": "CartPole-v1", "layer_norm": True, "activation": "relu"},
    ],
    ids=str,
)
def test_every_kind_of_space_and_network_trains_and_plays(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    result = dppo.train(tiny(tmp_path / "run", **changes))
    policy = dppo.load_policy(result.run_dir)
    env = make_env(changes["env_id"], changes.get("env_kwargs", {}))
    obs, _ = env.reset(seed=0)
    action = policy.act(obs)
    if policy.state_size:
        action, _ = action
    assert env.action_space.contains(action)
    assert np.isfinite(policy.weights).all()


@pytest.mark.parametrize("kind", ["image", "dict observation"])
def test_a_loaded_policy_acts_on_one_observation_and_on_many(kind: str, run_of: RunOf) -> None:
    choices = (0, 1, 2)
    policy = dppo.load_policy(run_of(kind).run_dir)
    env = make_env(KINDS[kind]["env_id"], {})
    obs, _ = env.reset(seed=3)
    assert policy.act(obs) in choices
    assert policy.act(obs, generator=np.random.default_rng(1)) in choices

    if kind == "image":
        three = np.stack([obs, obs, obs])
        assert policy.act(three).shape == (3,)
    else:
        del obs["mission"]  # is not read, and need not be there
        assert policy.act(obs) in choices
        del obs["gear"]
        with pytest.raises(ValueError, match="obs is an observation without part 'gear'"):
            policy.act(obs)
    evaluated = dppo.evaluate(run_of(kind), episodes=2)
    assert len(evaluated.returns) == 2


def test_a_policy_acts_on_many_nested_observations_as_on_each(tmp_path: Path) -> None:
    result = dppo.train(tiny(tmp_path / "run", env_id="worlds.observed:Numbers", norm_obs=True))
    policy = dppo.load_policy(result.run_dir)
    space = observed.Numbers.observation_space
    space.seed(0)
    samples = [space.sample() for _ in range(5)]
    empty: Any = create_empty_array(space, 5)
    together = concatenate(space, samples, empty)
    alone = [policy.act(value) for value in samples]
    assert policy.act(together).tolist() == alone


BATCH = np.zeros((2, 2, 2), np.int64)
REFUSED: dict[str, tuple[gym.Space[Any], Any, str]] = {
    "float image": (IMAGE, np.zeros((8, 8, 3)), "dtype float64 instead of uint8"),
    "pixel": (
        IMAGE,
        np.full((8, 8, 3), 300, np.uint16),
        "that is 300 at index 0, outside uint8 from 0 to 255",
    ),
    "nan": (spaces.Box(-9, 9, (2,)), [[0, 0], [0, np.nan]], "that is nan at index 3"),
    "low": (spaces.Discrete(4, start=2), [2, 5, 1], "that is 1, outside its space from 2 to 5"),
    "leaf": (
        spaces.Dict(a=spaces.Discrete(3)),
        {"a": 3},
        "part 'a' that is 3, outside its space from 0 to 2",
    ),
    "leaves": (
        NEST,
        {"a": [0, 1], "b": 0.5},
        "2 observations in one leaf, and another number in another",
    ),
}


def policy_of(space: gym.Space[Any]) -> dppo.Policy:
    """Return a policy with random weights."""
    env = Faulty(space=space)
    described = describe_spaces(env)
    config = make_config({"env_id": Faulty})
    spec = choose_network(config.network, described).spec
    snapshot = PolicySnapshot(0, random_weights(spec), None)
    return dppo.Policy(described, PPOAgent(spec), snapshot, {"iteration": 0})


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_policy_refuses_what_training_refuses(what: str) -> None:
    space, obs, words = REFUSED[what]
    with pytest.raises(ValueError, match=f"^obs is .*{re.escape(words)}"):
        policy_of(space).act(obs)


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (IMAGE, np.full((2, 8, 8, 3), 255, np.uint8)),
        (spaces.Box(-9, 9, (2,)), [1, 200]),  # bounds are not checked
        (FLOAT64, np.array([0.5, 11.0], np.float32)),
        (spaces.Box(-9, 9, (2, 2), np.int32), BATCH),
        (spaces.Discrete(4, start=2), np.int8(5)),
        (spaces.MultiBinary(2), np.array([True, False])),
        (EITHER, (1, np.zeros(2))),
    ],
    ids=str,
)
def test_a_policy_accepts_what_training_accepts(space: gym.Space[Any], obs: Any) -> None:
    actions = policy_of(space).act(obs)
    assert np.isin(actions, (0, 1)).all()


@pytest.mark.parametrize(
    ("kind", "network", "reason"),
    [
        ("image", "an IMPALA CNN, shared by policy and value", "an image of"),
        (
            "dict observation",
            "a grid CNN, one-hot codes, the numbers as they are, joined into an MLP",
            "9 leaves: cam",
        ),
    ],
)
def test_a_run_says_which_network_it_trains_and_why(
    kind: str, network: str, reason: str, tmp_path: Path
) -> None:
    with Notes() as notes:
        result = dppo.train(settings(kind, tmp_path / "run", total_timesteps=80))
    size = dppo.load_policy(result.run_dir).weights.size
    because = f"because the observation (is|has) {reason}"
    pattern = f"Network: {network}.*, {size:,} parameters, {because}"
    lines = [note for note in notes.texts if note.startswith("Network: ")]
    assert len(lines) == 1
    assert re.match(pattern, lines[0])


def test_a_leaf_inside_another_may_be_named_with_a_slash(tmp_path: Path) -> None:
    run = tmp_path / "run"
    without_camera = settings(
        "dict observation",
        run,
        image_features=None,
        drop_obs=("mission", "robot/note", "camera", "tool"),
    )
    result = dppo.train(without_camera)
    policy = dppo.load_policy(result.run_dir)
    assert "camera" not in policy.spaces.leaves()

    with_camera = settings("dict observation", run, image_features=None)
    with pytest.raises(ConfigError, match="drop_obs="):
        dppo.train(with_camera, resume=run)


def pixels(*shape: int) -> gym.Space[Any]:
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize(
    ("space", "changes"),
    [
        (pixels(84, 84, 4), {"image_encoder": "nature"}),
        (pixels(96, 96, 3), {"image_encoder": "impala", "trunk": "separate"}),
        (pixels(35, 35, 3), {"image_encoder": "grid", "trunk": "separate"}),
        (spaces.Box(-1, 1, (376,), np.float64), {"hidden_sizes": (2048, 2048)}),
    ],
    ids=["nature", "impala", "grid", "wide"],
)
def test_the_object_store_has_room_for_networks_of_all_kinds(
    space: gym.Space[Any], changes: dict[str, Any]
) -> None:
    """Ray starts before the spaces are known, and so before the network is."""
    config = make_config({"env_id": "CartPole-v1", **changes})
    described = describe_spaces(Faulty(space=space))
    network = choose_network(config.network, described)
    assert max_parameters(config) >= network.spec.num_parameters
