"""Spaces as plain data: dtypes of observations, actions, and refusals."""

from __future__ import annotations

import json
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from scripted import OBS

from dppo.envs.make import make_env
from dppo.envs.spaces import describe_spaces, dtype_of
from dppo.errors import ConfigError
from dppo.spaces.actions import BoxActions, DiscreteActions
from dppo.spaces.spaces import Categories, dtype_as_json, dtype_from_json, is_image, leaves


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (spaces.Box(-1, 1, (3,), np.float64), "float32", (3,)),
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), "uint8", (4, 5, 3)),
        (spaces.Box(0, 9, (2,), np.int64), "int64", (2,)),
        (spaces.Box(-1, 1, (), np.float64), "float32", ()),
        (spaces.Box(-1, 1, (2,), np.dtype(">f4")), "=f4", (2,)),
        (spaces.Discrete(5), "int64", ()),
        (spaces.MultiBinary(4), "int8", (4,)),
        (spaces.MultiDiscrete([2, 3]), "int64", (2,)),
    ],
    ids=str,
)
def test_an_array_of_observations_is_the_plain_array(
    space: gym.Space[Any], dtype: str, shape: tuple[int, ...]
) -> None:
    obs = dtype_of(space)
    storage = np.empty((6, 2), obs)
    assert (storage.dtype, storage.shape, obs.shape) == (np.dtype(dtype), (6, 2, *shape), shape)
    assert storage.flags.c_contiguous


def test_a_structured_observation_has_no_padding() -> None:
    assert OBS.names == ("arm", "camera", "gear", "lamps")
    assert OBS.itemsize == 2 * 4 + 4 + 6 + 8 + 3
    assert {
        name: (leaf.dtype.type, leaf.shape) for name, leaf in leaves(np.empty((6, 2), OBS)).items()
    } == {
        "arm.0": (np.float32, (6, 2, 2)),
        "arm.1": (np.float32, (6, 2)),
        "camera": (np.uint8, (6, 2, 2, 3, 1)),
        "gear": (np.int64, (6, 2)),
        "lamps": (np.int8, (6, 2, 3)),
    }


LEAVES = st.builds(
    lambda dtype, shape: np.dtype((dtype, tuple(shape))),
    st.sampled_from(["float32", "float16", "uint8", "int64", "bool"]),
    st.lists(st.integers(1, 3), max_size=3),
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(
        st.text("abc.0é", min_size=1, max_size=4), inner, min_size=1, max_size=3
    ).map(lambda fields: np.dtype(list(fields.items()))),
    max_leaves=6,
)


@given(NESTS)
def test_a_dtype_survives_json_and_pickle(obs: np.dtype[Any]) -> None:
    back = dtype_from_json(json.loads(json.dumps(dtype_as_json(obs))))
    assert back == pickle.loads(pickle.dumps(obs)) == obs
    assert np.empty(3, back).shape == np.empty(3, obs).shape
    assert back.itemsize == obs.itemsize


EMPTY = spaces.Box(-1, 1, (3, 0))
TWO = spaces.Discrete(2)


class Shaped(gym.Env[Any, Any]):
    """Has spaces, and nothing else."""

    def __init__(self, obs: Any = None, act: Any = None) -> None:
        self.observation_space = obs or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = act or spaces.Discrete(2)


def test_spaces_become_plain_data() -> None:
    described = describe_spaces(
        Shaped(spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(4, start=-1))
    )
    assert (described.obs, described.deterministic) == (np.dtype(("uint8", (2, 3))), True)
    assert described.actions == DiscreteActions(4, -1)
    low = np.array([[-1.0], [-np.inf]], np.float64)
    high = np.array([[1.0], [np.inf]])
    actions = describe_spaces(Shaped(act=spaces.Box(low, high, dtype=np.float64))).actions
    assert isinstance(actions, BoxActions)
    assert (actions.shape, actions.width, actions.low.dtype.type) == ((2, 1), 2, np.float64)
    assert_array_equal(actions.low, low)
    assert_array_equal(actions.high, high)


def test_an_environment_is_nondeterministic_if_its_spec_says_so() -> None:
    env = make_env("CartPole-v1", {})
    assert env.spec is not None
    assert describe_spaces(env).deterministic
    gym.register("worlds/Chance-v0", entry_point="worlds.simple:Counting", nondeterministic=True)
    try:
        assert not describe_spaces(make_env("worlds/Chance-v0", {})).deterministic
    finally:
        del gym.registry["worlds/Chance-v0"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            Shaped(spaces.Tuple([EMPTY])),
            ("observation_space, leaf '0': is Box([], [], (3, 0), float32)",),
        ),
        (Shaped(spaces.Dict(a=spaces.Dict())), ("observation_space, leaf 'a': has no parts",)),
        (Shaped(spaces.Dict({"": TWO})), ("observation_space: has the keys ['']",)),
        (
            Shaped(act=spaces.Dict(arm=spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]))),
            ("action_space['arm'][1]=Text(", "is a Text, which is not supported", "CHOICES"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_names_the_part(env: gym.Env[Any, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_spaces(env)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_part_of_a_nest_is_described() -> None:
    nest = spaces.Dict(
        dials=spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, -1]])),
        hand=spaces.Tuple([spaces.Discrete(4, start=2), spaces.Box(-1, 1, (3,), np.float64)]),
        tool=spaces.OneOf([spaces.Discrete(3), spaces.Dict(a=spaces.MultiBinary(2))]),
    )
    described = describe_spaces(Shaped(nest))
    assert list(described.leaves()) == [
        "dials",
        "hand.0",
        "hand.1",
        "tool.branch",
        "tool.0",
        "tool.1.a",
    ]
    assert described.categories == {
        "dials": Categories((2, 3), (1, -1)),
        "hand.0": Categories((4,), (2,)),
        "tool.branch": Categories((2,), (0,)),
        "tool.0": Categories((3,), (0,)),
    }
    assert (described.one_of, described.dropped) == (("tool",), ())
    assert described == pickle.loads(pickle.dumps(described))


def test_parts_are_left_out_by_name() -> None:
    nest = spaces.Dict(
        hand=spaces.Tuple([spaces.Discrete(4), spaces.Text(5)]),
        mission=spaces.Text(9),
        where=spaces.Box(-1, 1, (2,)),
    )
    described = describe_spaces(Shaped(nest), drop_obs=["mission", "hand/1"])
    assert list(described.leaves()) == ["hand.0", "where"]
    assert described.dropped == ("mission", "hand.1")
    for names in (["mission", "hand"], ["mission", "hand.0", "hand.1"]):
        assert list(describe_spaces(Shaped(nest), drop_obs=names).leaves()) == ["where"]
    words = (
        "mision: is not a leaf of the observation. Its leaves are hand.0, hand.1, mission, where"
    )
    with pytest.raises(ConfigError, match=words):
        describe_spaces(Shaped(nest), drop_obs=["mision"])


@pytest.mark.parametrize(
    "shape", [(84, 84, 3), (3, 64, 64), (4, 84, 84, 1), (128,), (8, 8)], ids=str
)
def test_images_are_bytes_with_three_axes_or_more(shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.float32):
        described = describe_spaces(Shaped(spaces.Box(0, 255, shape, dtype))).obs
        assert described == np.dtype((dtype, shape))
        assert is_image(described) == (dtype == np.uint8 and len(shape) >= 3)


def test_an_environment_without_a_spec_is_taken_to_be_deterministic() -> None:
    class Duck:
        observation_space = spaces.Box(-1, 1, (3,), np.float32)
        action_space = spaces.Discrete(2)

    assert describe_spaces(Duck()).deterministic  # type: ignore[arg-type]


def test_a_space_of_the_old_package_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type(
        "Box",
        (),
        {"__module__": "gym.spaces.box", "__str__": lambda self: "Box(3,)", "shape": (3,)},
    )
    for env in (Shaped(old()), Shaped(act=old())):
        with pytest.raises(
            ConfigError, match=r"space=Box\(3,\): is a space of the package gym, .* shimmy"
        ):
            describe_spaces(env)
