"""Errors of an environment are reported with their place: sampler, env, episode, seed, step, and leaf."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.testing import assert_array_equal
from scripted import OBS, ROBOT, Scripted, started
from worlds.faulty import CrashingSimulator

from dppo import streams
from dppo.envs.checks.faults import REMEDY
from dppo.envs.checks.returned import BadResult, packer
from dppo.envs.spaces import dtype_of
from dppo.errors import EnvironmentFault
from dppo.spaces.spaces import leaves
from dppo.streams import Stream


def fault_of(env: gym.Env[Any, Any], steps: int = 3) -> EnvironmentFault:
    """Return the fault of an environment that is the second of its group."""
    first = Scripted(space=env.observation_space, actions=env.action_space)
    with pytest.raises(EnvironmentFault) as caught:
        play(first, env, steps)
    return caught.value


def play(first: gym.Env[Any, Any], second: gym.Env[Any, Any], steps: int) -> None:
    stepper = started(first, second)
    for _ in range(steps):
        stepper.step([0, 0])


def place(phase: str, step: int) -> str:
    """Return the start of every message: sampler, environment, episode, its seed, and the step."""
    seed = streams.integer(1, Stream.EPISODES, 0, 1, 0)
    return f"sampler 0 (Test-v0), env 1: {phase} of episode 0 (seed {seed}, step {step}) "


@pytest.mark.parametrize(("phase", "step"), [("step", 2), ("reset", 0)])
def test_an_error_names_the_place_and_carries_the_users_traceback(phase: str, step: int) -> None:
    fault = fault_of(CrashingSimulator(CartPoleEnv(), where=phase, at_step=step))
    start = place(phase, step)
    words = f"raised RuntimeError: the simulator failed in its {phase}"
    assert fault.message.startswith(start + words)

    traceback = fault.remote_traceback
    assert traceback.startswith("Traceback (most recent call last):")
    assert "faulty.py" in traceback
    assert "_fail_if" in traceback
    assert "group.py" not in traceback  # the user's frames only
    assert str(fault) == f"{fault.message}\n{traceback}".rstrip()


@pytest.mark.proves("calls `sys.exit` in a step")
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


BYTES = gym.spaces.Box(0, 255, (2,), np.uint8)
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"obs": np.array([-np.inf, 0.0])}, "an observation that is -inf at index 0."),
    ({"obs": np.zeros((1, 2))}, "an observation of shape (1, 2) instead of (2,)."),
    ({"obs": 5.0}, "an observation of shape () instead of (2,)."),
    ({"obs": [None, 1.0]}, "an observation of dtype object instead of float32."),
    (
        {"obs": np.array([0.7, 0.2]), "space": BYTES},
        "an observation of dtype float64 instead of uint8.",
    ),
    ({"obs": {"obs": 1}}, "an observation of shape () instead of (2,)."),
    ({"obs": [[1.0], [1.0, 2.0]]}, "an observation that is not an array"),
    ({"obs": np.array([0.0, 1e39])}, "an observation that is 1e+39 at index 1"),
    ({"obs": Elsewhere()}, "an observation that is not an array (it lies on a GPU)"),
    ({"reward": "2"}, "'2' as the reward, which is not a number."),
    ({"reward": "much"}, "'much' as the reward, which is not a number."),
    (
        {"reward": np.zeros(2)},
        "array([0., 0.]) as the reward, which is not a number. The reward must be",
    ),
    ({"reward": -np.inf}, "-inf as the reward."),
    ({"reward": 10**400}, "a reward too large for a float."),
]


@pytest.mark.proves("returns a reward that is None, text, NaN or 1e300")
@pytest.mark.parametrize(("returned", "words"), INVALID, ids=[words for _, words in INVALID])
def test_an_invalid_observation_or_reward_of_a_step_is_reported(
    returned: dict[str, Any], words: str
) -> None:
    message = fault_of(Scripted(**returned)).message
    start = place("step", 2)
    assert message.startswith(f"{start}returned {words}")
    # a new environment would return the same
    is_lasting = " instead of " in words or "must be" in words
    assert message.endswith(REMEDY) == (not is_lasting)


@pytest.mark.parametrize(
    "accepted", [[1, 2], np.array([3e38, -3e38]), np.array([1, 0], bool), (0.5, 0.5)], ids=str
)
def test_an_observation_of_another_dtype_is_converted(accepted: Any) -> None:
    stepper = started(Scripted(obs=accepted))
    for _ in range(2):
        stepper.step([0])
    expected = np.asarray(accepted, np.float32)
    assert_array_equal(stepper.obs[0], expected)


FIVE = "instead of (observation, reward, terminated, truncated, info)"


@pytest.mark.proves("returns a flag that is not a boolean, or four values")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (np.zeros(2), 1.0, False, {}),
            f"returned a tuple of 4 {FIVE}. This is the API of Gym before 0.26.",
        ),
        ((np.zeros(2), 1.0), f"returned a tuple of 2 {FIVE}."),
        (None, f"returned NoneType {FIVE}."),
        (np.zeros(2), f"returned ndarray {FIVE}."),
        (
            (np.zeros(2), 1.0, False, np.zeros(2, bool), {}),
            "returned truncated=array([False, False]), which is not a",
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
    ("reset", "words"),
    [
        (
            lambda env, **_: np.array([0.0, 1.0]),
            "returned ndarray instead of (observation, info). This is",
        ),
        (
            lambda env, **_: [0.0, 1.0],
            "returned an observation of shape () instead of (2,). This is",
        ),
        (lambda env: np.zeros(2), "raised TypeError: "),
    ],
    ids=["array", "list", "no seed"],
)
def test_a_reset_of_the_old_api_is_recognized(reset: Any, words: str) -> None:
    old = type("Old", (Scripted,), {"reset": reset})
    message = fault_of(old()).message
    assert message.startswith(place("reset", 0) + words)
    advice = "the API of Gym before 0.26. Use `wrappers=dppo.envs.wrappers:old_api`, or let reset take a seed"
    assert advice in message


def test_an_observation_of_a_box_is_copied_in_its_own_dtype() -> None:
    box = spaces.Box(-1, 1, (2,), np.float64)
    pack = packer(dtype_of(box))
    raw = np.array([0.1, 0.2])
    packed = pack(raw)
    raw[:] = 0
    # checksums use all its bits
    assert packed.dtype.type == np.float64
    assert packed.tolist() == [0.1, 0.2]


@pytest.mark.parametrize("seed", range(5))
def test_a_nested_observation_is_packed_leaf_by_leaf(seed: int) -> None:
    ROBOT.seed(seed)
    raw = ROBOT.sample()
    packed = packer(OBS)(raw)
    assert packed.dtype == OBS
    assert packed.shape == ()
    assert len(packed.tobytes()) == OBS.itemsize

    packed_leaves = leaves(packed)
    hand, elbow = raw["arm"]
    assert_array_equal(packed_leaves["arm.0"], hand.astype(np.float32))
    assert_array_equal(packed_leaves["arm.1"], elbow)
    for name in ("camera", "lamps", "gear"):
        assert_array_equal(packed_leaves[name], raw[name])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"camera": np.zeros((2, 2, 1), np.uint8)},
            "an observation part 'camera' of shape (2, 2, 1) instead of (2, 3, 1)",
        ),
        (
            {"camera": np.zeros((2, 3, 1))},
            "an observation part 'camera' of dtype float64 instead of uint8",
        ),
        ({"gear": 2.5}, "an observation part 'gear' of dtype float64 instead of int64"),
        (
            {"arm": (np.array([0.0, np.nan]), 0.0)},
            "an observation part 'arm.0' that is nan at index 1",
        ),
        (
            {"arm": (np.zeros(2), np.float32(np.inf))},
            "an observation part 'arm.1' that is inf at index 0",
        ),
        ({"arm": (np.zeros(2),)}, "an observation part 'arm' without part '1'"),
        (
            {"arm": (np.zeros(2), 0.0, 0.0)},
            "an observation part 'arm' with the unexpected part '2'",
        ),
        (
            {"arm": np.zeros(3)},
            "an observation part 'arm' of type ndarray instead of one with the parts 0, 1",
        ),
        ({"horn": 1}, "an observation with the unexpected part 'horn'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_leaf_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    ROBOT.seed(0)
    with pytest.raises(BadResult) as caught:
        packer(OBS)({**ROBOT.sample(), **change})
    assert str(caught.value) == words


TOOL = spaces.Dict(
    name=spaces.Text(9),
    tool=spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
    at=spaces.Discrete(4),
)


def pack_tool(raw: Any) -> np.ndarray:
    dtype = dtype_of(TOOL, drop=["name"])
    pack = packer(dtype, one_of=["tool"], dropped=["name"])
    return pack(raw)


def test_a_branch_is_packed_beside_the_zeros_of_the_others() -> None:
    pose = np.array([0.5, -0.5])
    packed = pack_tool({"name": "x", "at": 2, "tool": (1, pose)})
    assert packed["at"] == 2

    tool = packed["tool"]
    assert tool["branch"] == 1
    assert tool["0"] == 0
    assert tool["1"].tolist() == [0.5, -0.5]

    choice = np.int64(0)
    packed = pack_tool({"at": 3, "tool": (choice, 2)})
    assert packed["at"] == 3

    tool = packed["tool"]
    assert tool["branch"] == 0
    assert tool["0"] == 2
    assert tool["1"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ((2, 0), "an observation part 'tool' of branch 2 instead of one of 0, 1"),
        ((0,), "an observation part 'tool' of type tuple instead of (branch, value)"),
        ((1, np.zeros(3)), "an observation part 'tool.1' of shape (3,) instead of (2,)"),
    ],
    ids=str,
)
def test_a_wrong_branch_is_refused_by_name(tool: Any, words: str) -> None:
    with pytest.raises(BadResult) as caught:
        pack_tool({"at": 0, "tool": tool})
    assert str(caught.value) == words


def test_a_fault_names_place_and_leaf() -> None:
    class Blind(Scripted):
        def _answer(self) -> Any:
            obs = super()._answer()
            if self.steps == 1:
                del obs["camera"]
            return obs

    words = r"env 1: step of episode 0 \(seed \d+, step 1\) returned an observation without part 'camera'"
    stepper = started(Scripted(space=ROBOT), Blind(space=ROBOT))
    with pytest.raises(EnvironmentFault, match=words):
        stepper.step([0, 0])


def test_structured_observations_are_pickled_in_one_buffer() -> None:
    obs = np.ones((9, 2), OBS)
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(obs, 5, buffer_callback=buffers.append)
    [buffer] = buffers
    assert buffer.raw().nbytes == obs.nbytes
    assert len(frame) < 1000

    copied = pickle.loads(frame, buffers=buffers)
    assert copied.tobytes() == obs.tobytes()
