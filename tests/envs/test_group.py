"""EnvGroup: its log, arrays that environments use again, replays, repairs and the end."""

from __future__ import annotations

import time
import zlib
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from builders import group_of
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scripted import ROBOT, Scripted, Stepper, started
from worlds.simple import Counting

from dppo.envs.checks.faults import making
from dppo.envs.checks.returned import packer
from dppo.envs.episode import GroupSettings
from dppo.envs.group import EnvGroup
from dppo.envs.repairs import WAITS_S, FaultPolicy
from dppo.envs.rows.serial import SerialRows
from dppo.envs.spaces import describe_spaces, dtype_of
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, SamplerCarry


def test_a_terminal_state_at_the_time_limit_has_both_flags_and_no_final_observation() -> None:
    stepper = started(Counting(terminate_after=1, truncate_after=1), Counting(truncate_after=1))
    assert stepper.step([0, 0]) == {1: [1]}
    assert stepper.terminated.tolist() == [True, False]
    assert stepper.truncated.tolist() == [True, True]


def test_episodes_are_logged_once_with_their_success() -> None:
    infos = ({"is_success": np.True_}, {"is_success": np.nan})
    stepper = started(Scripted(length=3, info=infos[0]), Scripted(length=2, info=infos[1]))
    for _ in range(4):
        stepper.step([0, 0])
    logged = [(e.env, e.index, e.episode_return, e.length, e.success) for e in stepper.log.episodes]
    assert logged == [(1, 0, 2.0, 2, None), (0, 0, 3.0, 3, True), (1, 1, 2.0, 2, None)]


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


class Choking(Scripted):
    """Raises in its third step, and counts the instances that are open."""

    opened: ClassVar[list[Choking]] = []

    def __init__(self) -> None:
        super().__init__()
        Choking.opened.append(self)

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise OSError("no route to host")
        return super().step(action)

    def close(self) -> None:
        Choking.opened.remove(self)


def repaired(make: Any, envs: list[Any]) -> Stepper:
    settings = GroupSettings(
        "sampler 0 (Test-v0)", describe_spaces(envs[0]), lambda env, episode: 10 * env + episode
    )
    return Stepper(EnvGroup(SerialRows(envs, settings, make), FaultPolicy()))


def test_only_the_environment_that_failed_is_closed_and_made_anew_with_its_next_episode() -> None:
    Choking.opened = []
    sound = Scripted()
    other = Choking()
    stepper = repaired(lambda index: Choking(), [sound, other])
    stepper.start()
    for step in range(3):
        stepper.step([0, 0])
        assert stepper.valid.tolist() == [True, step != 2]
    [new] = Choking.opened
    assert new is not other
    assert new.seeds == [10 + 1]
    assert stepper.obs[:, 0].tolist() == [3, 0]  # the next observation is that of the new episode
    assert (stepper.rewards.tolist(), stepper.truncated.tolist()) == ([1, 0], [False, True])
    assert stepper.group.open_episodes(EnvLog())["episodes"].tolist() == [0, 1]
    [incident] = stepper.log.incidents
    assert (incident.kind, incident.env, incident.lost_steps) == ("env_raised", 1, 2)
    stepper.group.close()
    assert Choking.opened == []


@pytest.mark.proves("raises in its constructor when it is made again")
def test_a_constructor_that_fails_is_tried_again_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    attempts = [0]

    def make(index: int) -> Any:
        attempts[0] += 1
        if attempts[0] <= fails:
            with making("sampler 0 (Test-v0), env 0"):
                raise ConnectionError("all licences are in use")
        return Scripted()

    fails = 3
    stepper = repaired(make, [Choking()])
    stepper.start()
    for _ in range(3):
        stepper.step([0])
    assert (attempts[0], sum(slept)) == (4, sum(WAITS_S[:3]))
    assert [incident.fault.phase for incident in stepper.log.incidents if incident.fault] == [
        "step",
        *["constructor"] * 3,
    ]
    attempts[0] = 0
    fails = 99
    stepper = repaired(make, [Choking()])
    stepper.start()
    for _ in range(2):
        stepper.step([0])
    with pytest.raises(
        EnvironmentFault, match="the environment's constructor raised ConnectionError: all licences"
    ):
        stepper.step([0])
    assert attempts[0] == len(WAITS_S) + 1
    assert 60 <= sum(WAITS_S) <= 65
