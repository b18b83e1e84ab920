"""The engine alone, event by event: slow, hung and lost actors, and the lines that are logged."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from driver import LIMITS, TICK_S, Driver, Progress, answer_to, moving, report

from dppo.engine.actor_collector import ActorCollector
from dppo.engine.deadline import Deadline
from dppo.engine.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Kill,
    Limits,
    Log,
    Look,
    Process,
    Progressed,
    Recycled,
    Start,
)
from dppo.engine.patience import MEASURED
from dppo.envs.activity import STARTS, Activity, Phase
from dppo.errors import ClusterError, EnvFault, EnvironmentFault
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import (
    CollectionProgress,
    Incident,
    IncidentKind,
    SegmentReport,
    Timings,
)

PATIENT = replace(LIMITS, segment_timeout_s=600.0)
FROZEN = moving(Phase.STEP, 1, until=1)  # after a second


def rebuilding() -> Driver:
    """Return a driver whose actor sent two segments, was lost, and has been asked to rebuild its sampler."""
    driver = Driver([[0]])
    driver.make(2)
    driver.request(2)
    driver.die(0)
    driver.start(0, 2)
    assert driver.all(Ask)[-1].question.requests[0].rebuild is not None
    driver.forget()
    return driver


def killed_after(driver: Driver, seconds: float, late_s: float = 2 * TICK_S) -> str:
    """Assert that an actor is killed `seconds` from now, and return the line that reports it."""
    began = driver.now
    while not driver.all(Kill):
        assert driver.now < began + 2 * seconds + 100
        driver.wait(TICK_S)
    assert (
        seconds - 2 * TICK_S
        <= driver.killed_at() - began
        <= seconds + driver.engine.limits.look_s + late_s
    )
    return driver.incidents()[-1].text


# ------------------------------------------------------------------ progress


def test_a_replay_that_stops_counts_as_hung_after_one_deadline() -> None:
    driver = rebuilding()
    driver.progress[0] = moving(Phase.REPLAY, 3, 3700, until=100)
    text = killed_after(driver, 110)
    assert driver.incidents()[0].incident.kind == "actor_hung"  # type: ignore[union-attr]
    assert "actor 0 (sampler 0) made no progress for segment_timeout_s=10" in text
    assert "was last seen replaying 300 of 3,700" in text


@pytest.mark.parametrize("progress", [moving(Phase.REPLAY, 0, 3700), None], ids=["none", "no file"])
def test_a_replay_without_progress_counts_as_hung_after_one_deadline(
    progress: Progress | None,
) -> None:
    driver = rebuilding()
    if progress is not None:
        driver.progress[0] = progress
    killed_after(driver, 10)


def test_a_progressing_replay_has_no_deadline_and_later_segments_have_one() -> None:
    driver = rebuilding()
    driver.progress[0] = moving(Phase.REPLAY, 3, 3700)
    driver.wait(1000)
    assert not driver.all(Kill)
    driver.answer()
    assert not driver.incidents()
    driver.progress.clear()
    driver.request(3)
    killed_after(driver, 10)


def test_after_a_long_update_the_engine_looks_before_an_actor_counts_as_hung() -> None:
    """With overlap an update may last longer than a deadline while an actor rebuilds its samplers."""
    driver = rebuilding()
    driver.progress[0] = moving(Phase.REPLAY, 3, 3700)
    driver.now += 500
    driver.wait(20)
    assert not driver.all(Kill)


def test_a_deadline_waits_once_for_a_look_that_is_overdue() -> None:
    deadline = Deadline()
    deadline.begin(0.0, due=10.0, limit=("step_timeout_s", 10.0), look_at=5.0)
    for now in (10.0, 11.0, 13.0):
        deadline.wait_for_look(now, look_s=4.0)
        assert not deadline.has_passed(now)
    deadline.wait_for_look(14.0, look_s=4.0)
    assert deadline.has_passed(14.0)


def test_progress_of_an_abandoned_process_is_ignored() -> None:
    driver = rebuilding()
    driver.die(0, 2)
    driver.wait(2)
    driver.start(0, 3)
    for moves in range(100):
        driver.on(Progressed(Process(0, 2), Activity(moves, 0, Phase.REPLAY, 0, 0, moves, 100)))
        driver.wait(0.5)
    assert "counts as hung" in driver.incidents()[1].text


@pytest.mark.proves("is slow, but progresses")
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_an_actor_that_makes_steps_is_slow_and_one_that_stops_is_hung(segment: int) -> None:
    driver = Driver([[0]])
    driver.make(segment)
    driver.progress[0] = moving(Phase.STEP, 0.2, until=100)
    driver.request(segment)
    assert (
        "was last seen stepping env 0 of sampler 0, episode 0, step 1 and counts"
        in killed_after(driver, 110)
    )


def test_one_of_several_samplers_that_hangs_is_noticed_after_one_deadline() -> None:
    driver = Driver([[0, 1, 2]])
    driver.progress[0] = moving(Phase.STEP, 1, until=7)
    driver.request(0)
    killed_after(driver, 17)


def test_an_actor_whose_progress_cannot_be_read_has_a_deadline_for_its_segments() -> None:
    driver = Driver([[0, 1, 2]])
    driver.make(1)
    driver.request(1)
    assert "(samplers 0, 1, 2) sent no segment for segment_timeout_s=10 and counts" in killed_after(
        driver, 30
    )


@pytest.mark.parametrize("timeout_s", [0.5, 1, 2, 2.5])
def test_a_hung_actor_is_killed_also_with_deadlines_as_short_as_the_ticks(timeout_s: float) -> None:
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=timeout_s))
    driver.progress[0] = moving(Phase.STEP, 1, until=0)
    driver.request(0)
    killed_after(driver, timeout_s)


def test_no_actor_is_looked_at_that_has_no_question() -> None:
    driver = Driver([[0]])
    driver.make(1)
    driver.wait(100)
    assert not driver.all(Look) + driver.all(Kill)


def test_creating_the_first_environments_has_no_deadline_while_it_progresses() -> None:
    driver = Driver([[0]], described=False)
    driver.progress[0] = moving(Phase.REPLAY, 1)
    driver.start(0)
    driver.wait(100)
    assert not driver.all(Kill)
    driver.progress.clear()
    text = killed_after(driver, 10)
    assert (
        "made no environment within segment_timeout_s=10; if its constructor takes longer, raise segment_ti"
        in text
    )


@pytest.mark.proves("is frozen between two questions")
@pytest.mark.parametrize(
    ("overhead_s", "moves", "after_s"),
    [(0.1, 1000, 60), (5.0, 1000, 100), (0.1, 0, 600)],
    ids=["as a rule", "slow questions", "not warm"],
)
def test_an_actor_that_does_not_begin_its_question_is_noticed_soon(
    overhead_s: float, moves: int, after_s: float
) -> None:
    """It is frozen between two questions; an actor that has made nothing yet may import for long."""
    driver = Driver([[0, 1]], PATIENT)
    for index in range(MEASURED):
        driver.request(index)
        driver.wait(overhead_s)
        driver.answer()
    driver.progress[0] = lambda now: Activity(moves, 0, Phase.IDLE, 0, 0, 0, 0)
    began = driver.now
    driver.request(MEASURED)
    driver.wait(2 * after_s + 3 * PATIENT.look_s)

    waited_s = driver.killed_at() - began
    assert waited_s >= after_s
    if moves:
        assert waited_s <= after_s + 2 * PATIENT.look_s

    [incident, *_] = driver.incidents()
    assert "actor 0 (samplers 0, 1) has not begun its question within" in incident.text


def test_a_question_in_the_queue_has_no_deadline_before_it_is_begun() -> None:
    driver = Driver([[0]])
    driver.request_all(4, lag=3)
    for ask in list(driver.asks):
        driver.wait(9)
        driver.on(answer_to(ask))
    assert not driver.all(Kill)
    driver.request(4, lag=3)
    driver.forget()
    killed_after(driver, 10)


def test_a_step_after_a_replay_that_was_given_up_is_called_a_step() -> None:
    replaying, stepping = (
        Activity(99, 0, Phase.STEP, 3, 1, 10, 16, steps, 2, 5) for steps in (0, 1)
    )
    assert str(replaying) == "replaying 10 of 16 steps"
    assert str(stepping) == "stepping env 1 of sampler 3, episode 2, step 6"


class Silent:
    """A transport whose actors do nothing, all with one stack."""

    def do(self, command: Command) -> None: ...

    def stacks(self, process: Process) -> str:
        return 'Current thread (most recent call first):\n  File "sim.py", line 12 in step\n'

    def log_of(self, process: Process) -> str:
        return "/tmp/dppo-log-1 on h3"


def test_stacks_and_log_are_those_of_the_hung_actor_only(caplog: pytest.LogCaptureFixture) -> None:
    transport: Any = Silent()
    collector = ActorCollector(Driver([[0], [1]]).engine, transport)
    hung = Incident(IncidentKind.ACTOR_HUNG, "actor_hung")
    lost = Incident(IncidentKind.ACTOR_LOST, "actor_lost")
    kill = Kill(Process(0, 1))
    collector._do([kill, Log("actor 0 hangs", hung), Log("actor 1 died", lost)])
    hung_incident, lost_incident = collector._incidents
    assert hung_incident.details
    assert not lost_incident.details
    assert hung_incident.message == "actor_hung; its log: /tmp/dppo-log-1 on h3"
    assert lost_incident.message == "actor_lost"
    assert caplog.messages == [
        'actor 0 hangs; it was in File "sim.py", line 12 in step; its log: /tmp/dppo-log-1 on h3',
        "actor 1 died",
    ]


def progress_shown(driver: Driver) -> CollectionProgress:
    """Return the progress that a collector reports."""
    shown: list[CollectionProgress] = []
    transport: Any = Silent()
    collector = ActorCollector(
        driver.engine,
        transport,
        shown.append,
        batch_size=5,
        envs_of_sampler=3,
        clock=lambda: driver.now,
    )
    assert collector._reports is not None
    collector._reports.begin(0, 0.0)
    for _ in range(2):  # the first sends looks
        collector._report(collector._reports)
    [progress] = shown
    return progress


def test_progress_counts_environments_while_an_actor_is_asked_for_the_spaces() -> None:
    driver = Driver([[0], [1]], described=False)
    driver.start(0)
    making = replace(moving(Phase.MAKE, 0)(2.0), environments=2)
    driver.on(Progressed(Process(0, 1), making))
    progress = progress_shown(driver)
    assert (progress.iteration, progress.steps, progress.environments) == (1, 0, 2)
    assert progress.starting == 2


def test_progress_counts_the_actors_that_still_start() -> None:
    driver = Driver([[0], [1], [2], [3], [4]])
    driver.request(0)
    driver.on(answer_to(driver.asks[0]))
    driver.on(Progressed(Process(1, 1), Activity(9, 0, Phase.STEP, 1, 0, 0, 0, 2)))
    making = replace(moving(Phase.MAKE, 0)(2.0), environments=2)
    driver.on(Progressed(Process(2, 1), making))
    driver.die(3)
    # makes a segment of an iteration before, which another actor has sent
    late = driver.engine.hosting.actors[4]
    [ask_id] = late.queue
    question = late.queue[ask_id]
    late.queue[ask_id] = replace(question, index=-1)
    stepping = Activity(9, 0, Phase.STEP, 4, 0, 0, 0, 7)
    event = Progressed(late.process, stepping)
    driver.on(event)
    progress = progress_shown(driver)
    assert (progress.steps, progress.processes, progress.starting) == (3, 3, 3)
    assert progress.environments == 3 + 2


# ------------------------------------------------------------------ limits of phases

GIVEN = {"step_timeout_s": 20.0, "reset_timeout_s": 40.0}


@pytest.mark.proves("hangs in a reset or a step, with limits of their own")
@pytest.mark.parametrize(
    ("phase", "limits", "setting", "limit_s"),
    [
        (Phase.STEP, {}, "step_timeout_s", 60),  # what was measured was short
        (Phase.RESET, {}, "reset_timeout_s", 300),
        (Phase.STEP, GIVEN, "step_timeout_s", 20),
        (Phase.RESET, GIVEN, "reset_timeout_s", 40),
        (Phase.RESET, {"reset_timeout_s": 800.0}, "reset_timeout_s", 800),
    ],
    ids=str,
)
def test_a_phase_has_a_limit_that_is_set_or_follows_from_measurements(
    phase: Phase, limits: dict[str, float], setting: str, limit_s: float
) -> None:
    driver = Driver([[0]], replace(PATIENT, phase_timeouts_s=limits))
    assert driver.engine.patience.news() == []
    driver.make(MEASURED)
    [news] = driver.engine.patience.news()
    assert news.startswith("From now on, ")
    assert "step_timeout_s=" in news
    assert driver.engine.patience.news() == []
    driver.progress[0] = moving(phase, 1, until=1)
    driver.request(MEASURED)
    text = killed_after(driver, limit_s, late_s=driver.engine.limits.look_s)
    assert f"made no progress for {setting}={limit_s}" in text
    assert f"takes longer, raise {setting}" in text


@pytest.mark.proves("is slow once in a long while")
@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, ["step_timeout_s=60", "segment_timeout_s=600"] * 2),
        ({"step_timeout_s": 60.0}, ["step_timeout_s=60"] * 4),
    ],
)
def test_the_first_and_the_last_replacement_get_the_whole_limit_for_a_rare_slow_event(
    settings: dict[str, float], limits: list[str]
) -> None:
    """So a slow step costs a single replay, and most processes that hang are replaced after a minute."""
    driver = Driver([[0]], replace(PATIENT, phase_timeouts_s=settings))
    driver.request(driver.measure())
    assert PATIENT.max_actor_restarts == len(limits) - 1
    for number, limit in enumerate(limits, start=1):
        if number > 1:
            driver.wait(60)
            driver.start(0, number)
        driver.progress[0] = moving(Phase.STEP, 1, until=driver.now + 1)
        driver.forget()
        assert f"made no progress for {limit}," in killed_after(driver, float(limit.split("=")[1]))
    assert "gives up this episode" in driver.incidents()[-1].text


@pytest.mark.parametrize("phase", STARTS)
def test_the_constructor_of_a_replacement_gets_the_whole_limit(phase: Phase) -> None:
    """It may wait for a licence that the lost process still holds; so may a program that is started again in a step."""
    driver = Driver([[0]], PATIENT)
    driver.request(driver.measure())
    driver.die(0)
    driver.start(0, 2)
    assert limit_of(driver, phase) == ("start_timeout_s", 300)
    driver.progress[0] = moving(phase, 1, until=driver.now + 10)
    driver.forget()
    assert "made no progress for segment_timeout_s=600" in killed_after(driver, 600)


def limit_of(driver: Driver, phase: Phase = Phase.STEP, *, full: bool = False) -> tuple[str, float]:
    limit: tuple[str, float] = driver.engine.patience.limit(phase, full=full)
    return limit


def test_a_hang_does_not_give_others_more_time() -> None:
    """The time in which a hung actor stood still is not the time of a step."""
    driver = Driver([[0], [1]], PATIENT)
    driver.request(driver.measure())
    driver.progress[0] = FROZEN
    driver.wait(100)
    assert "for step_timeout_s=60" in driver.incidents()[0].text
    assert limit_of(driver) == ("step_timeout_s", 60.0)


def test_a_step_that_took_long_gives_the_others_twenty_times_that() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=6000.0))
    driver.request(driver.measure())
    driver.progress[0] = lambda now: Activity(1000 + int(now / 40), 1000, Phase.STEP, 0, 0, 0, 0)
    driver.wait(100)
    name, limit_s = limit_of(driver)
    assert name == "step_timeout_s"
    assert 20 * 20 < limit_s < 20 * 60


def test_a_step_that_is_slow_as_a_rule_has_twenty_times_that() -> None:
    """Segments in which a program was restarted, or episodes were replayed, have taken longer for that reason."""
    driver = Driver([[0]], PATIENT)
    usual = replace(report(0, 0, 0), env_s=20.0)
    restart = Incident(IncidentKind.PROGRAM_RESTARTED, "solver 0.0")
    restarted = replace(usual, env_s=25.0, incidents=(restart,))
    replayed = replace(usual, env_s=25.0)

    def measure(measured: SegmentReport, num_samplers: int = 1, replayed_steps: int = 0) -> None:
        timings = Timings(env_s=measured.env_s, replayed_steps=replayed_steps)
        results = ((measured, "segment"),) * num_samplers
        driver.engine.patience.measure(Answer(results, timings))

    for _ in range(MEASURED):
        measure(restarted)
    assert limit_of(driver) == ("segment_timeout_s", 600.0), "the time of a step is not known"

    for _ in range(MEASURED):
        # of 8 samplers in threads, which are in it as long as one sampler
        measure(usual, num_samplers=8)
    measure(restarted)
    measure(replayed, replayed_steps=1)

    assert limit_of(driver) == ("step_timeout_s", 400.0)
    assert limit_of(driver, full=True) == ("segment_timeout_s", 600.0)


def test_the_wait_of_an_answer_during_an_update_is_no_time_of_messages() -> None:
    """With a lag it arrives during an update of 40 s, in which nothing looks for answers."""
    driver = Driver([[0]], PATIENT)
    driver.request(0)
    for index in range(MEASURED):
        driver.request(index + 1, lag=1)
        driver.now += 40
        driver.on(answer_to(driver.asks.pop(0)))
        driver.take()
    assert limit_of(driver, Phase.IDLE)[1] == 60.0


# ------------------------------------------------------------------ refusals and replacements


def test_an_actor_that_refuses_its_cpu_is_replaced_and_then_ends_the_run() -> None:
    driver = Driver([[0]])
    driver.request(0)
    refusal = ClusterError("node n computes different last bits")
    for number in range(1, LIMITS.max_actor_restarts + 1):
        driver.refuse(refusal)
        assert "refused: node n computes different last bits" in driver.incidents()[-1].text
        driver.wait(60)
        driver.start(0, number + 1)
    with pytest.raises(ClusterError, match="node n computes"):
        driver.refuse(refusal)


FAILED_CONSTRUCTOR = EnvironmentFault(
    "sampler 0, env 0: the environment's constructor raised RuntimeError: all licences are in use",
    "a traceback",
    EnvFault("constructor", "RuntimeError", "", 0, sampler_id=0),
)
REFUSED = "refused: sampler 0, env 0: the environment's constructor raised"


def test_what_a_lost_process_held_may_be_busy_also_in_the_first_iteration() -> None:
    driver = Driver([[0]])
    driver.request(0)
    driver.die(0)
    driver.start(0, 2)
    driver.refuse(FAILED_CONSTRUCTOR)
    assert REFUSED in driver.incidents()[-1].text
    assert "a traceback" not in driver.incidents()[-1].text
    driver.wait(10)
    driver.start(0, 3)
    driver.answer()
    assert driver.engine.requests.index == 1


@pytest.mark.proves("raises in its constructor when its actor was replaced")
def test_a_constructor_that_raises_in_a_later_iteration_costs_the_process() -> None:
    """As after a resume: the run that was killed may hold the licence still."""
    driver = Driver([[0]])
    driver.make(1)
    driver.request(1)
    driver.refuse(FAILED_CONSTRUCTOR)
    assert REFUSED in driver.incidents()[-1].text


def test_a_constructor_that_raises_at_first_is_called_again_where_another_succeeded() -> None:
    driver = Driver([[0]], replace(LIMITS, max_actor_restarts=2))
    driver.request(0)
    for number in (2, 3):
        driver.refuse(FAILED_CONSTRUCTOR)
        assert REFUSED in driver.incidents()[-1].text
        driver.wait(10)
        driver.start(0, number)
    with pytest.raises(EnvironmentFault, match=r"are in use\. Its actor was replaced 2 times in a"):
        driver.refuse(FAILED_CONSTRUCTOR)


@pytest.mark.parametrize(("sampler_id", "resumed_at"), [(0, None), (0, 0), (1, None)])
def test_a_constructor_that_raises_beside_the_first_or_after_a_resume_does_not_end_the_run(
    sampler_id: int, resumed_at: int | None
) -> None:
    driver = Driver([[0], [1]], replace(PATIENT, resumed_at=resumed_at), described=False)
    for actor_id in (0, 1):
        driver.start(actor_id)
        driver.progress[actor_id] = moving(Phase.MAKE, 0)
    driver.wait(100)
    describe = driver.all(Describe)[sampler_id]
    refused = Answered(describe.process, describe.ask_id, FAILED_CONSTRUCTOR)
    if sampler_id == 0 and resumed_at is None:
        with pytest.raises(EnvironmentFault, match="all licences are in use"):
            driver.on(refused)
        return

    driver.on(refused)
    assert REFUSED in driver.incidents()[-1].text
    if sampler_id == 1:
        driver.describe()
        assert driver.engine.spaces == "spaces"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_recycled_actor_is_not_one_that_delivers_nothing(restarts: int) -> None:
    driver = Driver([[0]], replace(LIMITS, max_actor_restarts=restarts))
    driver.make(1)
    for number in range(1, 4):
        driver.request(number)
        driver.refuse(Recycled("uses 2.10 GB after 1 segments of its samplers"))
        driver.asks.clear()
        driver.wait(10)
        driver.start(0, number + 1)
        driver.answer()
    kinds = [log.incident.kind for log in driver.incidents() if log.incident is not None]
    assert kinds == ["actor_recycled"] * 3


def test_a_segment_ends_a_row_of_losses() -> None:
    driver = Driver([[0]])
    delays: list[int] = []

    def lose(times: int) -> None:
        for _ in range(times):
            lost_at = driver.now
            starts = len(driver.all(Start))
            driver.die(0, driver.asks[-1].process.number)
            while len(driver.all(Start)) == starts and driver.now < 100:
                driver.wait(TICK_S)
            delays.append(int(driver.now - lost_at))
            driver.start(0, driver.all(Start)[-1].process.number)

    driver.request(0)
    lose(2)
    driver.on(answer_to(driver.asks[-1]))
    driver.request(1)
    lose(3)
    assert delays == [0, 1, 0, 1, 2]
    with pytest.raises(ClusterError, match="replaced 3 times in a row"):
        lose(1)


# ------------------------------------------------------------------ lines


def test_a_long_replay_is_logged_every_half_minute() -> None:
    driver = rebuilding()
    driver.progress[0] = moving(Phase.REPLAY, 35, 3700)
    driver.wait(100)
    assert driver.logged()[1].startswith("waiting for 1 of 1 segments for 6")
    assert "actor 0: replaying 2,100 of 3,700 steps" in driver.logged()[1]
    assert len(driver.logged()) == 3


def test_the_restart_of_an_actor_is_logged() -> None:
    limits = Limits(
        segment_timeout_s=100,
        max_actor_restarts=3,
        move_after_s=1000,
        start_timeout_s=1000,
        quiet_s=30,
    )
    driver = Driver([[0, 1], [2]], limits)
    driver.request(0)
    for ask in driver.asks[1:]:
        driver.on(answer_to(ask))
    driver.die(0)
    driver.wait(35)
    assert driver.logged() == [
        "waiting for 2 of 3 segments for 30 s (samplers 0, 1); actor 0 is being restarted; an actor that makes no "
        "progress for 100 s is replaced"
    ]


@pytest.mark.parametrize("backup_requests", [False, True])
def test_the_line_of_a_wait_for_one_of_two_actors_names_what_would_help(
    backup_requests: bool,
) -> None:
    driver = Driver([[0], [1]], replace(PATIENT, quiet_s=10, backup_requests=backup_requests))
    driver.request(0)
    driver.on(answer_to(driver.asks[-1]))
    driver.wait(15)
    assert (
        "(--backup-requests) would let an idle actor" in driver.logged()[0]
    ) is not backup_requests


def test_the_line_of_a_wait_has_the_limit_of_a_replacement() -> None:
    """A step of 60 s is a hang for the others, and may last 600 s in the last process before the run ends."""
    driver = Driver([[0], [1]], replace(PATIENT, quiet_s=20, max_actor_restarts=1))
    driver.make(MEASURED)
    driver.request(MEASURED)
    driver.on(answer_to(asks_of(driver, 1)[-1]))
    driver.die(0)
    driver.start(0, 2, "h2")
    driver.progress[0] = FROZEN
    driver.wait(150)
    line = driver.logged()[-1]
    assert re.search(r"actor 0 on h2: stepping env 0 .* for \d+ s, of 600 s at most;", line)
    assert "an actor that makes no progress for 600 s is replaced" in line
    assert " 60 s" not in line


def test_the_line_of_a_wait_for_the_first_environment_names_its_place_and_others_are_made_beside_it() -> (
    None
):
    driver = Driver([[0, 2], [1, 3]], replace(PATIENT, quiet_s=20), described=False)
    for actor_id, node in enumerate(["h1", "h2"]):
        driver.start(actor_id, node=node)
        driver.progress[actor_id] = moving(Phase.MAKE, 0)
    driver.wait(19)
    assert [describe.sampler_id for describe in driver.all(Describe)] == [0]
    driver.wait(81)
    place = r"actor (\d) on h\d: making env 0 of sampler 0 for \d+ s, of 600 s at most"
    line = driver.logged()[-1]
    assert re.fullmatch(rf"waiting for the first environment for \d+ s; {place}; {place}", line)

    describes = driver.all(Describe)
    assert [describe.sampler_id for describe in describes] == [0, 1]
    answers: list[Any] = ["spaces", "other spaces"]
    for describe, spaces in zip(reversed(describes), answers, strict=True):
        driver.on(Answered(describe.process, describe.ask_id, spaces))
    driver.request(0)
    assert driver.engine.spaces == "spaces"
    assert [ask.question.samplers for ask in driver.all(Ask)] == [(0, 2), (1, 3)]
    assert {ask.question.spaces for ask in driver.all(Ask)} == {"spaces"}


def test_the_first_actor_that_runs_is_asked_for_the_spaces_not_one_that_starts_slowly() -> None:
    driver = Driver([[0], [1], [2]], PATIENT, described=False)
    driver.wait(30)
    driver.start(2)
    driver.start(1)
    assert [describe.sampler_id for describe in driver.all(Describe)] == [2]


def test_the_line_of_a_wait_for_the_first_environment_names_four_of_many_actors() -> None:
    shares = [[sampler] for sampler in range(9)]
    driver = Driver(shares, PATIENT, described=False)
    for [actor_id] in shares:
        driver.start(actor_id)
        driver.progress[actor_id] = moving(Phase.MAKE, 0)
    driver.wait(100)
    line = driver.logged()[-1]
    assert line.count("making env") == 4
    assert line.endswith("; and so are 5 more")


def test_the_line_of_a_wait_has_the_limits_of_all_late_actors() -> None:
    driver = Driver([[0], [1]], replace(PATIENT, quiet_s=20))
    driver.make(MEASURED)
    driver.request(MEASURED)
    driver.progress = {0: moving(Phase.MAKE, 0), 1: FROZEN}
    driver.wait(55)
    assert "no progress for 60 to 300 s is replaced" in driver.logged()[-1]


def test_the_line_of_a_wait_names_the_hosts_of_late_actors_and_those_out_of_sight() -> None:
    driver = Driver([[0], [1], [2]], replace(PATIENT, quiet_s=20), described=False)
    for actor_id, node in enumerate(["h1", "h2", "h3"]):
        driver.start(actor_id, node=node)
    driver.describe()
    driver.request(0)
    driver.on(answer_to(asks_of(driver, 0)[-1]))
    driver.progress[1] = moving(Phase.STEP, 1)
    driver.wait(65)
    line = driver.logged()[-1]
    assert "(samplers 1, 2) on h2, h3; " in line
    assert re.search(r"; actor 2 on h3 has not been seen for \d+ s; ", line)
    assert "actor 1 on h2" not in line


def test_the_line_of_a_wait_has_the_limit_of_an_actor_that_no_look_has_found() -> None:
    """Its host was cut off before the first look: the limit of a step is not known to apply."""
    driver = Driver([[0]], replace(PATIENT, quiet_s=20))
    driver.make(MEASURED)
    driver.request(MEASURED)
    driver.wait(65)
    assert "has not been seen for" in driver.logged()[-1]
    limit_s = PATIENT.segment_timeout_s
    assert f"no progress for {limit_s:g} s is replaced" in driver.logged()[-1]
    driver.wait(limit_s - 70)
    assert not driver.all(Kill)
    driver.wait(40)
    assert driver.all(Kill)


def test_an_actor_that_is_out_of_sight_counts_as_lost_with_its_host() -> None:
    """A longer limit would not help a host whose cable is cut."""
    driver = Driver([[0]], replace(LIMITS, segment_timeout_s=40), described=False)
    driver.start(0, node="h3")
    driver.describe()
    driver.progress[0] = moving(Phase.STEP, 1)
    driver.request(0)
    driver.wait(80)
    assert not driver.all(Kill)
    driver.progress.clear()
    driver.wait(80)
    text = driver.incidents()[0].text
    assert re.search(
        r"has not been seen for [34]\d s \(segment_timeout_s=40\), was last seen step", text
    )
    assert "host h3 may be cut off or stopped; replaced" in text
    assert "raise" not in text


def test_a_constructor_is_not_called_a_replay() -> None:
    making = Activity(99, 98, Phase.MAKE, 3, 1, 0, 16)
    assert str(making) == "making env 1 of sampler 3"


def test_no_wait_is_logged_between_two_requests() -> None:
    """Actors may be lost and replaced meanwhile, but no line says "0 of 1"."""
    driver = Driver([[0], [1]])
    driver.make(1)
    driver.die(1)
    driver.wait(100)
    assert driver.finished
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
        driver.die(actor)
    driver.wait(31)
    assert "actor 3 is being restarted; and so are 5 more; an actor" in driver.logged()[0]
    assert "waiting for 9 of 9 segments" in driver.logged()[0]


# ------------------------------------------------------------------ several questions in a queue


def asks_of(driver: Driver, actor_id: int) -> list[Ask]:
    return [ask for ask in driver.asks if ask.process.actor_id == actor_id]


def test_an_actor_that_answers_early_continues_while_another_is_at_its_first_segment() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=1000))
    driver.request_all(4, lag=3)
    assert len(driver.asks) == 8, "K + 1 for each actor"

    first_of_second, *_ = asks_of(driver, 1)
    for ask in asks_of(driver, 0):
        driver.on(answer_to(ask))
    assert len(driver.asks) == 8, "no further than K segments ahead"
    assert not driver.finished

    driver.on(answer_to(first_of_second))
    assert [report.sampler_id for report in driver.take().reports] == [0, 1]
    driver.asks.clear()
    driver.request(4, lag=3)
    assert driver.asked() == [(0, 4, False), (1, 4, False)]


def test_the_queue_of_a_lost_actor_is_asked_again_and_its_first_question_rebuilds() -> None:
    driver = Driver([[0, 1], [2]])
    driver.request_all(4, lag=3)
    driver.on(answer_to(driver.asks[0]))
    driver.asks.clear()
    driver.die(0)
    driver.start(0, 2)
    assert driver.asked() == [
        (sampler, index, index == 1) for index in (1, 2, 3) for sampler in (0, 1)
    ]


def test_samplers_that_move_continue_where_they_are_and_return_one_segment_at_a_time() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, segment_timeout_s=1000, move_after_s=1))
    driver.request_all(2, lag=1)
    driver.asks.clear()
    driver.die(1)
    driver.wait(2)
    assert driver.asked() == [(1, 0, False), (1, 1, False)], "on actor 0, from the start of the run"

    driver.start(1, 2)
    *first, last = [ask for ask in driver.all(Ask) if ask.process == Process(0, 1)]
    for ask in first:
        driver.on(answer_to(ask))
    driver.take()
    driver.request(2, lag=1)
    # sampler 1 moves back when its last segment has arrived
    assert driver.asked() == [(0, 2, False)]

    driver.on(answer_to(last))
    assert driver.asked() == [(1, 2, True)]
    assert driver.all(Ask)[-1].process == Process(1, 2)
