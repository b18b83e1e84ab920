"""The engine alone, event by event: slow, hung and lost actors, and the lines logged meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dppo.engine.actor_collector import ActorCollector
from dppo.engine.engine import Collecting
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Died,
    Kill,
    Limits,
    Log,
    Look,
    Process,
    Progressed,
    Start,
    Started,
)
from dppo.engine.roster import MEASURED
from dppo.envs.activity import Activity, Phase
from dppo.errors import ClusterError, EnvFault, EnvironmentFault
from dppo.hosts.wire import Answer, Recycled
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SamplerCarry, SegmentReport, Timings

LIMITS = Limits(segment_timeout_s=10, max_actor_restarts=3, start_timeout_s=100, move_after_s=50, quiet_s=30)
STEP_S = 0.5


def report(sampler: int, index: int, version: int) -> SegmentReport:
    one = np.zeros(1)
    carry = SamplerCarry(one.astype(np.int64), one, one.astype(np.int64), one, one.astype(np.uint32))
    return SegmentReport(sampler, index, version, 1, carry, (np.zeros(1, np.int64),))


def answer_to(ask: Ask) -> Answered:
    """Return the answer to a question."""
    version = ask.policy.version
    made = tuple((report(one.sampler_id, one.index, version), "segment") for one in ask.question.requests)
    return Answered(ask.process, ask.ask_id, Answer(made, Timings()))


class Driver:
    """The engine with a clock; records its commands."""

    def __init__(self, hosting: list[list[int]], limits: Limits = LIMITS, *, described: bool = True) -> None:
        """Start the actors; with `described`, also answer the question for the spaces."""
        self.now = 0.0
        ledger = ReplayLedger(sum(map(len, hosting)), replay=True, policy_lag=3)
        self.engine = Collecting(hosting, ledger, limits)
        self.commands: list[tuple[float, Command]] = []
        self.asks: list[Ask] = []
        self.moving: dict[int, Any] = {}
        """Progress shown by each actor, as a function of time; actors that are missing here show none."""
        self._take(self.engine.describe(0.0))
        if described:
            for actor_id in range(len(hosting)):
                self.on(Started(Process(actor_id, 1)))
            describe = self.all(Describe)[0]
            self.on(Answered(describe.process, describe.ask_id, "spaces"))  # type: ignore[arg-type]

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            self.commands.append((self.now, command))
            self.asks += [command] if isinstance(command, Ask) else []
            if isinstance(command, Look) and command.process.actor_id in self.moving:
                seen = self.moving[command.process.actor_id](self.now)
                self._take(self.engine.on(Progressed(command.process, seen), self.now))

    def on(self, event: Any) -> None:
        self._take(self.engine.on(event, self.now))
        self._take(self.engine.tick(self.now))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            self._take(self.engine.tick(self.now))

    def request(self, index: int, lag: int = 0) -> None:
        policy = PolicySnapshot(max(0, index - lag), np.zeros(1, np.float32))
        self._take(self.engine.request(policy, index, self.now))

    def answer(self) -> None:
        """Let each asked actor answer, and take the segments."""
        asks, self.asks = self.asks, []
        for ask in asks:
            self.on(answer_to(ask))
        if self.engine.requests.finished:
            self.engine.requests.take(self.now, 0.0, [])

    def measure(self) -> int:
        """Let all make so many segments that the times of steps are known; return the index of the next one."""
        for index in range(MEASURED):
            self.request(index)
            self.answer()
        return MEASURED

    def all(self, kind: type[Any]) -> list[Any]:
        return [command for _, command in self.commands if isinstance(command, kind)]

    def killed_at(self) -> float:
        return next(when for when, command in self.commands if isinstance(command, Kill))

    def logged(self) -> list[str]:
        return [command.text for command in self.all(Log) if command.incident is None]

    def reported(self) -> list[Any]:
        return [command for command in self.all(Log) if command.incident is not None]

    def forget(self) -> None:
        self.commands.clear()


def moving(phase: Phase, per_s: float, of: int = 0, until: float = float("inf")) -> Any:
    """Return the progress of an actor that makes or replays `per_s` steps per second until it stops."""

    def look(now: float) -> Activity:
        done = int(per_s * min(now, until))
        return Activity(1000 + done, 1000, phase, 0, 0, done, of)

    return look


def one_that_rebuilds() -> Driver:
    """Return a driver whose actor sent two segments, was lost, and has been asked to rebuild its sampler."""
    driver = Driver([[0]])
    for index in range(2):
        driver.request(index)
        driver.answer()
    driver.request(2)
    driver.on(Died(Process(0, 1), "died"))
    driver.on(Started(Process(0, 2)))
    assert driver.all(Ask)[-1].question.requests[0].rebuild is not None
    driver.forget()
    return driver


def test_a_replay_that_stops_counts_as_hung_after_one_deadline_without_progress() -> None:
    driver = one_that_rebuilds()
    driver.moving[0] = moving(Phase.REPLAY, 3, 3700, until=100)
    driver.wait(200)
    assert driver.killed_at() == pytest.approx(110, abs=LIMITS.look_s + STEP_S)
    lost = driver.reported()[0]
    assert lost.incident.kind == "actor_hung"
    assert "actor 0 (sampler 0) made no progress for segment_timeout_s=10, was last seen replaying 300 of 3,700" in (
        lost.text
    )


@pytest.mark.parametrize("seen", [True, False], ids=["without progress", "without a progress file"])
def test_a_replay_that_shows_no_progress_counts_as_hung_after_one_deadline(seen: bool) -> None:
    driver = one_that_rebuilds()
    if seen:
        driver.moving[0] = moving(Phase.REPLAY, 0, 3700)
    driver.wait(20)
    assert driver.killed_at() == pytest.approx(10, abs=LIMITS.look_s / 2 + 2 * STEP_S)


@pytest.mark.proves("is slow, but progresses")
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_an_actor_that_makes_steps_is_slow_and_one_that_stops_is_hung_in_every_segment(segment: int) -> None:
    driver = Driver([[0]])
    for index in range(segment):
        driver.request(index)
        driver.answer()
    driver.moving[0] = moving(Phase.STEP, 0.2, until=100)
    driver.request(segment)
    driver.wait(200)
    assert driver.killed_at() == pytest.approx(110, abs=LIMITS.look_s + STEP_S)
    words = "was last seen stepping env 0 of sampler 0, episode 0, step 1 and counts as hung"
    assert words in driver.reported()[0].text


def test_one_of_several_samplers_that_hangs_is_noticed_after_one_deadline() -> None:
    driver = Driver([[0, 1, 2]])
    driver.moving[0] = moving(Phase.STEP, 1, until=7)
    driver.request(0)
    driver.wait(100)
    assert driver.killed_at() == pytest.approx(7 + 10, abs=LIMITS.look_s + STEP_S)


def test_an_actor_that_refuses_its_cpu_is_replaced_and_then_ends_the_run() -> None:
    driver = Driver([[0]])
    driver.request(0)
    for number in range(1, LIMITS.max_actor_restarts + 1):
        driver.on(Answered(Process(0, number), driver.asks[-1].ask_id, ClusterError("node n computes other last bits")))
        assert "refused: node n computes other last bits" in driver.reported()[-1].text
        driver.wait(60)
        driver.on(Started(Process(0, number + 1)))
    with pytest.raises(ClusterError, match="node n computes"):
        driver.on(Answered(driver.asks[-1].process, driver.asks[-1].ask_id, ClusterError("node n computes other bits")))


def constructor_of(ask: Ask) -> Answered:
    """Return the fault of an environment that could not be made."""
    place = EnvFault("constructor", "RuntimeError", "", 0, 0, 0, 0, sampler_id=0)
    message = "sampler 0, env 0: the environment's constructor raised RuntimeError: all licences are in use"
    return Answered(ask.process, ask.ask_id, EnvironmentFault(message, "a traceback", place))


def test_what_a_lost_process_held_may_be_busy_also_in_the_first_iteration() -> None:
    driver = Driver([[0]])
    driver.request(0)
    driver.on(Died(driver.asks[-1].process, "died"))
    driver.on(Started(Process(0, 2)))
    driver.on(constructor_of(driver.asks[-1]))
    assert "refused: sampler 0, env 0: the environment's constructor raised" in driver.reported()[-1].text
    assert "a traceback" not in driver.reported()[-1].text
    driver.wait(10)
    driver.on(Started(Process(0, 3)))
    driver.answer()
    assert driver.engine.requests.index == 1


@pytest.mark.proves("raises in its constructor when its actor was replaced")
def test_a_constructor_that_raises_in_a_later_iteration_costs_the_process() -> None:
    """As after a resume: the run that was killed may hold the licence still."""
    driver = Driver([[0]])
    driver.request(0)
    driver.answer()
    driver.request(1)
    driver.on(constructor_of(driver.asks[-1]))
    assert "refused: sampler 0, env 0: the environment's constructor raised" in driver.reported()[-1].text


def test_a_constructor_that_raises_in_the_first_process_ends_the_run() -> None:
    driver = Driver([[0]])
    driver.request(0)
    with pytest.raises(EnvironmentFault, match="all licences are in use"):
        driver.on(constructor_of(driver.asks[-1]))


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_recycled_actor_is_not_one_that_delivers_nothing(restarts: int) -> None:
    driver = Driver([[0]], replace(LIMITS, max_actor_restarts=restarts))
    driver.request(0)
    driver.answer()
    for number in range(1, 4):
        driver.request(number)
        worn = Recycled("uses 2.10 GB after 1 segments of its samplers")
        driver.on(Answered(Process(0, number), driver.asks.pop().ask_id, worn))
        driver.wait(10)
        driver.on(Started(Process(0, number + 1)))
        driver.answer()
    assert [one.incident.kind for one in driver.reported()] == ["actor_recycled"] * 3


def test_a_segment_ends_a_row_of_losses() -> None:
    driver, delays = Driver([[0]]), list[int]()

    def lose(times: int) -> None:
        for _ in range(times):
            lost_at, starts = driver.now, len(driver.all(Start))
            driver.on(Died(driver.asks[-1].process, "died: of a fault"))
            while len(driver.all(Start)) == starts and driver.now < 100:
                driver.wait(STEP_S)
            delays.append(int(driver.now - lost_at))
            driver.on(Started(driver.all(Start)[-1].process))

    driver.request(0)
    lose(2)
    driver.on(answer_to(driver.asks[-1]))
    driver.request(1)
    lose(3)
    assert delays == [0, 1, 0, 1, 2]
    with pytest.raises(ClusterError, match="replaced 3 times in a row"):
        lose(1)


@pytest.mark.proves("is frozen between two questions")
@pytest.mark.parametrize(
    ("overhead_s", "moves", "after_s"),
    [(0.1, 1000, 60), (5.0, 1000, 100), (0.1, 0, 600)],
    ids=["as a rule", "slow questions", "not warm"],
)
def test_an_actor_that_does_not_begin_its_question_is_noticed_soon(
    overhead_s: float, moves: int, after_s: float
) -> None:
    """It is frozen between two questions; one that has made nothing yet may import for long."""
    limits = replace(LIMITS, segment_timeout_s=600.0)
    driver = Driver([[0, 1]], limits)
    for index in range(MEASURED):
        driver.request(index)
        driver.wait(overhead_s)
        driver.answer()
    driver.moving[0] = lambda now: Activity(moves, 0, Phase.IDLE, 0, 0, 0, 0)
    began = driver.now
    driver.request(MEASURED)
    driver.wait(2 * after_s + 3 * limits.look_s)
    assert driver.killed_at() - began == pytest.approx(after_s + limits.look_s, abs=limits.look_s) or moves == 0
    assert driver.killed_at() - began >= after_s
    assert "actor 0 (samplers 0, 1) has not begun its question within" in driver.reported()[0].text


def test_what_an_answer_waits_while_the_learner_computes_is_no_time_of_messages() -> None:
    """With a lag it arrives during an update of 40 s, in which nothing looks for answers."""
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=600.0))
    driver.request(0)
    for index in range(MEASURED):
        driver.request(index + 1, lag=1)
        driver.now += 40
        driver.on(answer_to(driver.asks.pop(0)))
        driver.engine.requests.take(driver.now, 0.0, [])
    assert driver.engine.patience.limit(Phase.IDLE, replaced=False)[1] == 60.0


@pytest.mark.parametrize("timeout_s", [0.5, 1, 2, 2.5])
def test_a_hung_actor_is_killed_also_with_deadlines_as_short_as_the_ticks(timeout_s: float) -> None:
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=timeout_s))
    driver.moving[0] = moving(Phase.STEP, 1, until=0)
    driver.request(0)
    driver.wait(10)
    assert driver.killed_at() == pytest.approx(timeout_s, abs=3 * STEP_S)


@pytest.mark.proves("hangs in a reset or a step, with limits of their own")
@pytest.mark.parametrize(
    ("phase", "given", "after_s", "words"),
    [
        (Phase.STEP, {}, 60, "step_timeout_s=60"),  # what was measured was short
        (Phase.RESET, {}, 300, "reset_timeout_s=300"),
        (Phase.STEP, {"step_timeout_s": 20.0, "reset_timeout_s": 40.0}, 20, "step_timeout_s=20"),
        (Phase.RESET, {"step_timeout_s": 20.0, "reset_timeout_s": 40.0}, 40, "reset_timeout_s=40"),
        (Phase.RESET, {"reset_timeout_s": 800.0}, 800, "reset_timeout_s=800"),
    ],
    ids=str,
)
def test_a_phase_has_a_limit_of_its_own_that_is_set_or_follows_from_what_was_measured(
    phase: Phase, given: dict[str, float], after_s: float, words: str
) -> None:
    limits = replace(LIMITS, segment_timeout_s=600.0, of_phases=given)
    driver = Driver([[0]], limits)
    for index in range(MEASURED):
        assert driver.engine.patience.news() == []
        driver.request(index)
        driver.answer()
    [news] = driver.engine.patience.news()
    assert ("step_timeout_s=" in news, driver.engine.patience.news()) == (True, [])
    driver.moving[0] = moving(phase, 1, until=1)
    driver.request(MEASURED)
    driver.wait(after_s + 2 * limits.look_s)
    assert driver.killed_at() == pytest.approx(after_s + limits.look_s, abs=limits.look_s)
    assert f"made no progress for {words}" in driver.reported()[0].text
    assert f"takes longer, raise {words.partition('=')[0]}" in driver.reported()[0].text


@pytest.mark.proves("is slow once in a long while")
def test_after_a_replacement_something_rare_and_slow_gets_the_whole_limit() -> None:
    limits = replace(LIMITS, segment_timeout_s=600.0)
    driver = Driver([[0]], limits)
    index = driver.measure()
    driver.moving[0] = moving(Phase.STEP, 1, until=1)
    driver.request(index)
    driver.wait(100)
    first = driver.killed_at()
    driver.on(Started(Process(0, 2)))
    driver.wait(500)
    assert len(driver.all(Kill)) == 1
    driver.wait(500)
    assert len(driver.all(Kill)) == 2
    assert first < 100


def test_a_hang_does_not_give_others_more_time() -> None:
    """How long a hung actor stood still is not the time of a step."""
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=600.0))
    index = driver.measure()
    driver.moving[0] = moving(Phase.STEP, 1, until=1)
    driver.request(index)
    driver.wait(100)
    assert "for step_timeout_s=60" in driver.reported()[0].text
    assert driver.engine.patience.limit(Phase.STEP, replaced=False) == ("step_timeout_s", 60.0)


def test_a_step_that_took_long_gives_the_others_twenty_times_that() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=6000.0))
    index = driver.measure()
    driver.moving[0] = lambda now: Activity(1000 + int(now / 40), 1000, Phase.STEP, 0, 0, 0, 0)
    driver.request(index)
    driver.wait(100)
    name, limit_s = driver.engine.patience.limit(Phase.STEP, replaced=False)
    assert name == "step_timeout_s"
    assert 20 * 20 < limit_s < 20 * 60


def test_the_line_of_a_wait_names_the_limit_that_applies() -> None:
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=600.0, of_phases={"step_timeout_s": 20.0}, quiet_s=10))
    driver.request(0)
    driver.wait(15)
    assert driver.logged()[0].endswith("an actor that makes no progress for 20 s is replaced")


class Silent:
    """A transport whose actors do nothing, all with one stack."""

    def do(self, command: Command) -> None: ...

    def stacks(self, process: Process) -> str:
        return 'Current thread (most recent call first):\n  File "sim.py", line 12 in step\n'


def test_stacks_are_those_of_the_hung_actor_only(caplog: pytest.LogCaptureFixture) -> None:
    collector = ActorCollector(Driver([[0], [1]]).engine, Silent())  # type: ignore[arg-type]
    hung, other = (Incident(kind, str(kind)) for kind in (IncidentKind.ACTOR_HUNG, IncidentKind.ACTOR_LOST))
    collector._do([Kill(Process(0, 1)), Log("actor 0 hangs", hung), Log("actor 1 died", other)])
    assert [bool(one.details) for one in collector._incidents] == [True, False]
    assert ["sim.py" in message for message in caplog.messages] == [True, False]


def test_a_step_after_a_replay_that_was_given_up_is_called_a_step() -> None:
    replaying, stepping = (Activity(99, 0, Phase.STEP, 3, 1, 10, 16, steps, 2, 5) for steps in (0, 1))
    assert str(replaying) == "replaying 10 of 16 steps"
    assert str(stepping) == "stepping env 1 of sampler 3, episode 2, step 6"


def test_a_step_that_is_slow_as_a_rule_has_twenty_times_that() -> None:
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=600.0))
    made = (replace(report(0, 0, 0), env_s=20.0), "segment")
    for _ in range(MEASURED):  # of 8 samplers in threads, which are as long in it as one
        driver.engine.patience.answered(Answer((made,) * 8, Timings(env_s=20.0)))
    assert driver.engine.patience.limit(Phase.STEP, replaced=False) == ("step_timeout_s", 400.0)
    assert driver.engine.patience.limit(Phase.STEP, replaced=True) == ("segment_timeout_s", 600.0)


def test_an_actor_whose_progress_cannot_be_read_has_a_deadline_for_its_segments() -> None:
    driver = Driver([[0, 1, 2]])
    driver.request(0)
    driver.answer()
    driver.request(1)
    driver.wait(40)
    assert driver.killed_at() == pytest.approx(30, abs=LIMITS.look_s / 2 + 2 * STEP_S)
    assert "(samplers 0, 1, 2) sent no segment for segment_timeout_s=10 and counts" in driver.reported()[0].text


def test_no_actor_is_looked_at_that_has_no_question() -> None:
    driver = Driver([[0]])
    driver.request(0)
    driver.answer()
    driver.wait(100)
    assert not driver.all(Look)
    assert not driver.all(Kill)


def test_creating_the_first_environments_has_no_deadline_while_it_progresses() -> None:
    driver = Driver([[0]], described=False)
    driver.moving[0] = moving(Phase.REPLAY, 1, 0)
    driver.on(Started(Process(0, 1)))
    driver.wait(100)
    assert not driver.all(Kill)
    driver.moving.clear()
    driver.wait(20)
    said = driver.reported()[0].text
    assert "made no environment within segment_timeout_s=10; if its constructor takes longer, raise segment_ti" in said


def test_a_progressing_replay_has_no_deadline_and_after_it_an_actor_has_ordinary_ones_again() -> None:
    driver = one_that_rebuilds()
    driver.moving[0] = moving(Phase.REPLAY, 3, 3700)
    driver.wait(1000)
    assert not driver.all(Kill)
    driver.forget()
    driver.answer()
    assert driver.engine.requests.finished
    assert not driver.reported()
    driver.moving.clear()
    driver.request(3)
    driver.wait(20)
    assert driver.killed_at() == pytest.approx(1010, abs=LIMITS.look_s / 2 + 2 * STEP_S)


def test_after_a_long_update_the_engine_looks_at_an_actor_before_it_counts_as_hung() -> None:
    """With overlap an update may last longer than a deadline while an actor rebuilds its samplers."""
    driver = one_that_rebuilds()
    driver.moving[0] = moving(Phase.REPLAY, 3, 3700)
    driver.now += 500
    driver.wait(20)
    assert not driver.all(Kill)


def test_progress_of_an_abandoned_process_is_ignored() -> None:
    driver = one_that_rebuilds()
    driver.on(Died(Process(0, 2), "died"))
    driver.wait(2)
    driver.on(Started(Process(0, 3)))
    for moves in range(100):
        driver.on(Progressed(Process(0, 2), Activity(moves, 0, Phase.REPLAY, 0, 0, moves, 100)))
        driver.wait(0.5)
    assert "counts as hung" in driver.reported()[1].text


def test_a_long_replay_is_logged_every_half_minute() -> None:
    driver = one_that_rebuilds()
    driver.moving[0] = moving(Phase.REPLAY, 35, 3700)
    driver.wait(100)
    assert driver.logged()[1].startswith("waiting for 1 of 1 segments for 6")
    assert "actor 0: replaying 2,100 of 3,700 steps" in driver.logged()[1]
    assert len(driver.logged()) == 3


def test_the_restart_of_an_actor_is_logged() -> None:
    limits = Limits(segment_timeout_s=100, max_actor_restarts=3, move_after_s=1000, start_timeout_s=1000, quiet_s=30)
    driver = Driver([[0, 1], [2]], limits)
    driver.request(0)
    for ask in driver.all(Ask)[1:]:
        driver.on(answer_to(ask))
    driver.on(Died(Process(0, 1), "died"))
    driver.wait(35)
    assert driver.logged() == [
        "waiting for 2 of 3 segments for 30 s (samplers 0, 1); actor 0 is being restarted; an actor that makes no "
        "progress for 100 s is replaced"
    ]


def test_the_line_of_a_wait_for_one_of_two_actors_names_the_setting_that_would_help() -> None:
    for backup_requests in (False, True):
        driver = Driver(
            [[0], [1]], replace(LIMITS, segment_timeout_s=600.0, quiet_s=10, backup_requests=backup_requests)
        )
        driver.request(0)
        driver.on(answer_to(driver.all(Ask)[-1]))
        driver.wait(15)
        assert ("(--backup-requests) would let an idle actor" in driver.logged()[0]) is not backup_requests


def test_no_wait_is_logged_between_two_requests() -> None:
    """Actors may be lost and replaced meanwhile, but no line says "0 of 1"."""
    driver = Driver([[0], [1]])
    driver.request(0)
    driver.answer()
    driver.on(Died(Process(1, 1), "died"))
    driver.wait(100)
    assert driver.engine.requests.finished
    assert not driver.logged()


def test_the_wait_for_the_first_environment_is_logged() -> None:
    driver = Driver([[0], [1]], described=False)
    driver.wait(31)
    assert driver.logged() == [
        "waiting for the first environment for 30 s; actor 0 is being started; actor 1 is being started"
    ]


def test_a_line_names_at_most_four_actors_in_the_same_state() -> None:
    limits = Limits(segment_timeout_s=1e6, max_actor_restarts=3, move_after_s=1e6)
    driver = Driver([[actor] for actor in range(9)], limits)
    driver.request(0)
    for actor in range(9):
        driver.on(Died(Process(actor, 1), "died"))
    driver.wait(31)
    assert "actor 3 is being restarted; and so are 5 more; an actor" in driver.logged()[0]
    assert "waiting for 9 of 9 segments" in driver.logged()[0]


# ------------------------------------------------------------------ several questions in a queue


def asked(driver: Driver) -> list[tuple[int, int, bool]]:
    """Return sampler, segment and whether it is rebuilt, of all questions since the last call."""
    asks, driver.asks = driver.asks, []
    return [(one.sampler_id, one.index, one.rebuild is not None) for ask in asks for one in ask.question.requests]


def test_an_actor_that_answers_early_goes_on_while_another_is_at_its_first_segment() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=1000))
    for index in range(4):
        driver.request(index, lag=3)
    assert len(driver.asks) == 8, "K + 1 for each actor"
    for ask in [ask for ask in driver.asks if ask.process.actor_id == 0]:
        driver.on(answer_to(ask))
    assert len(driver.asks) == 8, "no further than K segments ahead"
    assert not driver.engine.requests.finished
    driver.on(answer_to(next(ask for ask in driver.asks if ask.process.actor_id == 1)))
    assert [report.sampler_id for report in driver.engine.requests.take(driver.now, 0.0, []).reports] == [0, 1]
    asked(driver)
    driver.request(4, lag=3)
    assert asked(driver) == [(0, 4, False), (1, 4, False)]


def test_answers_that_arrive_in_another_order_count_in_order() -> None:
    driver = Driver([[0]])
    for index in range(3):
        driver.request(index, lag=3)
    first, second, third = driver.asks
    for ask in (third, second, third):
        driver.on(answer_to(ask))
        assert not driver.engine.requests.finished
    driver.on(answer_to(first))
    assert [driver.engine.requests.take(driver.now, 0.0, []).index for _ in range(3)] == [0, 1, 2]


def test_the_queue_of_a_lost_actor_is_asked_again_in_order_and_only_its_first_question_rebuilds() -> None:
    driver = Driver([[0, 1], [2]])
    for index in range(4):
        driver.request(index, lag=3)
    driver.on(answer_to(driver.asks[0]))
    asked(driver)
    driver.on(Died(Process(0, 1), "died"))
    driver.on(Started(Process(0, 2)))
    again = [(sampler, index, index == 1) for index in (1, 2, 3) for sampler in (0, 1)]
    assert asked(driver) == again


def test_samplers_that_move_go_on_where_they_are_and_come_back_one_segment_at_a_time() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=1000, move_after_s=1))
    for index in range(2):
        driver.request(index, lag=1)
    asked(driver)
    driver.on(Died(Process(1, 1), "died"))
    driver.wait(2)
    assert asked(driver) == [(1, 0, False), (1, 1, False)], "on actor 0, from the start of the run"
    driver.on(Started(Process(1, 2)))
    *first, last = [ask for ask in driver.all(Ask) if ask.process == Process(0, 1)]
    for ask in first:
        driver.on(answer_to(ask))
    driver.engine.requests.take(driver.now, 0.0, [])
    driver.request(2, lag=1)
    assert asked(driver) == [(0, 2, False)], "sampler 1 moves back when its last segment has arrived"
    driver.on(answer_to(last))
    assert asked(driver) == [(1, 2, True)]
    assert driver.all(Ask)[-1].process == Process(1, 2)


def test_a_question_in_the_queue_has_no_deadline_before_it_is_begun() -> None:
    driver = Driver([[0]])
    for index in range(4):
        driver.request(index, lag=3)
    for ask in list(driver.asks):
        driver.wait(9)
        driver.on(answer_to(ask))
    assert not driver.all(Kill)
    driver.request(4, lag=3)
    driver.forget()
    began = driver.now
    driver.wait(20)
    assert driver.killed_at() == pytest.approx(began + 10, abs=LIMITS.look_s / 2 + 2 * STEP_S)
