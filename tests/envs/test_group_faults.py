"""Errors of an environment are reported with their place: sampler, env, episode, seed and step."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scripted import Scripted, started
from worlds.faulty import CrashingSimulator

from dppo import streams
from dppo.envs.checks.faults import REMEDY
from dppo.errors import EnvironmentFault
from dppo.streams import Stream


def fault_of(env: gym.Env[Any, Any], steps: int = 3) -> EnvironmentFault:
    """Return the fault of an environment that is the second of its group."""
    with pytest.raises(EnvironmentFault) as caught:
        play(Scripted(space=env.observation_space, actions=env.action_space), env, steps)
    return caught.value


def play(first: gym.Env[Any, Any], second: gym.Env[Any, Any], steps: int) -> None:
    stepper = started(first, second)
    for _ in range(steps):
        stepper.step([0, 0])


def place(phase: str, step: int) -> str:
    """Return the start of every message: sampler, environment, episode, its seed, and the step."""
    seed = streams.integer(1, Stream.EPISODES, 0, 1, 0)
    return f"sampler 0 (Test-v0), env 1: {phase} of episode 0 (seed {seed}, step {step}) "


def test_a_step_that_raises_names_the_place_and_carries_the_users_traceback() -> None:
    fault = fault_of(CrashingSimulator(CartPoleEnv(), at_step=2))
    assert fault.message.startswith(place("step", 2) + "raised RuntimeError: the simulator failed in its step")
    assert fault.remote_traceback.startswith("Traceback (most recent call last):")
    assert "faulty.py" in fault.remote_traceback
    assert "_fail_if" in fault.remote_traceback
    assert "group.py" not in fault.remote_traceback  # the user's frames only
    assert str(fault) == f"{fault.message}\n{fault.remote_traceback}".rstrip()


def test_a_reset_that_raises_names_the_place() -> None:
    fault = fault_of(CrashingSimulator(CartPoleEnv(), where="reset"))
    assert fault.message.startswith(place("reset", 0) + "raised RuntimeError: the simulator failed in its reset")
    assert "_fail_if" in fault.remote_traceback


def test_sys_exit_in_a_step_is_a_fault_and_not_an_exit() -> None:
    class Leaving(Scripted):
        def step(self, action: Any) -> Any:
            sys.exit("licence expired")

    fault = fault_of(Leaving())
    assert fault.message.startswith(place("step", 1) + "raised SystemExit: licence expired")
    assert "Leaving" in fault.remote_traceback or "sys.exit" in fault.remote_traceback


class Elsewhere:
    """Like a tensor on a GPU."""

    def __repr__(self) -> str:
        return "Elsewhere()"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it lies on a GPU")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.array([-np.inf, 0.0]), "returned an observation that is -inf at index 0."),
        (np.zeros(3, np.float32), "returned an observation of shape (3,) instead of (2,)."),
        (np.zeros((1, 2)), "returned an observation of shape (1, 2) instead of (2,)."),
        (5.0, "returned an observation of shape () instead of (2,)."),
        (["a", "b"], "returned an observation of dtype <U1 instead of float32."),
        ([None, 1.0], "returned an observation of dtype object instead of float32."),
        ({"obs": 1}, "returned an observation of shape () instead of (2,)."),
        ([[1.0], [1.0, 2.0]], "returned an observation that is not an array"),
        (np.array([0.0, 1e39]), "returned an observation that is 1e+39 at index 1"),
        (Elsewhere(), "returned an observation that is not an array (it lies on a GPU)"),
    ],
    ids=str,
)
def test_an_invalid_observation_of_a_step_is_reported(returned: Any, words: str) -> None:
    assert fault_of(Scripted(obs=returned)).message.startswith(place("step", 2) + words)


def test_an_invalid_observation_of_a_reset_is_reported() -> None:
    fault = fault_of(Scripted(obs=np.array([np.nan, 0.0]), at_step=0))
    assert fault.message == place("reset", 0) + f"returned an observation that is nan at index 0. {REMEDY}"


def test_floats_are_not_converted_to_integers() -> None:
    space = gym.spaces.Box(0, 255, (2,), np.uint8)
    fault = fault_of(Scripted(obs=np.array([0.7, 0.2]), space=space))
    assert fault.message == place("step", 2) + f"returned an observation of dtype float64 instead of uint8. {REMEDY}"


@pytest.mark.parametrize("accepted", [[1, 2], np.array([3e38, -3e38]), np.array([1, 0], bool), (0.5, 0.5)], ids=str)
def test_an_observation_of_another_dtype_is_converted(accepted: Any) -> None:
    stepper = started(Scripted(obs=accepted))
    stepper.step([0])
    stepper.step([0])
    np.testing.assert_array_equal(stepper.obs[0], np.asarray(accepted, np.float32))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None as the reward, which is not a number."),
        ("much", "returned 'much' as the reward, which is not a number."),
        (np.zeros(2), "returned array([0., 0.]) as the reward, which is not a number."),
        (np.nan, "returned nan as the reward."),
        (-np.inf, "returned -inf as the reward."),
        (10**400, "returned a reward too large for a float."),
    ],
    ids=str,
)
def test_an_invalid_reward_is_reported(returned: Any, words: str) -> None:
    assert fault_of(Scripted(reward=returned)).message == place("step", 2) + f"{words} {REMEDY}"


FIVE = "instead of (observation, reward, terminated, truncated, info)"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((np.zeros(2), 1.0, False, {}), f"returned a tuple of 4 {FIVE}. This is the API of Gym before 0.26."),
        ((np.zeros(2), 1.0), f"returned a tuple of 2 {FIVE}."),
        (None, f"returned NoneType {FIVE}."),
        (np.zeros(2), f"returned ndarray {FIVE}."),
        (
            (np.zeros(2), 1.0, False, np.zeros(2, bool), {}),
            "returned truncated=array([False, False]), which is not a boolean.",
        ),
    ],
    ids=["old Gym", "two", "nothing", "an observation", "a vector's flags"],
)
def test_an_invalid_result_of_a_step_is_reported(answer: Any, words: str) -> None:
    class Misshapen(Scripted):
        def step(self, action: Any) -> Any:
            return answer

    assert fault_of(Misshapen()).message.startswith(place("step", 1) + words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (np.array, "returned ndarray instead of (observation, info). This is the API of Gym before 0.26."),
        (list, "returned an observation of shape () instead of (2,). This is the API of Gym before 0.26."),
    ],
    ids=["array", "list"],
)
def test_a_reset_that_returns_only_an_observation_is_recognized_as_old(kind: Any, words: str) -> None:
    class Old(Scripted):
        def reset(self, **keywords: Any) -> Any:
            return kind([0.0, 1.0])

    message = fault_of(Old()).message
    assert message.startswith(place("reset", 0) + words)
    assert "shimmy" in message


def test_a_reset_without_a_seed_is_recognized_as_old() -> None:
    class Older(Scripted):
        def reset(self) -> Any:  # type: ignore[override]
            return np.zeros(2)

    message = fault_of(Older()).message
    assert message.startswith(place("reset", 0) + "raised TypeError: ")
    assert "the API of Gym before 0.26. Let reset take a seed and return (observation, info)" in message
