"""EnvGroup: its log, arrays that environments use again, replays, and the end."""

from __future__ import annotations

import time
import zlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import group_of
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scripted import ROBOT, Scripted, Stepper, started

from dppo.envs.checks.returned import packer
from dppo.envs.group import EnvGroup
from dppo.envs.spaces import dtype_of
from dppo.ppo.exchange.records import EnvLog, SamplerCarry


def test_episodes_are_logged_in_the_order_of_their_ends_and_once() -> None:
    stepper = started(
        Scripted(length=3, info={"is_success": np.True_}),
        Scripted(length=2, reward=5.0, info={"is_success": np.nan}),
    )
    for _ in range(4):
        stepper.step([0, 0])
    logged = [(e.env, e.index, e.episode_return, e.length, e.success) for e in stepper.log.episodes]
    assert logged == [(1, 0, 6.0, 2, None), (0, 0, 3.0, 3, True), (1, 1, 6.0, 2, None)]
    opened = stepper.group.open_episodes(EnvLog())
    assert opened["episodes"].tolist() == [1, 2]
    assert opened["episode_lengths"].tolist() == [1, 0]
    assert opened["episode_returns"].tolist() == [1, 0]


def test_time_in_environments_is_added_to_the_log() -> None:
    class Slow(Scripted):
        def step(self, action: Any) -> Any:
            time.sleep(0.02)
            return super().step(action)

        def reset(self, **keywords: Any) -> Any:
            time.sleep(0.02)
            return super().reset(**keywords)

    stepper = started(Slow())
    assert stepper.log.seconds >= 0.02
    stepper.step([0])
    assert stepper.log.seconds >= 0.04
    again = Stepper(group_of([Slow()]))
    again.restore(carried(stepper.group), (np.zeros(1, np.int64),))
    assert again.log.seconds >= 0.04


@pytest.mark.proves("returns its own array again and again")
def test_an_environment_may_reuse_its_array() -> None:
    class Reusing(Scripted):
        shared = np.zeros(2, np.float32)

        def _answer(self) -> Any:
            self.shared[:] = self.steps
            return self.shared

    stepper = started(Reusing(length=2))
    stepper.step([0])
    kept = stepper.obs.copy()
    final = stepper.step([0])
    assert kept.tolist() == [[1, 1]]
    assert final[0].tolist() == [2, 2]  # not that of the reset, which is in the same array
    assert stepper.obs.tolist() == [[0, 0]]


def carried(group: EnvGroup) -> SamplerCarry:
    return SamplerCarry(
        discounted_returns=np.zeros(group.num_envs), **group.open_episodes(EnvLog())
    )


def played(*envs: gym.Env[Any, Any], steps: int = 9) -> tuple[Stepper, list[list[int]]]:
    """Return a group after some steps, and the actions since the last reset of each environment."""
    stepper = started(*envs)
    actions: list[list[int]] = [[] for _ in envs]
    for number in range(steps):
        chosen = [(number + env) % 2 for env in range(len(envs))]
        stepper.step(chosen)
        for env in range(len(envs)):
            actions[env] = (
                []
                if stepper.terminated[env] | stepper.truncated[env]
                else [*actions[env], chosen[env]]
            )
    return stepper, actions


def test_an_episode_whose_replay_has_other_rewards_or_ends_early_is_abandoned() -> None:
    before, actions = played(Scripted(reward=5.0), Scripted(), steps=6)
    after = Stepper(group_of([Scripted(reward=6.0), Scripted(length=3)]))
    incidents = after.restore(carried(before.group), tuple(map(np.array, actions)))
    assert [element.kind for element in incidents] == ["replay_mismatch"] * 2
    assert "the replay ended after 3 of 6 steps" in incidents[1].message
    assert after.log.episodes == []


class SharesItsBuffer(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole whose instances return the same array, as some simulators in C do."""

    buffer = np.zeros(4, np.float32)

    def __init__(self) -> None:
        super().__init__(CartPoleEnv())

    def observation(self, observation: Any) -> Any:
        self.buffer[:] = observation
        return self.buffer


@pytest.mark.proves("shares a buffer with other instances")
def test_environments_that_share_a_buffer_are_replayed() -> None:
    """The checksum is of each observation when it was returned, not of later contents of the array."""
    before, actions = played(SharesItsBuffer(), SharesItsBuffer(), steps=9)
    unshared, _ = played(CartPoleEnv(), CartPoleEnv(), steps=9)
    checksums = before.group.open_episodes(EnvLog())["checksums"]
    assert checksums.tolist() == unshared.group.open_episodes(EnvLog())["checksums"].tolist()
    after = Stepper(group_of([SharesItsBuffer(), SharesItsBuffer()]))
    assert after.restore(carried(before.group), tuple(map(np.array, actions))) == []
    assert after.obs.tobytes() == before.obs.tobytes() == unshared.obs.tobytes()


@pytest.mark.parametrize(
    "space", [spaces.Box(-9, 9, (2,), np.float32), spaces.Box(-9, 9, (2,), np.float64), ROBOT]
)
def test_the_checksum_is_of_the_bytes_that_the_environment_returned(space: Any) -> None:
    """Checkpoints contain it, so it must not change."""
    obs = space.sample()
    stepper = started(Scripted(space=space, obs=obs, at_step=1))
    stepper.step([0])
    returned = packer(dtype_of(space))(obs).tobytes()
    expected = zlib.crc32(np.float64(1.0).tobytes(), zlib.crc32(returned))
    assert stepper.group.open_episodes(EnvLog())["checksums"].tolist() == [expected]


@pytest.mark.proves("raises when it is closed", "exits when it is closed")
@pytest.mark.parametrize(
    "error", [RuntimeError("stuck"), SystemExit(4)], ids=lambda error: type(error).__name__
)
def test_if_one_environment_fails_to_close_the_others_are_closed(
    error: BaseException, capsys: Any
) -> None:
    closed = []

    class Closing(Scripted):
        def close(self) -> None:
            closed.append(self)
            raise error

    started(Closing(), Closing()).group.close()
    assert len(closed) == 2
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().err
