"""A call into an environment that does not return is logged after ten seconds, in any process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from builders import tiny_run
from commandline import Command
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from worlds.faulty import Faulty

import dppo
from dppo.envs import silence
from dppo.envs.activity import Activity, ActivityRecord, Phase, place_of
from dppo.envs.silence import Stillness, longer_patience, name_env, name_sampler
from dppo.log import logger
from dppo.records.terminal.streams import ShowLog
from dppo.tools.replay.episode import replay

AT_MOST_S = 30.0  # for a line


def activity_at(moves: int, phase: Phase, episode: int = 4, length: int = 6) -> Activity:
    return Activity(moves, 0, phase, 2, 1, 0, 0, 0, episode, length)


def test_native_code_that_keeps_the_interpreter_in_each_step_has_its_stacks_written_once() -> None:
    frozen_s = 10.0
    written = 0
    for gap_s in [1.0, 31.0, 1.0, *[30.0] * 20]:
        written += gap_s > frozen_s
        frozen_s = longer_patience(frozen_s, gap_s)
    assert written == 1
    assert frozen_s == 93.0


@pytest.mark.parametrize(
    ("phase", "call"),
    [
        (Phase.MAKE, "the constructor"),
        (Phase.RESET, "reset of episode 4"),
        (Phase.STEP, "step 7 of episode 4"),
        (Phase.REPLAY, "a step of a replay (0 of 0 are done)"),
        (Phase.CLOSE, "close"),
        (Phase.RESTART, "the restart of its program"),
    ],
)
def test_a_call_that_does_not_return_is_named_after_ten_seconds_and_each_time_it_is_twice_as_late(
    phase: Phase, call: str
) -> None:
    still = Stillness(name_sampler("mysim:make"))
    lines = {
        second: line
        for second in range(50)
        if (line := still.look(activity_at(1, phase), float(second)))
    }
    assert [*lines] == [10, 20, 40]
    assert lines[10] == f"sampler 2 (mysim:make), env 1: {call} has not returned for 10 s"
    assert not still.look(activity_at(2, phase), 50.0)
    assert not still.look(activity_at(2, Phase.IDLE), 70.0)
    assert not still.look(activity_at(3, Phase.BUILD), 90.0)
    assert not still.look(activity_at(3, Phase.BUILD), 190.0)


def test_a_simulator_that_is_always_slow_is_not_silent() -> None:
    still = Stillness(name_env("mysim:make"))
    lines = [
        still.look(activity_at(second // 15, Phase.STEP), float(second)) for second in range(150)
    ]
    assert [second for second, line in enumerate(lines) if line] == [10]
    assert still.look(activity_at(9, Phase.STEP), 135.0 + 46), "three times as slow as ever"


class SlowOnce(Faulty):
    """Does not return from one constructor, reset, step or close until that is logged."""

    def __init__(self, where: str = "none") -> None:
        super().__init__(episodes=(), length=8)
        self.where = where
        self.reached("constructor")

    is_reported: ClassVar[Callable[[str], bool]]

    def reached(self, where: str) -> None:
        if where == self.where:
            wait_until(lambda: SlowOnce.is_reported(where))

    def reset(self, **keywords: Any) -> Any:
        self.reached("reset")
        return super().reset(**keywords)

    def step(self, action: Any) -> Any:
        self.reached(f"step {self.steps + 1}")
        return super().step(action)

    def close(self) -> None:
        self.reached("close")


def wait_until(over: Callable[[], bool]) -> None:
    until = time.monotonic() + AT_MOST_S
    while not over() and time.monotonic() < until:
        time.sleep(0.005)


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """Return a function that returns the lines so far; these are written very soon, also about other calls."""
    monkeypatch.setattr(silence, "FIRST_S", 0.02)
    monkeypatch.setattr(silence, "POLL_S", 0.01)

    def silence_lines() -> list[str]:
        return [line for line in caplog.messages if "has not returned" in line]

    monkeypatch.setattr(
        SlowOnce,
        "is_reported",
        lambda where: any(where in line for line in silence_lines()),
        raising=False,
    )
    return silence_lines


def run_of(where: str, run_dir: Path, **changes: Any) -> None:
    slow: dict[str, Any] = {"env_id": SlowOnce, "env_kwargs": {"where": where}}
    dppo.train(tiny_run(run_dir, steps=8, iterations=1, **slow | changes))


@pytest.mark.proves("hangs in process, in `dppo eval` or in `dppo replay`")
@pytest.mark.parametrize(
    ("where", "threads"), [("constructor", False), ("step 3", False), ("step 3", True)]
)
def test_a_run_in_process_says_where_it_stands(
    where: str, threads: bool, lines: Callable[[], list[str]], tmp_path: Path
) -> None:
    changes = {"num_samplers": 2, "env_threads": True, "total_timesteps": 16} if threads else {}
    run_of(where, tmp_path / "run", **changes)
    assert any(
        f"({SlowOnce.__module__}:SlowOnce), env 0: " in line and where in line for line in lines()
    )
    remedy = "Nothing in this process ends a hang: press Ctrl-C, and resume with num_actors="
    assert any(remedy in line for line in lines()) == (where != "constructor")
    hint = " 2 instances here; if a process may have only one, also use samplers_per_actor=1 (--samplers-per-a"
    hints = [line for line in lines() if "instances here" in line]
    assert bool(hints) == threads
    assert all(hint in line for line in hints)


@pytest.mark.parametrize(
    ("sampler", "is_advised"), [(0, False), (1, True)], ids=["first", "second"]
)
def test_only_a_second_instance_that_is_not_made_may_be_one_too_many(
    sampler: int, is_advised: bool, lines: Callable[[], list[str]]
) -> None:
    record = ActivityRecord()
    record.enter(place_of(Phase.MAKE, sampler))
    with silence.SilenceWatch(record, name_sampler("mysim:make"), ". There are 2 instances"):
        wait_until(lambda: bool(lines()))
    assert lines()[0].endswith(". There are 2 instances") == is_advised


class Fast(Faulty):
    """Has a constructor that returns at once."""

    def __init__(self) -> None:
        super().__init__(episodes=(), length=8)


def test_work_after_the_constructor_is_not_the_constructor(
    lines: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, imports and networks take longer than ten seconds; so does the trainer."""
    phases = list[Phase]()
    records = list[ActivityRecord]()
    begin = ActivityRecord.begin

    def noted(record: ActivityRecord, *arguments: int) -> None:
        records.append(record)
        begin(record, *arguments)

    monkeypatch.setattr(ActivityRecord, "begin", noted)
    for place in ("dppo.hosts.sampler_builder.spaces_of", "dppo.learners.trainers.build_trainer"):
        module, _, name = place.rpartition(".")
        original = getattr(importlib.import_module(module), name)

        def slow(*arguments: Any, original: Any = original, **keywords: Any) -> Any:
            phases.append(records[-1].look().phase)
            return original(*arguments, **keywords)

        monkeypatch.setattr(place, slow)
    run_of("none", tmp_path / "run", env_id=Fast, env_kwargs={})
    assert phases == [Phase.BUILD, Phase.IDLE]


def test_evaluations_eval_and_replay_say_where_they_stand(
    lines: Callable[[], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run_of(
        "none",
        run,
        env_id="CartPole-v1",
        env_kwargs={},
        total_timesteps=64,
        num_steps=64,
        eval_every=64,
    )
    run_of(
        "none",
        tmp_path / "other",
        eval_every=8,
        eval_episodes=1,
        eval_env_kwargs={"where": "step 5"},
    )
    assert any(
        line.startswith("evaluation: step 5 of episode 0 has not returned")
        and "resume with num_actors=" in line
        for line in lines()
    )

    caplog.clear()
    dppo.evaluate(tmp_path / "other", SlowOnce, 1, env_kwargs={"where": "constructor"})
    assert any("SlowOnce: the constructor has not returned" in line for line in lines())

    step: Callable[..., Any] = CartPoleEnv.step

    def slow_step(env: Any, action: Any) -> Any:
        wait_until(lambda: any(line.startswith("CartPole-v1: step 1 of") for line in lines()))
        return step(env, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CartPoleEnv, "step", slow_step)
        assert "equal to the last bit" in replay(run, "1")
    assert any(
        line.startswith("CartPole-v1: step 1 of episode 0 has not returned") for line in lines()
    )


def test_a_line_that_cannot_wait_is_shown_before_the_run_has_started() -> None:
    shown = list[str]()
    log = ShowLog(shown.append)
    log.hold()
    logger.warning("later")
    logger.warning("now", extra={"at_once": True})
    assert shown == ["now"]
    log.start()
    assert shown == ["now", "later"]
    log.close()


@pytest.mark.proves("hangs in native code that keeps Python's lock, in process")
@pytest.mark.slow
def test_native_code_that_keeps_the_interpreter_leads_to_stacks(tmp_path: Path) -> None:
    program = (
        "import ctypes\n"
        "from dppo.envs.activity import ActivityRecord, Phase, place_of\n"
        "from dppo.envs.silence import SilenceWatch, name_env\n"
        "record = ActivityRecord()\n"
        "record.enter(place_of(Phase.STEP))\n"
        "with SilenceWatch(record, name_env('x')):\n"
        "    __import__('time').sleep(2)\n"
        "    ctypes.PyDLL(None).sleep(14)\n"
    )
    (tmp_path / "stuck.py").write_text(program)
    with Command([], tmp_path, program=(str(tmp_path / "stuck.py"),)) as run:
        assert run.wait(60) == 0
        assert "Timeout (0:00:10)!" in run.err
        assert "stuck.py" in run.err


def test_the_watch_of_a_process_that_is_idle_leaves_timers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = list[float]()
    monkeypatch.setattr(silence, "_expect_python", called.append)
    monkeypatch.setattr(silence, "POLL_S", 0.01)
    record = ActivityRecord()
    with silence.SilenceWatch(record, name_env("x")):
        time.sleep(0.1)
        assert not called
        record.enter(place_of(Phase.STEP))
        wait_until(lambda: bool(called))
    assert called[0] == silence.FROZEN_S
    assert called[-1] == 0.0
