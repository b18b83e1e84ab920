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
from dppo.spaces.spaces import Categories, Spaces, dtype_as_json, dtype_from_json, is_image, leaves


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
    assert obs.shape == shape

    storage = np.empty((6, 2), obs)
    assert storage.dtype == np.dtype(dtype)
    assert storage.shape == (6, 2, *shape)
    assert storage.flags.c_contiguous


def test_a_structured_observation_has_no_padding() -> None:
    assert OBS.names == ("arm", "camera", "gear", "lamps")
    assert OBS.itemsize == 2 * 4 + 4 + 6 + 8 + 3

    storage = np.empty((6, 2), OBS)
    stored = {}
    for name, leaf in leaves(storage).items():
        stored[name] = (leaf.dtype.type, leaf.shape)
    assert stored == {
        "arm.0": (np.float32, (6, 2, 2)),
        "arm.1": (np.float32, (6, 2)),
        "camera": (np.uint8, (6, 2, 2, 3, 1)),
        "gear": (np.int64, (6, 2)),
        "lamps": (np.int8, (6, 2, 3)),
    }


def leaf_of(dtype: str, shape: list[int]) -> np.dtype[Any]:
    return np.dtype((dtype, tuple(shape)))


def nest_of(fields: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


def nests(inner: Any) -> Any:
    """Return a strategy of one to three named parts."""
    names = st.text("abc.0é", min_size=1, max_size=4)
    fields = st.dictionaries(names, inner, min_size=1, max_size=3)
    return fields.map(nest_of)


DTYPES = st.sampled_from(["float32", "float16", "uint8", "int64", "bool"])
SHAPES = st.lists(st.integers(1, 3), max_size=3)
LEAVES = st.builds(leaf_of, DTYPES, SHAPES)
NESTS = st.recursive(LEAVES, nests, max_leaves=6)


@given(NESTS)
def test_a_dtype_survives_json_and_pickle(obs: np.dtype[Any]) -> None:
    text = json.dumps(dtype_as_json(obs))
    back = dtype_from_json(json.loads(text))
    assert back == obs
    assert pickle.loads(pickle.dumps(obs)) == obs
    assert back.itemsize == obs.itemsize
    stored = np.empty(3, back)
    assert stored.shape == np.empty(3, obs).shape


EMPTY = spaces.Box(-1, 1, (3, 0))
TWO = spaces.Discrete(2)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)


class Shaped(gym.Env[Any, Any]):
    """Has spaces, and nothing else."""

    def __init__(self, obs: Any = None, act: Any = None) -> None:
        self.observation_space = obs or VECTOR
        self.action_space = act or TWO


def described(obs: Any, **options: Any) -> Spaces:
    return describe_spaces(Shaped(obs), **options)


def test_spaces_become_plain_data() -> None:
    pixels = spaces.Box(0, 255, (2, 3), np.uint8)
    gears = spaces.Discrete(4, start=-1)
    pixel_spaces = describe_spaces(Shaped(pixels, gears))
    assert pixel_spaces.obs == np.dtype(("uint8", (2, 3)))
    assert pixel_spaces.deterministic
    assert pixel_spaces.actions == DiscreteActions(4, -1)

    high = np.array([1.0, np.inf]).reshape(2, 1)
    low = -high
    forces = spaces.Box(low, high, dtype=np.float64)
    force_spaces = describe_spaces(Shaped(act=forces))
    actions = force_spaces.actions
    assert isinstance(actions, BoxActions)
    assert actions.shape == (2, 1)
    assert actions.width == 2
    assert actions.low.dtype.type == np.float64
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


TEXT_IN_ARM = spaces.Dict(arm=spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]))
REFUSED: list[tuple[Shaped, list[str]]] = [
    (
        Shaped(spaces.Tuple([EMPTY])),
        ["observation_space, leaf '0': is Box([], [], (3, 0), float32)"],
    ),
    (Shaped(spaces.Dict(a=spaces.Dict())), ["observation_space, leaf 'a': has no parts"]),
    (Shaped(spaces.Dict({"": TWO})), ["observation_space: has the keys ['']"]),
    (
        Shaped(act=TEXT_IN_ARM),
        ["action_space['arm'][1]=Text(", "is a Text, which is not supported", "CHOICES"],
    ),
]


@pytest.mark.parametrize(("env", "words"), REFUSED, ids=lambda value: type(value).__name__)
def test_a_refusal_names_the_part(env: gym.Env[Any, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_spaces(env)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message


def test_every_part_of_a_nest_is_described() -> None:
    counts = np.array([[2, 3]])
    starts = np.array([[1, -1]])
    branch = spaces.Dict(a=spaces.MultiBinary(2))
    nest = spaces.Dict(
        dials=spaces.MultiDiscrete(counts, start=starts),
        hand=spaces.Tuple([spaces.Discrete(4, start=2), spaces.Box(-1, 1, (3,), np.float64)]),
        tool=spaces.OneOf([spaces.Discrete(3), branch]),
    )
    nest_spaces = described(nest)
    assert list(nest_spaces.leaves()) == [
        "dials",
        "hand.0",
        "hand.1",
        "tool.branch",
        "tool.0",
        "tool.1.a",
    ]
    assert nest_spaces.categories == {
        "dials": Categories((2, 3), (1, -1)),
        "hand.0": Categories((4,), (2,)),
        "tool.branch": Categories((2,), (0,)),
        "tool.0": Categories((3,), (0,)),
    }
    assert nest_spaces.one_of == ("tool",)
    assert nest_spaces.dropped == ()

    copied = pickle.loads(pickle.dumps(nest_spaces))
    assert copied == nest_spaces


def test_parts_are_left_out_by_name() -> None:
    nest = spaces.Dict(
        hand=spaces.Tuple([spaces.Discrete(4), spaces.Text(5)]),
        mission=spaces.Text(9),
        where=spaces.Box(-1, 1, (2,)),
    )

    def names_without(*dropped: str) -> list[str]:
        return list(described(nest, drop_obs=dropped).leaves())

    assert names_without("mission", "hand/1") == ["hand.0", "where"]
    assert names_without("mission", "hand") == ["where"]
    assert names_without("mission", "hand.0", "hand.1") == ["where"]

    number_spaces = described(nest, drop_obs=["mission", "hand/1"])
    assert number_spaces.dropped == ("mission", "hand.1")

    words = (
        "mision: is not a leaf of the observation. Its leaves are hand.0, hand.1, mission, where"
    )
    with pytest.raises(ConfigError, match=words):
        names_without("mision")


IMAGE_SHAPES = {
    "channels last": (84, 84, 3),
    "channels first": (3, 64, 64),
    "stack": (4, 84, 84, 1),
}
OTHER_SHAPES = {"vector": (128,), "matrix": (8, 8)}


@pytest.mark.parametrize("kind", IMAGE_SHAPES | OTHER_SHAPES)
def test_images_are_bytes_with_three_axes_or_more(kind: str) -> None:
    shape = (IMAGE_SHAPES | OTHER_SHAPES)[kind]
    byte_obs = described(spaces.Box(0, 255, shape, np.uint8)).obs
    assert byte_obs == np.dtype((np.uint8, shape))
    assert is_image(byte_obs) == (kind in IMAGE_SHAPES)

    float_obs = described(spaces.Box(0, 255, shape, np.float32)).obs
    assert float_obs == np.dtype((np.float32, shape))
    assert not is_image(float_obs)


def test_an_environment_without_a_spec_is_taken_to_be_deterministic() -> None:
    class Duck:
        observation_space = spaces.Box(-1, 1, (3,), np.float32)
        action_space = spaces.Discrete(2)

    assert describe_spaces(Duck()).deterministic  # type: ignore[arg-type]


def test_a_space_of_the_old_package_is_recognized() -> None:
    class Box:
        __module__ = "gym.spaces.box"
        shape = (3,)

        def __str__(self) -> str:
            return "Box(3,)"

    words = r"space=Box\(3,\): is a space of the package gym, .* shimmy"
    for env in (Shaped(Box()), Shaped(act=Box())):
        with pytest.raises(ConfigError, match=words):
            describe_spaces(env)
