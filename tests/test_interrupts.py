"""Ctrl-C and SIGTERM in all commands but the training's: never a fault of the environment, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from builders import tiny_run
from commandline import Command, run
from recorder import Notes

import dppo
from dppo.__main__ import main
from dppo.commands.discovery import command_modules
from dppo.config import Config
from dppo.records.observer import Result
from dppo.run import runner
from dppo.signals import Interrupted, RaisingSignals, StopRequested, StopSignals

pytestmark = pytest.mark.proves(
    "is interrupted by your Ctrl-C, or by SIGTERM, in `eval`, `dppo.evaluate`, `replay` or any other command"
)

EPISODE = 20
SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Interrupting(gym.Env[Any, Any]):
    """Has episodes of 20 steps, and does something at one of all steps of this process."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps: ClassVar[int] = 0
    at: ClassVar[int] = -1
    number: ClassVar[signal.Signals | None] = None
    swallows: ClassVar[bool] = False
    closed: ClassVar[int] = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._length = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._length += 1
        Interrupting.steps += 1
        if Interrupting.steps == Interrupting.at:
            self._interrupt()
        return np.zeros(2, np.float32), 1.0, self._length >= EPISODE, False, {}

    def _interrupt(self) -> None:
        if self.number is None:
            raise KeyboardInterrupt  # of its own
        try:
            signal.raise_signal(self.number)
        except BaseException:
            if not self.swallows:
                raise

    def close(self) -> None:
        Interrupting.closed += 1


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that says in which step of the environment which signal is sent."""

    def set_up(at: int, number: signal.Signals | None, *, swallows: bool = False) -> None:
        state = {"steps": 0, "at": at, "number": number, "swallows": swallows, "closed": 0}
        for name, value in state.items():
            monkeypatch.setattr(Interrupting, name, value)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield set_up
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.fixture(scope="module")
def trained(module_path: Path) -> str:
    run_dir = module_path / "interrupted"
    env_id = f"{__name__}:Interrupting"
    config = tiny_run(run_dir, steps=32, iterations=2, env_id=env_id, record_episodes="all")
    return str(dppo.train(config).run_dir)


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")]
)
@pytest.mark.parametrize("swallows", [False, True])
def test_eval_says_how_far_it_came(
    number: signal.Signals,
    ending: str,
    swallows: bool,
    trained: str,
    interrupt: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupt(5 * EPISODE + 10, number, swallows=swallows)
    assert main(["eval", trained, "--trust", "--episodes", "100"]) == 128 + number
    assert capsys.readouterr().err == f"dppo eval: {ending}; 5 of 100 episodes, mean return 20.0\n"
    assert Interrupting.closed == 1
    assert Interrupting.steps <= 5 * EPISODE + 11


def test_evaluate_raises_keyboard_interrupt_which_no_except_exception_catches(
    trained: str, interrupt: Any
) -> None:
    interrupt(25, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"1 of 10 episodes, mean return 20\.0"):
        dppo.evaluate(trained, Interrupting, episodes=10)
    interrupt(25, signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        dppo.evaluate(trained, Interrupting)
    assert ended.value.code == 143


def test_a_keyboard_interrupt_of_the_environment_itself_is_its_fault(
    trained: str, interrupt: Any
) -> None:
    interrupt(25, None)
    with Notes() as notes:
        assert dppo.evaluate(trained, Interrupting).left_out == (1,)
    assert any(text.endswith("step 5) raised KeyboardInterrupt") for text in notes.texts)


@pytest.mark.parametrize("number", SIGNALS)
def test_replay_accuses_nobody(
    number: signal.Signals, trained: str, interrupt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(7, number)
    assert main(["replay", trained, "--episode", "0/0/1", "--trust"]) == 128 + number
    shown = capsys.readouterr()
    assert shown.err.endswith("; 6 of 20 steps played\n")
    assert shown.out == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", ["in a trial", "at its end", "while it is stored"])
def test_a_search_prints_the_best_trials_so_far(
    moment: str,
    number: signal.Signals,
    interrupt: Any,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The signal arrives in the second trial, when it is over, or while Optuna stores its result."""
    optuna = pytest.importorskip("optuna")
    interrupt(200 if moment == "in a trial" else -1, number)
    storage = optuna.storages.RDBStorage
    store = storage.set_trial_state_values
    stored: list[Any] = []

    def interrupted(self: Any, *result: Any, **results: Any) -> Any:
        stored.append(result)
        if moment == "while it is stored" and len(stored) == 2:
            signal.raise_signal(number)
        return store(self, *result, **results)

    def trained(config: Config, **changes: Any) -> Result:
        result = train(config, **changes)
        if moment == "at its end" and stored:
            with StopSignals():
                signal.raise_signal(number)
        return result

    train = runner.train
    monkeypatch.setattr(runner, "train", trained)
    monkeypatch.setattr(storage, "set_trial_state_values", interrupted)
    sizes = "--total-timesteps 128 --num-samplers 1 --num-steps 32 --minibatch-size 32"
    words = f"tune {__name__}:Interrupting {sizes} --hidden-sizes 8 --trials 3"
    assert main(words.split()) == 128 + number
    first_line, *best, command = capsys.readouterr().err.splitlines()
    assert first_line.endswith("; the same command continues the study")
    finished = "2 trials" if moment == "at its end" else "1 trial"
    assert best[0].startswith(f"Best of {finished} in {desk}/runs/")
    assert best[-1] in ("20.0, in trial_0000:", "20.0, in trial_0001:")
    assert " --hidden-sizes 8 --learning-rate " in command


# which becomes pytest
@pytest.mark.parametrize("command", sorted(command_modules().keys() - {"test"}))
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_any_moment_ends_any_command_with_a_line(
    command: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(number)
    module = command_modules()[command]
    monkeypatch.setattr(f"{module}.main", lambda argv: signal.raise_signal(number))
    assert main([command]) == 128 + number
    ending = "interrupted" if number is signal.SIGINT else "ended by SIGTERM"
    assert capsys.readouterr().err == f"dppo {command}: {ending}\n"
    assert signal.getsignal(number) is before


def test_handlers_of_a_program_and_of_a_training_stay() -> None:
    numbers: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with RaisingSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            signals.check()
        assert numbers == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    with StopSignals() as stop, RaisingSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.check()
    assert stop.received is signal.SIGTERM


SECOND = """
import os, signal
from dppo import signals
with signals.KIND():
    for longest_s in (60.0, 60.0, 0.0):
        signals.COPIES_S[signal.SIGINT] = longest_s
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            print("interrupted")
"""


@pytest.mark.parametrize("kind", ["RaisingSignals", "StopSignals"])
def test_a_second_ctrl_c_ends_the_process_with_a_word(kind: str, tmp_path: Path) -> None:
    """A copy, which arrives at once, does nothing: `timeout` sends SIGINT to its child and to the group of that."""
    code, out, err = run([], tmp_path, program=["-c", SECOND.replace("KIND", kind)])
    assert code == 130
    assert out.count("interrupted") == (kind == "RaisingSignals")
    assert (
        err
        == "\ndppo: SIGINT again: ended at once. The last checkpoint, if there is one, is untouched.\n"
    )


SLEEPY = """
import os, pathlib, time
import gymnasium as gym

class Sleepy(gym.Wrapper):
    def step(self, action):
        if pathlib.Path("sleep").exists():
            pathlib.Path("sleeping").touch()
            time.sleep(100)
        return self.env.step(action)

def make():
    return Sleepy(gym.make("CartPole-v1"))
"""
SIZES = ["--num-samplers", "1", "--num-steps", "32", "--total-timesteps", "64"]
WORDS = {
    "eval": ["RUN", "--trust"],
    "replay": ["RUN", "--trust", "--episode", "1"],
    "doctor": ["sleepy:make"],
    "compare": ["sleepy:make", "--actors", "0", "1", *SIZES],
    "export": ["RUN", "FOLDER/", "--trust"],
    "train": ["sleepy:make", "--seeds", "1..2", *SIZES],
}


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", WORDS)
def test_a_signal_in_a_step_that_sleeps_ends_the_command(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    code, _, err = run(["train", "sleepy:make", "--run-dir", "RUN", *SIZES], tmp_path)
    assert code == 0, err

    (tmp_path / "sleep").touch()
    with Command([command, *WORDS[command]], tmp_path) as busy:
        busy.wait_until((tmp_path / "sleeping").exists, 120)
        busy.press_ctrl_c() if number == signal.SIGINT else busy.send(number)
        assert busy.wait(30) == 128 + number
        busy.leaves_nothing_within(30)
        assert "Traceback" not in busy.out + busy.err
        assert "raised" not in busy.out + busy.err
        assert busy.err or "Stopped by" in busy.out


def test_a_run_that_is_stopped_while_its_parts_are_made_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]

    def stopped() -> gym.Env[Any, Any]:
        signal.raise_signal(numbers.pop(0))
        return gym.make("CartPole-v1")

    config = tiny_run(tmp_path / "run", iterations=1, env_id=stopped, progress="auto")
    with pytest.raises(SystemExit) as ended:
        dppo.train(config)
    assert ended.value.code == 143
    for interruption in (StopRequested, Interrupted):  # in a command, which may report earlier runs
        with RaisingSignals(), pytest.raises(interruption):
            dppo.train(config)
    shown = capsys.readouterr()
    text = "SIGTERM: stopped before the first iteration; nothing was saved"
    assert text in shown.out + shown.err
