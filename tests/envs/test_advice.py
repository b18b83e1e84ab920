"""Advice on refused spaces is followed as it stands: the wrapped environment is accepted, and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import gymnasium as gym
import numpy as np
import pytest
from builders import group_of
from gymnasium import spaces
from remedies import executes
from scripted import Stepper

from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions, DiscreteActions

FOUR = spaces.Box(-1, 1, (4,))
WORD = spaces.Text(5)
CARS = spaces.Sequence(FOUR)
GRAPH = spaces.Graph(FOUR, None)
PIXELS = spaces.Box(0, 255, (4, 4, 3), np.uint8)


class Mission(spaces.Space[str]):
    """Like MiniGrid's: a space that inherits from Space alone, and does not say whether it can be flattened."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go to the door"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class Sampled(gym.Env[Any, Any]):
    """Returns samples of its observation space, and records the actions."""

    def __init__(self, obs: Any = FOUR, act: Any = None) -> None:
        self.observation_space = obs
        self.action_space = spaces.Discrete(2) if act is None else act
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        obs = self.observation_space.sample()
        truncated = len(self.actions) % 5 == 0
        return obs, 1.0, False, truncated, {}


def refusal_of(env: gym.Env[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        describe_spaces(env)
    message = str(caught.value)
    assert "\n" not in message
    assert "--" not in message
    return message


def wrapped_as_advised(message: str, **names: Any) -> gym.Env[Any, Any]:
    """Execute the first code that a message names."""
    pattern = r"eturn (gymnasium\.wrappers\..*?)(?: from a function that|\.$)"
    first, *_ = re.findall(pattern, message)
    namespace = {"gymnasium": gymnasium, "np": np, **names}
    env: gym.Env[Any, Any] = eval(first, namespace)
    return env


def random_actions(actions: Actions, rng: np.random.Generator) -> np.ndarray:
    """Return an action as a policy would draw it."""
    if isinstance(actions, DiscreteActions):
        return rng.integers(actions.n, size=1)
    return 5 * rng.normal(size=(1, actions.width))


def play(env: gym.Env[Any, Any], steps: int = 20, drop_obs: Sequence[str] = ()) -> None:
    """Run it as a sampler does."""
    group = group_of([env], drop_obs=drop_obs)
    stepper = Stepper(group)
    stepper.start()
    actions = describe_spaces(env, drop_obs=drop_obs).actions
    rng = np.random.default_rng(0)
    for _ in range(steps):
        stepper.step(random_actions(actions, rng))


SEEN = spaces.Dict(cars=CARS, me=FOUR)


class Odd(NamedTuple):
    """An observation with leaves that are not numbers, their names, and the names of the other leaves."""

    space: gym.Space[Any]
    odd: list[str]
    numbers: list[str]


ODD = {
    "a mission": Odd(
        spaces.Dict(image=PIXELS, mission=Mission(), where=FOUR),
        odd=["mission"],
        numbers=["image", "where"],
    ),
    "a text in a tuple": Odd(
        spaces.Tuple([WORD, FOUR, spaces.Discrete(3)]), odd=["0"], numbers=["1", "2"]
    ),
    "a graph": Odd(spaces.Dict(arm=FOUR, net=GRAPH), odd=["net"], numbers=["arm"]),
    "a sequence within, and a text": Odd(
        spaces.Dict(arm=FOUR, seen=SEEN, word=WORD),
        odd=["seen.cars", "word"],
        numbers=["arm", "seen.me"],
    ),
}


@executes("envs/spaces.py: Use `drop_obs={}` to leave {} out")
@pytest.mark.parametrize("name", ODD)
def test_leaves_that_are_not_numbers_are_named_and_can_be_left_out(name: str) -> None:
    space, odd, numbers = ODD[name]
    env = Sampled(space)
    message = refusal_of(env)
    assert message.startswith(f"observation_space, leaf {odd[0]!r}: is ")
    assert f"Use `drop_obs={' '.join(odd)}` to leave" in message

    described = describe_spaces(env, drop_obs=odd)
    assert list(described.leaves()) == numbers

    play(env, drop_obs=odd)


def encode(obs: Any) -> np.ndarray:
    return np.ones(3, np.float32)


@executes("envs/spaces.py: Write a function encode(obs) that returns n numbers in float32")
@pytest.mark.parametrize(
    "space",
    [WORD, GRAPH, CARS, spaces.Dict(a=spaces.Dict(b=WORD))],
    ids=lambda space: type(space).__name__,
)
def test_observations_without_any_numbers_need_a_function_that_encodes_them(
    space: gym.Space[Any],
) -> None:
    env = Sampled(space)
    message = refusal_of(env)
    assert "Write a function encode(obs) that returns n numbers in float32. Then return" in message
    encoded = wrapped_as_advised(message, env=env, encode=encode, n=3)
    play(encoded)


ARMS = spaces.Box(-2, 2, (2,), np.float32)
REAL: dict[str, gym.Space[Any]] = {
    "whole numbers": spaces.Box(-3000, 9000, (2,), np.int64),
    "a whole number": spaces.Box(-2, 2000, (), np.int32),
}
INTEGERS = spaces.Box(-(2**40), 2**40, (2,), np.int64)
LISTED: dict[str, gym.Space[Any]] = {
    "a text among others": spaces.Dict(grip=WORD, turn=ARMS),
    "large numbers": INTEGERS,
    "text": WORD,
    "one of several": spaces.OneOf([spaces.Discrete(2), ARMS]),
}


class Advised(NamedTuple):
    """An environment with refused actions, and the same one wrapped as the message says."""

    env: Sampled
    wrapped: gym.Env[Any, Any]
    message: str

    def play(self) -> list[Any]:
        """Return the actions that the environment got."""
        play(self.wrapped)
        return self.env.actions


def advised_actions(space: gym.Space[Any]) -> Advised:
    env = Sampled(act=space)
    message = refusal_of(env)
    assert message.startswith("action_space")
    choices = [space.sample() for _ in range(5)]
    wrapped = wrapped_as_advised(message, env=env, CHOICES=choices)
    return Advised(env, wrapped, message)


@executes("envs/spaces.py: Return gymnasium.wrappers.{} {}")
@pytest.mark.parametrize("name", REAL)
def test_many_choices_are_rounded(name: str) -> None:
    space = REAL[name]
    actions = advised_actions(space).play()
    assert all(space.contains(action) for action in actions)
    different = {str(action) for action in actions}
    assert len(different) > 3


@executes("envs/spaces.py: Make a list CHOICES of the actions to choose from")
@pytest.mark.parametrize("name", LISTED)
def test_other_actions_are_chosen_from_a_list(name: str) -> None:
    space = LISTED[name]
    advised = advised_actions(space)
    assert "Make a list CHOICES of the actions to choose from." in advised.message
    described = describe_spaces(advised.wrapped)
    assert described.actions == DiscreteActions(5)
    actions = advised.play()
    assert all(space.contains(action) for action in actions)
