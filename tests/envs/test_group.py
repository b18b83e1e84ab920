"""EnvGroup: its log, arrays that environments use again, replays, repairs and the end."""

from __future__ import annotations

import time
import zlib
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from builders import group_of
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scripted import ROBOT, Scripted, Stepper, started
from worlds.simple import Counting

from dppo.attempts import WAITS_S
from dppo.envs.activity import ActivityRecord
from dppo.envs.checks.faults import making
from dppo.envs.checks.returned import packer
from dppo.envs.episode import GroupSettings
from dppo.envs.group import EnvGroup
from dppo.envs.repairs import FaultPolicy
from dppo.envs.spaces import describe_spaces, dtype_of
from dppo.envs.sub_envs.serial import SerialSubEnvs
from dppo.errors import ClusterError, EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, Episode, Incident, SamplerCarry


def test_a_terminal_state_at_the_time_limit_has_both_flags_and_no_final_observation() -> None:
    terminal = Counting(terminate_after=1, truncate_after=1)
    stepper = started(terminal, Counting(truncate_after=1))
    final_observations = stepper.step([0, 0])
    assert final_observations == {1: [1]}
    assert stepper.terminated.tolist() == [True, False]
    assert stepper.truncated.tolist() == [True, True]


def summary(episode: Episode) -> tuple[Any, ...]:
    return (episode.env, episode.index, episode.episode_return, episode.length, episode.success)


def test_episodes_are_logged_once_with_their_success() -> None:
    succeeding = Scripted(length=3, info={"is_success": np.True_})
    unknown = Scripted(length=2, info={"is_success": np.nan})
    stepper = started(succeeding, unknown)
    for _ in range(4):
        stepper.step([0, 0])
    first, second, third = map(summary, stepper.log.episodes)
    assert first == (1, 0, 2.0, 2, None)
    assert second == (0, 0, 3.0, 3, True)
    assert third == (1, 1, 2.0, 2, None)


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
    actions = np.zeros(1, np.int64)
    again.restore(carried(stepper.group), (actions,))
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
    obs_before = stepper.obs.copy()
    final = stepper.step([0])
    assert obs_before.tolist() == [[1, 1]]
    assert final[0].tolist() == [2, 2]  # not that of the reset, which is in the same array
    assert stepper.obs.tolist() == [[0, 0]]


def carried(group: EnvGroup) -> SamplerCarry:
    open_episodes = group.open_episodes(EnvLog())
    return SamplerCarry(discounted_returns=np.zeros(group.num_envs), **open_episodes)


def checksums_of(group: EnvGroup) -> list[int]:
    """Return the checksum of each open episode."""
    return carried(group).checksums.tolist()


class Played(NamedTuple):
    """A group after some steps, and the actions since the last reset of each environment."""

    stepper: Stepper
    actions: list[list[int]]

    def replayed_by(self, stepper: Stepper) -> list[Incident]:
        """Return the incidents of a replay in another group."""
        actions = tuple(np.array(env_actions) for env_actions in self.actions)
        return stepper.restore(carried(self.stepper.group), actions)


def played(*envs: gym.Env[Any, Any], steps: int = 9) -> Played:
    stepper = started(*envs)
    actions: list[list[int]] = [[] for _ in envs]
    for number in range(steps):
        chosen = [(number + env) % 2 for env in range(len(envs))]
        stepper.step(chosen)
        done = stepper.terminated | stepper.truncated
        for env, action in enumerate(chosen):
            actions[env].append(action)
            if done[env]:
                actions[env].clear()

    return Played(stepper, actions)


def test_an_episode_whose_replay_has_other_rewards_or_ends_early_is_abandoned() -> None:
    before = played(Scripted(reward=5.0), Scripted(), steps=6)
    after = Stepper(group_of([Scripted(reward=6.0), Scripted(length=3)]))
    other_rewards, early_end = before.replayed_by(after)
    assert other_rewards.kind == "replay_mismatch"
    assert early_end.kind == "replay_mismatch"
    assert "the replay ended after 3 of 6 steps" in early_end.message
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
    before = played(SharesItsBuffer(), SharesItsBuffer())
    unshared = played(CartPoleEnv(), CartPoleEnv()).stepper
    assert checksums_of(before.stepper.group) == checksums_of(unshared.group)

    after = Stepper(group_of([SharesItsBuffer(), SharesItsBuffer()]))
    assert before.replayed_by(after) == []

    observed = unshared.obs.tobytes()
    assert before.stepper.obs.tobytes() == observed
    assert after.obs.tobytes() == observed


@pytest.mark.parametrize(
    "space", [spaces.Box(-9, 9, (2,), np.float32), spaces.Box(-9, 9, (2,), np.float64), ROBOT]
)
def test_the_checksum_is_of_the_bytes_that_the_environment_returned(space: Any) -> None:
    """Checkpoints contain it, so it must not change."""
    obs = space.sample()
    stepper = started(Scripted(space=space, obs=obs, at_step=1))
    stepper.step([0])
    pack = packer(dtype_of(space))
    obs_checksum = zlib.crc32(pack(obs).tobytes())
    reward = np.float64(1.0)
    expected = zlib.crc32(reward.tobytes(), obs_checksum)
    assert checksums_of(stepper.group) == [expected]


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
    shown = capsys.readouterr().err
    assert shown.count(f"{type(error).__name__}: {error}") == 1
    assert f"1 other environment raised the same in close(): {type(error).__name__} (" in shown


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


def repaired(make: Any, envs: list[Any], on_step: Any = None) -> Stepper:
    """Return a group that rebuilds a failed environment; episode k of env e has the seed 10 e + k."""
    spaces = describe_spaces(envs[0])
    settings = GroupSettings(
        "sampler 0 (Test-v0)",
        spaces,
        lambda env, episode: 10 * env + episode,
        progress=ActivityRecord(on_step=on_step),
    )
    sub_envs = SerialSubEnvs(envs, settings, make)
    return Stepper(EnvGroup(sub_envs, FaultPolicy()))


def test_only_the_environment_that_failed_is_closed_and_made_anew_with_its_next_episode() -> None:
    Choking.opened = []
    sound = Scripted()
    choking = Choking()
    stepper = repaired(lambda index: Choking(), [sound, choking])
    stepper.start()

    for _ in range(2):
        stepper.step([0, 0])
        assert stepper.valid.tolist() == [True, True]
    stepper.step([0, 0])
    assert stepper.valid.tolist() == [True, False]

    [new] = Choking.opened
    assert new is not choking
    assert new.seeds == [10 + 1]

    first_numbers = stepper.obs[:, 0]
    assert first_numbers.tolist() == [3, 0]  # the next observation is that of the new episode
    assert stepper.rewards.tolist() == [1, 0]
    assert stepper.truncated.tolist() == [False, True]
    assert carried(stepper.group).episodes.tolist() == [0, 1]

    [incident] = stepper.log.incidents
    assert incident.kind == "env_raised"
    assert incident.env == 1
    assert incident.lost_steps == 2

    stepper.group.close()
    assert Choking.opened == []


class Unavailable:
    """A constructor that fails some times before it succeeds."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.attempts = 0

    def __call__(self, index: int) -> Scripted:
        self.attempts += 1
        if self.attempts <= self.fails:
            with making("sampler 0 (Test-v0), env 0"):
                raise ConnectionError("all licences are in use")
        return Scripted()


@pytest.mark.proves("raises in its constructor when it is made again")
def test_a_constructor_that_fails_is_tried_again_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    make = Unavailable(fails=3)
    stepper = repaired(make, [Choking()])
    stepper.start()
    for _ in range(3):
        stepper.step([0])
    assert make.attempts == 4
    assert sum(slept) == sum(WAITS_S[:3])

    faults = [incident.fault for incident in stepper.log.incidents]
    phases = [fault.phase for fault in faults if fault is not None]
    assert phases == ["step", "constructor", "constructor", "constructor"]

    make = Unavailable(fails=99)
    stepper = repaired(make, [Choking()])
    stepper.start()
    for _ in range(2):
        stepper.step([0])
    words = "the environment's constructor raised ConnectionError: all licences"
    with pytest.raises(EnvironmentFault, match=words):
        stepper.step([0])
    assert make.attempts == len(WAITS_S) + 1
    assert 60 <= sum(WAITS_S) <= 65


def test_the_end_of_a_run_ends_the_wait_for_a_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def check(_: int) -> None:
        if slept:
            raise ClusterError("the samplers of this process are closed")

    stepper = repaired(Unavailable(fails=99), [Choking()], check)
    stepper.start()
    for _ in range(2):
        stepper.step([0])
    with pytest.raises(ClusterError):
        stepper.step([0])
    assert len(slept) == 1
