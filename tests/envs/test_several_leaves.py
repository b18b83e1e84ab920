"""Observations with several leaves: packed, checked, and stored in one buffer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from scripted import OBS, ROBOT, Scripted, started

from dppo.envs.checks.returned import BadResult, packer
from dppo.envs.spaces import dtype_of
from dppo.errors import EnvironmentFault
from dppo.spaces.spaces import leaves


def test_an_observation_of_a_box_is_copied_in_its_own_dtype() -> None:
    pack = packer(dtype_of(spaces.Box(-1, 1, (2,), np.float64)))
    raw = np.array([0.1, 0.2])
    packed = pack(raw)
    raw[:] = 0
    # checksums use all its bits
    assert (packed.dtype.type, packed.tolist()) == (np.float64, [0.1, 0.2])


@pytest.mark.parametrize("seed", range(5))
def test_a_nested_observation_is_packed_leaf_by_leaf(seed: int) -> None:
    ROBOT.seed(seed)
    raw = ROBOT.sample()
    packed = packer(OBS)(raw)
    assert (packed.dtype, packed.shape, len(packed.tobytes())) == (OBS, (), OBS.itemsize)
    named = leaves(packed)
    np.testing.assert_array_equal(named["arm.0"], raw["arm"][0].astype(np.float32))
    np.testing.assert_array_equal(named["arm.1"], raw["arm"][1])
    np.testing.assert_array_equal(named["camera"], raw["camera"])
    np.testing.assert_array_equal(named["lamps"], raw["lamps"])
    assert named["gear"] == raw["gear"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"camera": np.zeros((2, 2, 1), np.uint8)},
            "observation leaf 'camera' of shape (2, 2, 1) instead of (2, 3, 1)",
        ),
        (
            {"camera": np.zeros((2, 3, 1))},
            "observation leaf 'camera' of dtype float64 instead of uint8",
        ),
        ({"gear": 2.5}, "observation leaf 'gear' of dtype float64 instead of int64"),
        (
            {"arm": (np.array([0.0, np.nan]), 0.0)},
            "observation leaf 'arm.0' that is nan at index 1",
        ),
        (
            {"arm": (np.zeros(2), np.float32(np.inf))},
            "observation leaf 'arm.1' that is inf at index 0",
        ),
        ({"arm": (np.zeros(2),)}, "observation leaf 'arm' without part '1'"),
        ({"arm": (np.zeros(2), 0.0, 0.0)}, "observation leaf 'arm' with the unexpected part '2'"),
        (
            {"arm": np.zeros(3)},
            "observation leaf 'arm' of type ndarray instead of one with the parts 0, 1",
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
    return packer(dtype_of(TOOL, drop=["name"]), one_of=["tool"], dropped=["name"])(raw)


def test_a_branch_is_packed_beside_the_zeros_of_the_others() -> None:
    for raw, expected in (
        ({"name": "x", "at": 2, "tool": (1, np.array([0.5, -0.5]))}, (2, (1, 0, [0.5, -0.5]))),
        ({"at": 3, "tool": (np.int64(0), 2)}, (3, (0, 2, [0.0, 0.0]))),
    ):
        packed = pack_tool(raw)
        assert packed["at"] == expected[0]
        tool = packed["tool"]
        assert (int(tool["branch"]), int(tool["0"]), tool["1"].tolist()) == expected[1]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ((2, 0), "observation leaf 'tool' of branch 2 instead of one of 0, 1"),
        ((0,), "observation leaf 'tool' of type tuple instead of (branch, value)"),
        ((1, np.zeros(3)), "observation leaf 'tool.1' of shape (3,) instead of (2,)"),
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
    sighted = Blind(space=ROBOT)
    stepper = started(sighted, Blind(space=ROBOT))
    sighted.steps = 1
    with pytest.raises(EnvironmentFault, match=words):
        stepper.step([0, 0])


def test_structured_observations_are_pickled_in_one_buffer() -> None:
    obs = np.ones((9, 2), OBS)
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(obs, 5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [obs.nbytes]
    assert len(frame) < 1000
    assert pickle.loads(frame, buffers=buffers).tobytes() == obs.tobytes()
