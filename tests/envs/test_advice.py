"""Advice on refused spaces is followed as it stands: the wrapped environment is accepted, and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import gymnasium as gym
import numpy as np
import pytest
from builders import group_of
from gymnasium import spaces
from remedies import executes

from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.exchange.records import EnvLog
from dppo.spaces.actions import DiscreteActions

FOUR = spaces.Box(-1, 1, (4,))
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
        return self.observation_space.sample(), 1.0, False, len(self.actions) % 5 == 0, {}


def refusal_of(env: gym.Env[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        describe_spaces(env)
    message = str(caught.value)
    assert "\n" not in message
    assert "--" not in message
    return message


def wrapped_as_advised(message: str, which: int = 0, **names: Any) -> gym.Env[Any, Any]:
    codes = re.findall(r"eturn (gymnasium\.wrappers\..*?)(?: from a function that|\.$)", message)
    env: gym.Env[Any, Any] = eval(codes[which], {"gymnasium": gymnasium, "np": np, **names})
    return env


def play(env: gym.Env[Any, Any], steps: int = 20, drop_obs: Sequence[str] = ()) -> None:
    """Run it as a sampler does, with actions as a policy would draw them."""
    described = describe_spaces(env, drop_obs=drop_obs)
    group = group_of([env], drop_obs=drop_obs)
    log = EnvLog()
    obs = np.empty(1, described.obs)
    group.start(obs, log)
    rng = np.random.default_rng(0)
    results = (obs, np.empty(1), *np.ones((3, 1), bool))
    for _ in range(steps):
        if isinstance(described.actions, DiscreteActions):
            actions: Any = rng.integers(described.actions.n, size=1)
        else:
            actions = rng.normal(size=(1, described.actions.width)) * 5
        group.step((actions, *results), log)


ODD = {
    "a mission": (
        spaces.Dict(image=PIXELS, mission=Mission(), where=FOUR),
        "mission",
        ["image", "where"],
    ),
    "a text in a tuple": (
        spaces.Tuple([spaces.Text(5), FOUR, spaces.Discrete(3)]),
        "0",
        ["1", "2"],
    ),
    "a graph": (spaces.Dict(arm=FOUR, net=spaces.Graph(FOUR, None)), "net", ["arm"]),
    "a sequence within, and a text": (
        spaces.Dict(
            arm=FOUR, seen=spaces.Dict(cars=spaces.Sequence(FOUR), me=FOUR), word=spaces.Text(3)
        ),
        "seen.cars word",
        ["arm", "seen.me"],
    ),
}


@executes("envs/spaces.py: Use `drop_obs={}` to leave {} out")
@pytest.mark.parametrize("name", ODD)
def test_leaves_that_are_not_numbers_are_named_and_can_be_left_out(name: str) -> None:
    space, out, left = ODD[name]
    env = Sampled(space)
    message = refusal_of(env)
    assert message.startswith(f"observation_space, leaf {out.split()[0]!r}: is ")
    assert f"Use `drop_obs={out}` to leave" in message
    assert list(describe_spaces(env, drop_obs=out.split()).leaves()) == left
    play(env, drop_obs=out.split())


@executes("envs/spaces.py: Write a function encode(obs) that returns n numbers in float32")
@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Graph(FOUR, None),
        spaces.Sequence(FOUR),
        spaces.Dict(a=spaces.Dict(b=spaces.Text(5))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_observations_without_any_numbers_need_a_function_that_encodes_them(
    space: gym.Space[Any],
) -> None:
    env = Sampled(space)
    message = refusal_of(env)
    assert "Write a function encode(obs) that returns n numbers in float32. Then return" in message
    encoded = wrapped_as_advised(message, env=env, encode=lambda obs: np.ones(3, np.float32), n=3)
    play(encoded)


ARMS = spaces.Box(-2, 2, (2,), np.float32)
REAL: dict[str, gym.Space[Any]] = {
    "whole numbers": spaces.Box(-3000, 9000, (2,), np.int64),
    "a whole number": spaces.Box(-2, 2000, (), np.int32),
}
LISTED: dict[str, gym.Space[Any]] = {
    "a text among others": spaces.Dict(grip=spaces.Text(3), turn=ARMS),
    "large numbers": spaces.Box(-(2**40), 2**40, (2,), np.int64),
    "text": spaces.Text(3),
    "one of several": spaces.OneOf([spaces.Discrete(2), ARMS]),
}


def advised_actions(space: gym.Space[Any]) -> tuple[Sampled, gym.Env[Any, Any], str]:
    env = Sampled(act=space)
    message = refusal_of(env)
    assert message.startswith("action_space")
    choices = [space.sample() for _ in range(5)]
    return env, wrapped_as_advised(message, env=env, CHOICES=choices), message


@executes("envs/spaces.py: Return gymnasium.wrappers.{} {}")
@pytest.mark.parametrize("name", REAL)
def test_many_choices_are_rounded(name: str) -> None:
    env, wrapped, _ = advised_actions(REAL[name])
    play(wrapped)
    assert all(REAL[name].contains(action) for action in env.actions)
    assert len({str(action) for action in env.actions}) > 3


@executes("envs/spaces.py: Make a list CHOICES of the actions to choose from")
@pytest.mark.parametrize("name", LISTED)
def test_other_actions_are_chosen_from_a_list(name: str) -> None:
    env, wrapped, message = advised_actions(LISTED[name])
    assert "Make a list CHOICES of the actions to choose from." in message
    assert describe_spaces(wrapped).actions == DiscreteActions(5)
    play(wrapped)
    assert all(LISTED[name].contains(action) for action in env.actions)
