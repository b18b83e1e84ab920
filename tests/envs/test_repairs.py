"""Repairs: an environment that fails is closed and made anew, and the others of its group go on."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
from scripted import Scripted, Stepper

from dppo.envs.checks.faults import making
from dppo.envs.episode import GroupSettings
from dppo.envs.group import EnvGroup
from dppo.envs.repairs import WAITS_S, FaultPolicy
from dppo.envs.rows.serial import SerialRows
from dppo.envs.spaces import describe_spaces
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import EnvLog


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


def group_of(make: Any, envs: list[Any]) -> Stepper:
    settings = GroupSettings(
        "sampler 0 (Test-v0)", describe_spaces(envs[0]), lambda env, episode: 10 * env + episode
    )
    return Stepper(EnvGroup(SerialRows(envs, settings, make), FaultPolicy()))


def test_only_the_environment_that_failed_is_closed_and_made_anew_with_its_next_episode() -> None:
    Choking.opened = []
    sound = Scripted()
    other = Choking()
    stepper = group_of(lambda index: Choking(), [sound, other])
    stepper.start()
    for step in range(3):
        stepper.step([0, 0])
        assert stepper.log.dropped == ([1] if step == 2 else [])
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
    stepper = group_of(make, [Choking()])
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
    stepper = group_of(make, [Choking()])
    stepper.start()
    for _ in range(2):
        stepper.step([0])
    with pytest.raises(
        EnvironmentFault, match="the environment's constructor raised ConnectionError: all licences"
    ):
        stepper.step([0])
    assert attempts[0] == len(WAITS_S) + 1
    assert 60 <= sum(WAITS_S) <= 65
