"""Ctrl-C, SIGTERM, SIGHUP and SIGKILL, sent to a real `python -m dppo train`: what it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from commandline import Command

import dppo
from dppo.__main__ import main
from dppo.config import make_config
from dppo.errors import ClusterError
from dppo.signals import StopRequested, StopSignals

STEPS, ITERATIONS, SAMPLERS = 200, 4, 2
TOTAL = STEPS * ITERATIONS * SAMPLERS
SLOW_AFTER = 2 * STEPS + 10  # two iterations are quick; what is left of the third then takes minutes
SOON_S = 40.0  # the promise is 10 s; the machine may be busy. To the end of the segment it would take 190 s and more.
# Killed with its driver, Ray takes its actors along at once, but two of its helpers first try for 60 s to report it.
HELPERS_OF_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def each_way(*slow: tuple[int, signal.Signals]) -> pytest.MarkDecorator:
    """Ctrl-C and SIGTERM, in this process and on Ray; those that are given are left to the slow set."""
    ways = [(actors, number) for actors in (0, 2) for number in (signal.SIGINT, signal.SIGTERM)]
    marked = [pytest.param(*way, 128 + way[1], marks=[pytest.mark.slow] if way in slow else []) for way in ways]
    return pytest.mark.parametrize(("num_actors", "number", "code"), marked)


def command_line(folder: Path, num_actors: int, slow_after: int = SLOW_AFTER, *more: str) -> list[str]:
    # The simulators of actors are processes of their own, as with most game engines: they have to end too.
    world = "odd_worlds:outside_cartpole" if num_actors else "odd_worlds:hesitant_cartpole"
    return [
        *("train", world, "--run-dir", str(folder / "run"), "--progress", "plain"),
        *("--env-kwargs", f'{{"folder": "{folder}", "slow_after": {slow_after}}}'),
        *("--num-actors", str(num_actors), "--num-samplers", str(SAMPLERS)),
        *("--num-steps", str(STEPS), "--total-timesteps", str(TOTAL), *more),
    ]


@contextmanager
def busy_command(folder: Path, num_actors: int, slow_after: int = SLOW_AFTER, *more: str) -> Iterator[Command]:
    """A training that is in the middle of a segment which takes minutes; all its simulators are in a step."""
    (folder / "slow").touch()
    with Command(command_line(folder, num_actors, slow_after, *more), folder) as command:
        command.wait_until(lambda: len(list(folder.glob("waiting-*"))) >= max(1, num_actors), timeout_s=90)
        yield command


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "run" / "checkpoints").glob("iter_*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The weights that the commands here end with when nobody disturbs them."""
    settings = {"num_samplers": SAMPLERS, "num_steps": STEPS, "total_timesteps": TOTAL, "progress": "off"}
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    dppo.train(make_config({"env_id": "CartPole-v1", "run_dir": run_dir, **settings}))
    return dppo.load_policy(run_dir).weights


def goes_on_as_if_nothing_had_been(folder: Path, undisturbed: np.ndarray) -> bool:
    """Resume in this process, with the simulators quick again; whether the weights end up the same."""
    (folder / "slow").unlink()
    assert main(["train", "--trust", "--resume", str(folder / "run"), "--num-actors", "0"]) == 0
    weights = dppo.load_policy(folder / "run").weights
    return weights.tobytes() == undisturbed.tobytes()


@each_way()
def test_a_stop_saves_at_once_and_the_run_can_go_on(
    num_actors: int, number: int, code: int, tmp_path: Path, undisturbed: np.ndarray
) -> None:
    with busy_command(tmp_path, num_actors) as command:
        if number == signal.SIGINT:
            command.press_ctrl_c()
        else:
            command.send(number)
        assert command.wait(SOON_S) == code
        command.leaves_nothing_within(20)
        assert f"Stopped by {signal.Signals(number).name}" in command.out
        assert f"Resume with: dppo train --resume {tmp_path / 'run'} --trust" in command.out
        assert "Traceback" not in command.out + command.err
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"
    assert goes_on_as_if_nothing_had_been(tmp_path, undisturbed)


def test_a_stop_before_the_first_iteration_has_ended_can_be_resumed_too(
    tmp_path: Path, undisturbed: np.ndarray
) -> None:
    with busy_command(tmp_path, num_actors=0, slow_after=5) as command:
        command.send(signal.SIGTERM)
        assert command.wait(SOON_S) == 143
    assert checkpoints_in(tmp_path) == ["iter_000000"]
    assert goes_on_as_if_nothing_had_been(tmp_path, undisturbed)


@each_way((2, signal.SIGINT), (2, signal.SIGTERM))
def test_a_second_signal_while_it_tidies_up_stops_it_at_once(
    num_actors: int, number: int, code: int, tmp_path: Path
) -> None:
    with busy_command(tmp_path, num_actors) as command:
        command.send(number)
        command.wait_until(lambda: checkpoints_in(tmp_path)[-1] == "iter_000002" or not command.running, SOON_S)
        command.send(number)
        assert command.wait(SOON_S) == code
        command.leaves_nothing_within(20, but=HELPERS_OF_RAY)
        assert "Traceback" not in command.err
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_second_signal_during_a_long_update_stops_it_at_once(number: int, code: int, tmp_path: Path) -> None:
    """The first one waits for the update, which would take hours here; the second one does not."""
    (tmp_path / "slow").touch()
    words = command_line(tmp_path, 0, STEPS - 1, "--update-epochs", "1000000", "--envs-per-sampler", "1")
    with Command(words, tmp_path) as command:
        command.wait_until(lambda: list(tmp_path.glob("waiting-*")), 60)  # sampler 0 makes its last step
        (tmp_path / "slow").unlink()
        time.sleep(5)  # far more than what is left of the collection
        command.send(number)
        time.sleep(1)
        assert command.running
        command.send(number)
        assert command.wait(SOON_S) == code


@each_way((2, signal.SIGINT))
def test_a_stop_while_simulators_are_being_made_ends_the_command(
    num_actors: int, number: int, code: int, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, time\n"
        "def make():\n"
        "    pathlib.Path(f'waiting-{os.getpid()}').touch()\n"
        "    time.sleep(1000)\n"
    )
    words = ["train", "endless:make", "--num-actors", str(num_actors), "--progress", "plain"]
    with Command(words, tmp_path) as command:
        command.wait_until(lambda: any(tmp_path.rglob("waiting-*")) or "waiting" in command.out, 60)
        command.send(number)
        assert command.wait(SOON_S) == code
        command.leaves_nothing_within(20)
        assert "Traceback" not in command.err


@pytest.mark.parametrize("num_actors", [0, 2])
def test_after_sigkill_nothing_is_left_but_a_run_that_can_go_on(
    num_actors: int, tmp_path: Path, undisturbed: np.ndarray
) -> None:
    with busy_command(tmp_path, num_actors, SLOW_AFTER, "--checkpoint-interval-s", "0") as command:
        if num_actors:
            assert sum("ray::PPOActor" in line for line in command.processes().values()) == num_actors
        command.send(signal.SIGKILL)
        assert command.wait(SOON_S) == 137
        command.leaves_nothing_within(20, but=HELPERS_OF_RAY)
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"
    assert goes_on_as_if_nothing_had_been(tmp_path, undisturbed)


@pytest.mark.slow
def test_after_sigkill_nothing_of_ray_is_left_either(tmp_path: Path) -> None:
    with busy_command(tmp_path, num_actors=2) as command:
        command.send(signal.SIGKILL)
        assert command.wait(SOON_S) == 137
        command.leaves_nothing_within(120)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stop_while_ray_starts_ends_the_command(number: int, code: int, tmp_path: Path) -> None:
    """Ray sets a handler of SIGTERM in the middle of its start, which would end the process with code 15."""
    with Command(command_line(tmp_path, 2), tmp_path) as command:
        command.wait_until(lambda: any("/raylet " in line for line in command.processes().values()), 60)
        command.send(number)
        assert command.wait(SOON_S) == code
        command.leaves_nothing_within(20)
        assert "Traceback" not in command.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [(), ("--num-learners", "2")])
def test_sigterm_to_all_processes_at_once_saves_too(
    more: tuple[str, ...], tmp_path: Path, undisturbed: np.ndarray
) -> None:
    """As Slurm does it at a job's time limit: Ray's own processes go at the same moment."""
    with busy_command(tmp_path, 2, SLOW_AFTER, *more) as command:
        for pid in [command.pid, *command.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert command.wait(SOON_S) == 143
        assert "Stopped by SIGTERM" in command.out
        assert "Traceback" not in command.out + command.err
    assert checkpoints_in(tmp_path)[-1] == "iter_000002"
    if not more:
        assert goes_on_as_if_nothing_had_been(tmp_path, undisturbed)


def test_a_closed_terminal_saves_and_ends_the_run(tmp_path: Path, undisturbed: np.ndarray) -> None:
    with busy_command(tmp_path, 0) as command:
        command.send(signal.SIGHUP)
        assert command.wait(SOON_S) == 129
        assert "Stopped by SIGHUP" in command.out
    assert goes_on_as_if_nothing_had_been(tmp_path, undisturbed)


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            stop.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_in_a_notebook_leaves_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it ends the process on the spot."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_check_that_was_added_is_made_with_each_other() -> None:
    def lost() -> None:
        raise ClusterError("gone")

    with StopSignals() as stop:
        stop.check()
        stop.add_check(lost)
        with pytest.raises(ClusterError, match="gone"):
            stop.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested):  # first: the user asked for it
            stop.check()
