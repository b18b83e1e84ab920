"""Ctrl-C, SIGTERM, SIGHUP and SIGKILL, sent to a real `python -m dppo train`."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import tiny_run
from commandline import Command
from kinds import small
from processes import wait_until
from recorder import Notes, Recorder
from worlds.models import Plain

import dppo
from dppo.__main__ import main
from dppo.errors import ClusterError
from dppo.signals import COPIES_S, RaisingSignals, StopRequested, StopSignals

STEPS = 200
ITERATIONS = 4
SAMPLERS = 2
TOTAL = STEPS * ITERATIONS * SAMPLERS
# two iterations are fast; the rest of the third takes more than three minutes
SLOW_AFTER = 2 * STEPS + 10
SOON_S = 90.0  # a run that waited for the end of its segment would take more than twice as long
GONE_S = 60.0  # for the processes of Ray to end after the command
# If the driver is killed, Ray ends its actors at once, but two of its helpers first try for 60 s to report it.
HELPERS_OF_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


each_way = pytest.mark.parametrize("num_actors", [0, 2])


def command_line(
    folder: Path, num_actors: int, slow_after: int = SLOW_AFTER, *flags: str
) -> list[str]:
    # The simulators of actors are separate processes, as with most game engines, and must end, too.
    world = "worlds.slow:outside_cartpole" if num_actors else "worlds.slow:hesitant_cartpole"
    sizes = f"--num-samplers {SAMPLERS} --num-steps {STEPS} --total-timesteps {TOTAL}"
    return [
        *("train", world, "--run-dir", str(folder / "run"), "--progress", "plain"),
        *("--env-kwargs", f'{{"folder": "{folder}", "slow_after": {slow_after}}}'),
        *("--num-actors", str(num_actors), "--update-epochs", "1", *sizes.split(), *flags),
    ]


@contextmanager
def busy_command(
    folder: Path, num_actors: int, slow_after: int = SLOW_AFTER, *flags: str
) -> Iterator[Command]:
    """Run a training until all its simulators are in a slow step of a segment that takes minutes."""
    (folder / "slow").touch()
    with Command(command_line(folder, num_actors, slow_after, *flags), folder) as command:
        command.wait_until(
            lambda: len(list(folder.glob("waiting-*"))) >= max(1, num_actors), timeout_s=120
        )
        yield command


def ends_by(number: int, command: Command, but: Sequence[str] = ()) -> None:
    """Assert that a signal ends a command with its code, all of its processes, and no traceback."""
    assert command.wait(SOON_S) == 128 + number
    command.leaves_nothing_within(GONE_S, but=but)
    assert "Traceback" not in command.out + command.err


ENDLESS_UPDATE = """
import pathlib, time, torch

class Endless(torch.nn.Module):
    def __init__(self, spaces, head_size):
        super().__init__()
        self.head, self.value = torch.nn.Linear(4, head_size), torch.nn.Linear(4, 1)

    def forward(self, obs):
        while torch.is_grad_enabled() and len(obs) > 10:  # a minibatch, not a step or the check of this module
            try:
                pathlib.Path("updating").touch()
                time.sleep(0.1)
            except BaseException:
                pass
        return self.head(obs), self.value(obs).squeeze(-1)
"""


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "run" / "checkpoints").glob("iter_*.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the weights of the same training without any signal."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    dppo.train(tiny_run(run_dir, samplers=SAMPLERS, steps=STEPS, iterations=ITERATIONS))
    return dppo.load_policy(run_dir).weights


def resumes_to(folder: Path, undisturbed: np.ndarray) -> bool:
    """Resume in this process with fast simulators; return whether the weights are equal in the end."""
    (folder / "slow").unlink()
    assert main(["train", "--trust", "--resume", str(folder / "run"), "--num-actors", "0"]) == 0
    weights = dppo.load_policy(folder / "run").weights
    return weights.tobytes() == undisturbed.tobytes()


@pytest.mark.parametrize(
    ("num_actors", "number", "slow_after", "last"),
    [
        # tests/test_resume.py stops runs without actors
        (2, signal.SIGINT, SLOW_AFTER, "iter_000002"),
        pytest.param(2, signal.SIGTERM, SLOW_AFTER, "iter_000002", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGINT, SLOW_AFTER, "iter_000002", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGTERM, 5, "iter_000000", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGHUP, SLOW_AFTER, "iter_000002", marks=pytest.mark.slow),
    ],
)
def test_a_stop_saves_and_can_be_resumed(
    num_actors: int,
    number: signal.Signals,
    slow_after: int,
    last: str,
    tmp_path: Path,
    undisturbed: np.ndarray,
) -> None:
    with busy_command(tmp_path, num_actors, slow_after) as command:
        command.press_ctrl_c() if number == signal.SIGINT else command.send(number)
        ends_by(number, command)
        assert f"Stopped by {number.name}" in command.out
        assert f"Resume with: dppo train --resume {tmp_path / 'run'} --trust" in command.out
    assert checkpoints_in(tmp_path)[-1] == last
    assert resumes_to(tmp_path, undisturbed)


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_the_shutdown_ends_it_at_once(
    num_actors: int, number: int, tmp_path: Path
) -> None:
    with busy_command(tmp_path, num_actors) as command:
        command.send(number)
        command.wait_until(
            lambda: checkpoints_in(tmp_path)[-1] == "iter_000002" or not command.running, SOON_S
        )
        if number == signal.SIGTERM:
            time.sleep(COPIES_S[number])
        command.send(number)
        ends_by(number, command, but=HELPERS_OF_RAY)
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_during_an_update_ends_the_run_at_once(number: int, tmp_path: Path) -> None:
    """The first signal ends the update by an exception, which this network suppresses."""
    (tmp_path / "endless_update.py").write_text(ENDLESS_UPDATE)
    words = command_line(tmp_path, 0, STEPS, "--model", "endless_update:Endless")
    with Command(words, tmp_path) as command:
        command.wait_until((tmp_path / "updating").exists, 120)
        command.send(number)
        time.sleep(0.5)
        assert command.running
        if number == signal.SIGTERM:
            command.send(number)  # a copy
            time.sleep(COPIES_S[number])
            assert command.running
        command.send(number)
        assert command.wait(SOON_S) == 128 + number


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_simulators_are_created_ends_the_command(
    num_actors: int, number: int, tmp_path: Path
) -> None:
    begins = "    pathlib.Path(f'waiting-{os.getpid()}').touch()\n"
    (tmp_path / "endless.py").write_text(
        f"import os, pathlib, time\ndef make():\n{begins}    time.sleep(1000)\n"
    )
    words = ["train", "endless:make", "--num-actors", str(num_actors), "--progress", "plain"]
    with Command(words, tmp_path) as command:
        command.wait_until(lambda: any(tmp_path.rglob("waiting-*")), 120)
        command.send(number)
        ends_by(number, command)


@pytest.mark.slow
@each_way
def test_after_sigkill_only_the_run_is_left(
    num_actors: int, tmp_path: Path, undisturbed: np.ndarray
) -> None:
    with busy_command(tmp_path, num_actors, SLOW_AFTER, "--checkpoint-interval-s", "0") as command:
        assert sum("ray::PPOActor" in line for line in command.processes().values()) == num_actors
        # Actors collect the third segments before the checkpoint of the second iteration has been written.
        command.wait_until(lambda: "iter_000002" in checkpoints_in(tmp_path))
        command.send(signal.SIGKILL)
        assert command.wait(SOON_S) == 137
        command.leaves_nothing_within(GONE_S, but=HELPERS_OF_RAY)
        command.leaves_nothing_within(120)
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"
    assert resumes_to(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_ray_starts_ends_the_command(number: int, tmp_path: Path) -> None:
    """While it starts, Ray sets a handler of SIGTERM that would end the process with code 15."""
    with Command(command_line(tmp_path, 2), tmp_path) as command:
        command.wait_until(
            lambda: any("/raylet " in line for line in command.processes().values()), 60
        )
        command.send(number)
        ends_by(number, command)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--num-learners", "2")])
def test_sigterm_to_all_processes_at_once_saves(
    flags: tuple[str, ...], tmp_path: Path, undisturbed: np.ndarray
) -> None:
    """As Slurm does at the time limit of a job: Ray's own processes end at the same moment."""
    with busy_command(tmp_path, 2, SLOW_AFTER, *flags) as command:
        for pid in [command.pid, *command.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert command.wait(SOON_S) == 143
        assert "Stopped by SIGTERM" in command.out
        assert "Traceback" not in command.out + command.err
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"
    if not flags:
        assert resumes_to(tmp_path, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_ends_a_wait_and_its_handler_is_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        signal.raise_signal(number)
        if number is not signal.SIGINT:  # it may be sent twice; Ctrl-C would end the process
            signal.raise_signal(number)
        with pytest.raises(StopRequested) as stopped:
            stop.check()
        assert stopped.value.signal is number
    assert signal.getsignal(number) is before


def test_a_signal_whose_exception_was_caught_while_a_command_began_stops_its_run() -> None:
    """Otherwise the run would go on as if nobody had asked it to end: `timeout` sends SIGTERM once."""
    with RaisingSignals():
        with suppress(StopRequested):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a copy
        with StopSignals() as stop, pytest.raises(StopRequested) as stopped:
            stop.check()
    assert stopped.value.signal is signal.SIGTERM
    assert stop.seconds_since() < 10


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            stop.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_in_a_notebook_raises_keyboard_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere it ends the process at once."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setitem(COPIES_S, signal.SIGINT, 0.0)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_added_checks_are_part_of_each_check() -> None:
    def lost() -> None:
        raise ClusterError("gone")

    with StopSignals() as stop:
        stop.check()
        stop.add_check(lost)
        with pytest.raises(ClusterError, match="gone"):
            stop.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested):  # the signal comes first
            stop.check()


class Waiting(Plain):
    """Waits in its updates while the file `folder/wait` exists, and reports by `folder/waits`."""

    def __init__(self, spaces: dppo.Spaces, head_size: int, folder: str) -> None:
        super().__init__(spaces, head_size)
        self.folder = Path(folder)

    def forward(self, obs: torch.Tensor) -> Any:
        while torch.is_grad_enabled() and len(obs) in (4, 8) and (self.folder / "wait").exists():
            (self.folder / "waits").touch()
            time.sleep(0.01)
        return super().forward(obs)


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (signal.SIGTERM, {}),
        pytest.param(signal.SIGINT, {"reuse": 2, "num_actors": 2}, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, {"num_actors": 2, "num_learners": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_an_update_drops_it_and_saves_the_iteration_before(
    number: signal.Signals, changes: dict[str, Any], tmp_path: Path
) -> None:
    network: dict[str, Any] = {
        "model": Waiting,
        "model_kwargs": {"folder": str(tmp_path)},
        "norm_obs": False,
    }
    sizes = {"minibatch_size": 8, "update_epochs": 2}
    config = tiny_run(tmp_path / "run", samplers=2, steps=8, **network | sizes | changes)
    whole = dppo.train(dataclasses.replace(config, run_dir=tmp_path / "whole"))

    def block(iteration: int) -> None:
        if iteration == 2:
            (tmp_path / "wait").touch()

    def send() -> None:
        wait_until((tmp_path / "waits").exists)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with Notes() as notes:
        result = dppo.train(config, observers=[Recorder(after_iteration=block)])
    sender.join()
    assert result.stopped_by == number.name
    assert result.checkpoint.stem == "iter_000002"
    assert f"{number.name}: iteration 3 is dropped, those before it are saved" in notes.texts

    (tmp_path / "wait").unlink()
    assert dppo.train(config, resume=tmp_path / "run").weights_sha256 == whole.weights_sha256


class Alarming(gym.Wrapper[Any, Any, Any, Any]):
    """Leaves a timer running, as a simulator with a time limit of its own."""

    def step(self, action: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 3600)
        return self.env.step(action)


@pytest.mark.timeout(120, method="thread")  # the other method has a timer of its own
def test_a_timer_that_an_environment_leaves_running_does_not_end_the_process(
    tmp_path: Path,
) -> None:
    dppo.train(small(tmp_path / "run", env_id=lambda: Alarming(gym.make("CartPole-v1"))))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Stopping(gym.Wrapper[Any, Any, Any, Any]):
    """Sends SIGINT to its process in each step."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def test_a_run_that_is_stopped_in_its_first_iteration_names_no_earlier_ones(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", env_id=lambda: Stopping(gym.make("CartPole-v1")))
    with Notes() as notes:
        result = dppo.train(config)
    assert result.stopped_by == "SIGINT"
    assert "SIGINT: iteration 1 is dropped" in notes.texts
    assert not result.picture.exists()
