"""Evaluations on actors, without Ray: who plays which episode, and what happens to actors that fail."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import Clocked

from dppo.engine.actor_players import ActorPlayers
from dppo.engine.messages import (
    Answered,
    Died,
    Event,
    Kill,
    Log,
    Look,
    Play,
    Process,
    Progressed,
    Start,
    Started,
)
from dppo.engine.playing import REST_S, START_S, Outcome, PlayEngine, PlayLimits
from dppo.envs.activity import Activity, Phase
from dppo.errors import ClusterError, ConfigError, DppoError, EnvFault, EnvironmentFault
from dppo.ppo.exchange.records import ControllerTurn, Episode, PolicySnapshot

LIMITS = PlayLimits(episodes=2, num_actors=2, timeout_s=50.0, hung_s=8.0)
EPISODE = Episode(0, 0, 1.0, 1, None)


def policy(version: int = 0) -> PolicySnapshot:
    return PolicySnapshot(version, np.zeros(1, np.float32))


class Players(Clocked):
    """The engine of evaluations, whose actors have started."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(PlayEngine(replace(LIMITS, **changes)))
        self.take_commands(self.engine.start(0.0))
        for _, process in self.starts:
            self.on(Started(process))

    @property
    def plays(self) -> list[Play]:
        return self.all(Play)

    @property
    def kills(self) -> list[Process]:
        return [command.process for command in self.all(Kill)]

    @property
    def lines(self) -> list[str]:
        return [command.text for command in self.all(Log)]

    @property
    def starts(self) -> list[tuple[float, Process]]:
        return [(when, start.process) for when, start in self.commands if isinstance(start, Start)]

    def begin(self, number: int) -> None:
        self.engine.begin(number, policy(number))
        self.tick()

    def answer(self, play: Play, result: Episode | DppoError = EPISODE) -> None:
        self.on(Answered(play.process, play.ask_id, result))

    def last_of(self, actor_id: int) -> Play:
        return [play for play in self.plays if play.process.actor_id == actor_id][-1]

    def lose_and_restart(self) -> None:
        """Let the last asked process die, and its successor start."""
        self.on(Died(self.plays[-1].process, "died"))
        self.wait(10.0)
        if self.starts[-1][1] not in self.kills:
            self.on(Started(self.starts[-1][1]))

    def outcomes(self) -> list[Outcome]:
        outcomes: list[Outcome] = self.engine.take_outcomes()
        return outcomes


def version_of(play: Play) -> int:
    assert isinstance(play.policy, PolicySnapshot)
    return play.policy.version


def test_idle_actors_play_the_next_episodes_in_order() -> None:
    players = Players(episodes=3)
    players.begin(1)
    players.begin(2)
    first, second = players.plays
    assert (first.process.actor_id, first.episode) == (0, 0)
    assert (second.process.actor_id, second.episode) == (1, 1)

    players.answer(second)
    assert players.plays[-1].process.actor_id == 1
    for number in (0, 2, 3, 4, 5):
        players.answer(players.plays[number])
    episodes = [(version_of(play), play.episode) for play in players.plays]
    assert episodes == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]

    played = [(number, episode) for number, episode, _ in players.outcomes()]
    assert sorted(played) == episodes


def test_a_controller_plays_its_first_step_alone_and_then_as_many_episodes_as_a_policy() -> None:
    players = Players(num_actors=1)
    first_step = ControllerTurn(first_step_only=True)
    turn = ControllerTurn()
    players.engine.begin(-2, first_step)
    players.engine.begin(-1, turn)
    players.begin(1)
    for number in range(4):
        players.answer(players.plays[number])
    controller_plays = players.plays[:3]
    assert [play.policy for play in controller_plays] == [first_step, turn, turn]
    assert version_of(players.plays[3]) == 1

    outcomes = [(number, episode) for number, episode, _ in players.outcomes()]
    assert outcomes == [(-2, 0), (-1, 0), (-1, 1), (1, 0)]


def test_an_episode_of_a_lost_actor_is_played_again_by_its_successor() -> None:
    players = Players(episodes=1, num_actors=1)
    killed = Process(0, 1)
    successor = Process(0, 2)
    players.begin(1)
    players.lose_and_restart()
    assert players.kills == [killed]
    assert players.lines == [
        "actor 0 of evaluations died; it is replaced, and the episode is played again"
    ]

    first, again = players.plays
    assert first.process == killed
    assert again.process == successor

    # late
    players.on(Answered(killed, first.ask_id, EPISODE))
    players.on(Died(killed, "died"))
    assert players.outcomes() == []
    assert players.kills == [killed], "its successor plays on"

    players.answer(again)
    assert players.outcomes() == [(1, 0, EPISODE)]


@pytest.mark.parametrize("hangs", [False, True])
def test_the_rest_of_an_evaluation_is_left_out_after_some_losses(hangs: bool) -> None:
    players = Players(episodes=3, num_actors=1)
    players.begin(1)
    players.begin(2)

    def start_the_successor() -> None:
        _, process = players.starts[-1]
        players.on(Started(process))

    while not (outcomes := players.outcomes()):
        if hangs:
            in_a_step = Activity(1, 0, Phase.STEP, 0, 0, 0, 0)
            players.on(Progressed(players.plays[-1].process, in_a_step))
            players.wait(12.0)
            start_the_successor()
        else:
            players.lose_and_restart()
    [(number, episode, error)] = outcomes
    assert (number, episode) == (1, 0)
    assert isinstance(error, ClusterError)

    reason = "was in one step, reset or constructor of episode 0 for 8 s" if hangs else "died"
    assert str(error).startswith(f"actor 0 of evaluations {reason}")
    versions = [version_of(play) for play in players.plays]
    assert versions == ([1, 1, 2] if hangs else [1, 1, 1, 2])

    players.wait(10.0)
    start_the_successor()
    last = players.plays[-1]
    assert version_of(last) == 2
    assert last.episode == 0


def test_an_actor_without_visible_progress_has_the_time_of_an_episode_and_of_a_step() -> None:
    players = Players(num_actors=1)
    players.begin(1)
    players.wait(57.0)
    assert not players.kills
    players.wait(5.0)
    assert players.kills
    assert "did not end episode 0 within eval_timeout_s=50" in players.lines[0]
    assert players.all(Look)


def test_an_actor_that_does_not_start_is_replaced_for_the_next_episode() -> None:
    players = Players(num_actors=1)
    players.on(Died(Process(0, 1), "died"))
    assert not players.lines
    assert len(players.starts) == 1
    players.begin(1)
    assert players.starts[-1][1] == Process(0, 2)
    players.wait(START_S + 1)
    assert "was not started by Ray within 600 s; it is replaced" in players.lines[0]


def test_a_licence_is_waited_for_before_the_next_process_starts() -> None:
    players = Players(num_actors=1, licence_s=6.0)
    players.begin(1)
    players.lose_and_restart()
    assert players.starts[-1] == (6.0, Process(0, 2))


@pytest.mark.parametrize(
    ("error", "is_left_out"), [(ConfigError("odd"), False), (ClusterError("late"), True)]
)
def test_an_error_of_an_episode_is_its_result(error: DppoError, is_left_out: bool) -> None:
    players = Players(num_actors=1)
    players.begin(1)
    players.answer(players.plays[0], error)
    assert players.outcomes() == [(1, 0, error)]
    assert (len(players.plays) == 1) == is_left_out


def test_an_actor_whose_constructor_fails_leaves_its_episodes_to_the_others() -> None:
    """It tries again after a while; once all have failed, their faults are the results."""
    place = EnvFault("constructor", "OSError", "", 0)
    fault = EnvironmentFault("evaluation (Test-v0): no licence\nadvice", "", place)
    players = Players(episodes=4)
    players.begin(1)
    players.answer(players.last_of(0), fault)
    players.answer(players.last_of(1))
    players.wait(REST_S)
    assert players.last_of(0).episode == 2
    players.answer(players.last_of(0), fault)
    for _ in range(3):
        players.answer(players.last_of(1))
    assert players.lines == [
        "actor 0 of evaluations leaves its episodes to the others: evaluation (Test-v0): no licence"
    ]
    results = {episode: result for _, episode, result in players.outcomes()}
    assert results == dict.fromkeys(range(4), EPISODE)

    players.wait(REST_S)
    players.begin(2)
    for actor_id in (0, 1, 1, 1):
        players.answer(players.last_of(actor_id), fault)
    results = {episode: result for _, episode, result in players.outcomes()}
    assert results == dict.fromkeys((0, 1, 2), fault)


class Immediate:
    """A transport whose actors answer at once, or whose calls fail."""

    spent_s = 0.0

    def __init__(self, fails: bool) -> None:
        self._fails = fails
        self._events: list[Event] = []
        self.closed = False

    def do(self, command: Any) -> None:
        if isinstance(command, Start):
            self._events.append(Started(command.process))
        elif isinstance(command, Play):
            self._events.append(Answered(command.process, command.ask_id, EPISODE))

    def events(self, stop: Any) -> list[Event]:
        time.sleep(0.01)
        if self._fails:
            raise ValueError("no answer")
        events = self._events
        self._events = []
        return events

    def stacks(self, process: Process) -> str:
        return ""

    def log_of(self, process: Process) -> str:
        return ""

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("fails", [False, True])
def test_episodes_go_on_in_a_thread_and_end_also_if_the_transport_fails(fails: bool) -> None:
    transport = Immediate(fails)
    players = ActorPlayers(PlayEngine(LIMITS), transport)
    players.begin(3, policy())
    outcomes: list[Outcome] = []
    while len(outcomes) < LIMITS.episodes:
        outcomes += players.outcomes(0.1)
    players.close()
    assert transport.closed
    assert [(number, episode) for number, episode, _ in outcomes] == [(3, 0), (3, 1)]
    kind = ClusterError if fails else Episode
    assert all(isinstance(result, kind) for _, _, result in outcomes)
