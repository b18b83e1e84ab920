"""Solvers that own their time loop: dppo.h, its Fortran module and the Python client, on good and bad days."""

from __future__ import annotations

import ast
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import tiny_run
from remedies import executes

import dppo
from dppo.envs.activity import ActivityRecord, Phase
from dppo.envs.instance import Instance
from dppo.hosts.keeper import MARKER
from dppo.machine import usable_cores
from dppo.remote import make
from dppo.remote.client import STOP, Solver
from dppo.remote.connection import Connection, Listener
from dppo.remote.environment import RestartingSolverEnv, _place
from dppo.remote.protocol import parts_of
from dppo.slots import cores
from dppo.slots.layout import Layout
from dppo.slots.program import Program, SolverError
from dppo.slots.slots import Slots

INCLUDE = Path(dppo.__file__).parent / "remote"
EXAMPLES = Path(__file__).parents[1] / "examples" / "solvers"
C_COMPILER = shutil.which("cc")

LOOP = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from client import ACT, RESET, RUNNING, STOP, TRUNCATED, Solver
solver = Solver("level probes[2,3]", "inflow[2](-1:1)")
observation, reward, end = None, 0.0, RUNNING
print("begun", flush=True)
while True:
    reply, action = solver.step(observation, reward, end)
    if reply == STOP:
        break
    if reply == RESET:
        level, steps, reward, end = solver.seed % 97 / 97, 0, 0.0, RUNNING
    else:
        level = 0.9 * level + 0.1 * sum(action)
        steps += 1
        reward = -level * level
        end = TRUNCATED if steps == 20 else RUNNING
        solver.info("level", level)
        {trouble}
    observation = [level, *(level + 0.1 * number for number in range(6))]
print("stopped", flush=True)
"""


def solver(folder: Path, trouble: str = "pass") -> list[str]:
    """The command of a solver in Python; `trouble` is executed after each step."""
    program = folder / "solver.py"
    program.write_text(LOOP.replace("{trouble}", trouble))
    return [sys.executable, str(program), str(INCLUDE)]


def played(env: gym.Env, seed: int, steps: int = 5) -> list[bytes]:
    """The observations of some steps."""
    observation, _ = env.reset(seed=seed)
    history = [observation]
    for step in range(steps):
        history.append(env.step(np.full(env.action_space.shape, np.sin(step)))[0])
    return [repr(entry).encode() for entry in history]


def test_a_solver_is_an_environment_with_the_parts_that_it_declares(tmp_path: Path) -> None:
    env = make(solver(tmp_path), scratch_dir=str(tmp_path))
    assert env.observation_space == gym.spaces.Dict(
        {
            "level": gym.spaces.Box(-np.inf, np.inf, (), np.float64),
            "probes": gym.spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        }
    )
    assert env.action_space == gym.spaces.Box(-1, 1, (2,), np.float64)

    observation, _ = env.reset(seed=96)
    assert observation["level"] == 96 / 97
    _, reward, terminated, truncated, info = env.step(np.array([0.5, -0.5]))
    level = 0.9 * 96 / 97
    assert info == {"level": level}
    assert reward == -(level**2)
    assert not terminated
    assert not truncated

    for _ in range(19):
        _, _, _, truncated, _ = env.step(np.zeros(2))
    assert truncated

    episode = played(env, 3)
    assert played(env, 3) == episode
    assert played(env, 4) != episode

    env.close()
    env.close()
    assert (tmp_path / "solver.log").read_text() == "begun\nstopped\n"
    with pytest.raises(SolverError, match="is closed"):
        env.step(np.zeros(2))


def test_a_solver_that_is_interrupted_in_a_step_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    env = make(solver(tmp_path), scratch_dir=str(tmp_path))
    env.reset(seed=1)
    monkeypatch.setattr(Connection, "receive_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.zeros(2))
    waits = []
    terminate = Program.terminate

    def recorded(program: Program, wait_s: float) -> None:
        waits.append(wait_s)
        terminate(program)

    monkeypatch.setattr(Program, "terminate", recorded)
    env.close()
    assert waits == [0.0]


def restarting(folder: Path) -> list[str]:
    """The command of a solver that writes restart files."""
    loop = LOOP.replace("import ACT, RESET", "import ACT, LOAD, RESET, SAVE")
    loop = loop.replace('(-1:1)")', '(-1:1)", restarts=True)')
    restart = """
    if reply == SAVE:
        open(solver.path, "w").write(f"{level!r} {steps}")
        continue
    if reply == LOAD:
        level, steps = map(eval, open(solver.path).read().split())
        reward, end = 0.0, RUNNING
    elif reply == RESET:"""
    program = folder / "restarting.py"
    program.write_text(
        loop.replace("\n    if reply == RESET:", restart).replace("{trouble}", "pass")
    )
    return [sys.executable, str(program), str(INCLUDE)]


def test_a_solver_goes_on_from_its_restart_file_in_another_process(tmp_path: Path) -> None:
    def restarting_in(folder: Path) -> RestartingSolverEnv:
        folder.mkdir()
        env = make(restarting(tmp_path), scratch_dir=str(folder))
        assert isinstance(env, RestartingSolverEnv)
        return env

    first = restarting_in(tmp_path / "first")
    second = restarting_in(tmp_path / "second")
    played(first, 5, steps=3)
    state = first.get_state()
    second.set_state(state)
    action = np.array([0.5, 0.25])
    assert repr(second.step(action)) == repr(first.step(action))

    state["last"] = state["last"] + 1
    with pytest.raises(SolverError, match="another observation with its restart file"):
        second.set_state(state)

    first.get_state()
    restart_files = (tmp_path / "first").glob("restart-*")
    assert [path.name for path in restart_files] == ["restart-2"]

    first.close()
    second.close()

    plain = make(solver(tmp_path), scratch_dir=str(tmp_path))
    assert not hasattr(plain, "get_state")
    plain.close()


KILLED_TWICE = """
import glob, os, signal
number = len(glob.glob("killed-*"))
if number < 2:
    open(f"killed-{number}", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def disturbed(folder: Path, trouble: str, at_start: str) -> gym.Env[Any, Any]:
    """Return an environment whose solver is in trouble and plays as one without, after five steps.

    `at_start`: code that runs when the solver starts, before anything else. The run hears of each restart, and sees
    progress in it, which has the time limit of a constructor: six times, after each start of the solver, while it waits
    for the next start, and after each step that is repeated.
    """
    undisturbed = make(solver(folder), scratch_dir=str(folder))
    expected = played(undisturbed, 5)
    undisturbed.close()
    words = solver(folder, trouble.replace("os.kill", "print('-----', flush=True); os.kill"))
    program = Path(words[1])
    program.write_text(at_start + program.read_text())
    record = ActivityRecord()
    record.enter(Phase.STEP)
    reasons: list[str] = []
    phases: list[Phase] = []

    @contextmanager
    def restarting(reason: str) -> Iterator[Callable[[], None]]:
        with Instance(progress=record, on_restart=reasons.append).restarting(reason) as show:

            def show_and_note() -> None:
                show()
                phases.append(record.look().phase)

            yield show_and_note

    env = make(words, scratch_dir=str(folder), slots=Slots(restarting=restarting))
    assert played(env, 5) == expected
    log = folder / "solver.log"
    pattern = (
        r"the solver ended in step 4 of an episode \(by SIGKILL\) after the line 'begun', and is "
    )
    assert re.match(rf"{pattern}started again; its log: {log} on ", reasons[0])
    assert phases == [Phase.RESTART] * 6
    assert record.look().phase is Phase.STEP
    return env


def test_a_solver_that_is_killed_while_it_starts_or_repeats_its_episode_is_started_again(
    tmp_path: Path,
) -> None:
    killed = "if steps == {0: 4, 1: 2}.get(len(glob.glob('at-*'))): "
    killed += "open(f'at-{steps}', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    env = disturbed(tmp_path, killed, KILLED_TWICE)
    assert env.step(np.zeros(2))[4]["solver_restarts"] > 1
    env.close()
    assert len(list(tmp_path.glob("killed-*"))) == 2


REFUSED_TWICE = """
import glob, sys
number = len(glob.glob("refused-*"))
if glob.glob("killed") and number < 2:
    open(f"refused-{number}", "w").close()
    sys.exit("no licence is free")
"""


def test_a_solver_whose_licence_is_not_free_at_once_is_started_again_in_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.remote.environment.WAITS_S", (0.25, 0.25))
    killed = "if steps == 4 and not os.path.exists('killed'): "
    killed += "open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    disturbed(tmp_path, killed, REFUSED_TWICE).close()
    assert len(list(tmp_path.glob("refused-*"))) == 2


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            "if steps == 3: print('diverged'); sys.exit(7)",
            r"ended twice in step 3 .*\(exit status 7\)\. Its last lines:\n  begun\n  diverged",
        ),
        (
            "level += os.getpid() * 1e-6\n"
            "        if steps == 3: os.kill(os.getpid(), signal.SIGKILL)",
            r"by SIGKILL(.|\n)*do not follow from the seed",
        ),
        ("if steps == 3: end = 77", "handed over end=77"),
    ],
)
def test_a_solver_that_fails_for_good_is_an_error_with_its_last_lines(
    tmp_path: Path, trouble: str, message: str
) -> None:
    env = make(solver(tmp_path, trouble), scratch_dir=str(tmp_path))
    with pytest.raises(SolverError, match=message):
        played(env, 5)
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither command nor address"),
        ({"command": []}, "cannot be started"),
        ({"command": ["/no/such/solver"]}, "/no/such/solver: cannot be started .No such file"),
        (
            {"command": ["true"]},
            r"ended before it connected \(exit status 0\), and has printed nothing",
        ),
        ({"command": "sh -c 'echo no licence >&2; exit 3'"}, r"status 3\)(.|\n)*no licence"),
        (
            {"command": "sh -c 'for i in 1 1; do echo dppo: why >&2; done; seq 100; exit 1'"},
            r"lines:\n  dppo: why\n  89\n(.|\n)*\n  100$",
        ),
        ({"command": ["sleep", "60"], "open_timeout_s": 0.3}, "no solver has connected .* 0.3 s"),
        ({"command": ["true"], "address": "5000"}, "write tcp:HOST:PORT"),
        ({"command": ["true"], "address": "tcp:192.0.2.1:5000"}, "cannot listen at tcp:192.0.2.1"),
        ({"address": "tcp:127.0.0.1:0"}, "DPPO_SECRET is not set"),
    ],
)
def test_what_cannot_start_says_why(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SolverError, match=message):
        make(**arguments, scratch_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs parts"),
        ("a[0]", "holds no number"),
        ("a[2] a", "different names"),
        ("a(1:0)", "not below"),
        ("a(0-1)", r"written as \(low:high\)"),
        ("a{3}", "A part is written as"),
    ],
)
def test_parts_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        parts_of(text)


def opening_message(secret: str, number_bytes: int, observation: str, action: str) -> bytes:
    """The first message of a solver."""
    text = f"secret={secret}\nbytes={number_bytes}\nobservation={observation}\naction={action}\n"
    return struct.pack("<4sII", b"DPPO", 1, len(text)) + text.encode()


def opening_from(address: str, message: bytes) -> bytes:
    """What a program gets that connects and sends `message`."""
    host, port = address.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port)), 10) as connected:
        connected.sendall(message)
        return connected.recv(1000)


@pytest.mark.parametrize(
    ("message", "answer", "raised"),
    [
        (struct.pack("<4sII", b"DPPO", 9, 0), b"version 9", "Compile it with the dppo.h"),
        (b"GET / HTTP/1.1\r\n", b"is not a solver", "is not a solver"),
        (opening_message("s", 8, "a", "b"), b"no bounds", "no bounds"),
        (opening_message("s", 16, "a", "b(0:1)"), b"16 bytes", "16 bytes"),
    ],
)
def test_an_opening_that_is_refused_tells_both_sides_why(
    message: bytes, answer: bytes, raised: str
) -> None:
    listener = Listener("tcp:127.0.0.1:0", "s")
    answers: list[bytes] = []
    program = threading.Thread(
        target=lambda: answers.append(opening_from(listener.address, message))
    )
    program.start()
    with pytest.raises(SolverError, match=raised):
        listener.accept(10, lambda: None)
    program.join()
    listener.close()
    assert answer in answers[0]


def test_a_stranger_without_the_secret_does_not_disturb_the_solver() -> None:
    listener = Listener("tcp:127.0.0.1:0", "secret")
    answers: list[bytes] = []

    def connect() -> None:
        for secret in ("guess", "secret"):
            answers.append(
                opening_from(listener.address, opening_message(secret, 8, "a", "b(0:1)"))
            )

    programs = threading.Thread(target=connect)
    programs.start()
    connection = listener.accept(10, lambda: None)
    programs.join()
    assert b"DPPO_SECRET" in answers[0]
    assert struct.unpack("<4sII", answers[1]) == (b"DPPO", 1, 0)
    assert connection.opening.action == parts_of("b(0:1)")

    connection.close()
    listener.close()


@executes("remote/environment.py: neither command nor address is given. Add one to env_kwargs")
def test_the_command_that_is_asked_for_starts_a_solver(tmp_path: Path) -> None:
    with pytest.raises(SolverError) as refused:
        make(scratch_dir=str(tmp_path))
    example = re.search(r"{.*?}", str(refused.value))
    assert example is not None
    arguments: dict[str, Any] = ast.literal_eval(example[0])
    assert list(arguments) == ["command"]
    make(command=solver(tmp_path), scratch_dir=str(tmp_path)).close()


@executes(
    "remote/environment.py: is not set, without which anybody could connect to",
    "remote/protocol.py: gives its action {} no bounds. Write them behind it",
)
def test_a_solver_that_connects_by_itself_needs_the_secret_and_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp:127.0.0.1:{port - 10}"
    with pytest.raises(SolverError, match="DPPO_SECRET is not set"):
        make(address=address, scratch_dir="", slots=Slots(sampler_id=1))

    monkeypatch.setenv("DPPO_SECRET", "a long random text")
    action = "inflow"
    for _ in range(2):
        refusals: list[ConnectionError] = []
        program = threading.Thread(target=serve, args=(action, port, refusals))
        program.start()
        try:
            env = make(address=address, scratch_dir="", slots=Slots(sampler_id=1))
        except SolverError as error:
            action += re.search(r"\(-1:1\)", str(error))[0]  # type: ignore[index]
            program.join()
            assert "no bounds" in str(refusals[0])
    assert env.reset(seed=11)[0] == 11.0

    env.close()
    program.join()


def serve(action: str, port: int, refusals: list[ConnectionError]) -> None:
    """Be a solver whose level is the seed of the episode."""
    try:
        connected = Solver("level", action, f"tcp:127.0.0.1:{port}")
    except ConnectionError as error:
        refusals.append(error)
        return
    while connected.step([connected.seed])[0] != STOP:
        pass
    connected.close()


@executes("remote/environment.py: Leave the launcher out, and ranks_per_env adds one that does")
def test_a_command_that_begins_with_a_launcher_is_started_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if usable_cores() < 2:
        pytest.skip("needs two cores")
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/sh\necho "$@"; exec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(cores, "LOCK", str(tmp_path))
    words = solver(tmp_path)
    for command, is_noted in (([str(launcher), *words], True), (words, False)):
        slots = Slots(Layout(1, 2))
        caplog.clear()
        make(command, scratch_dir=str(tmp_path), slots=slots).close()
        slots.close()
        assert ("begins with mpirun" in caplog.text) == is_noted
    assert " ".join(words) in (tmp_path / "solver.log").read_text()


def test_each_instance_has_its_own_address(tmp_path: Path) -> None:
    assert _place("tcp:0.0.0.0:5000", 23, "x") == "tcp:0.0.0.0:5023"
    assert _place("tcp:0.0.0.0:0", 23, "x") == "tcp:0.0.0.0:0"
    assert _place("", 23, str(tmp_path)) == f"unix:{tmp_path}/dppo.socket"
    assert _place("", 23, str(tmp_path / ("deep" * 30))) == "tcp:127.0.0.1:0"


@pytest.mark.skipif(C_COMPILER is None, reason="no C compiler")
def test_the_header_compiles_without_a_warning_and_speaks_the_protocol(tmp_path: Path) -> None:
    source = tmp_path / "solver.c"
    source.write_text(
        """
        #define DPPO_IMPLEMENTATION
        #include "dppo.h"
        int main(void) {
          float levels[2] = {0, 0}, inflow, reward = 0;
          dppo *d = dppo_open(DPPO_FLOAT, "level[2]", "inflow(0:2)");
          for (;;) {
            int reply = dppo_step(d, levels, reward, reward > 3 ? DPPO_TERMINATED : DPPO_RUNNING, &inflow);
            if (reply == DPPO_STOP) break;
            if (reply == DPPO_RESET) {
              levels[0] = levels[1] = (float)dppo_seed(d);
              reward = 0;
              printf("%s\\n", dppo_options(d));
              continue;
            }
            levels[0] += inflow;
            reward = levels[0];
            dppo_info(d, "loss", -reward);
          }
          dppo_close(d);
          return 0;
        }
        """
    )
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    program = tmp_path / "solver"
    command = [C_COMPILER, *strict, "-I", INCLUDE, source, "-o", program]
    subprocess.run(list(map(str, command)), check=True)
    env = make([str(program)], scratch_dir=str(tmp_path))
    assert env.observation_space == gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    observation, _ = env.reset(seed=2, options={"load": 1})
    assert observation.tolist() == [2.0, 2.0]
    observation, reward, terminated, _, info = env.step(np.array([1.5], np.float32))
    assert observation.tolist() == [3.5, 2.0]
    assert reward == 3.5
    assert terminated
    assert info == {"loss": -3.5}

    env.close()
    assert (tmp_path / "solver.log").read_text() == '{"load": 1}\n'


def settings(folder: Path, command: list[str], **changes: Any) -> dppo.Config:
    world: dict[str, Any] = {"env_id": "dppo.remote:make", "env_kwargs": {"command": command}}
    return tiny_run(folder, samplers=2, iterations=4, **world | changes)


@pytest.mark.parametrize("is_actor", [False, True])
def test_a_run_has_the_same_weights_if_a_solver_was_killed_and_reports_its_restart(
    is_actor: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log of an actor has the line at once, in case that the actor is lost before it answers."""
    if is_actor:
        monkeypatch.setenv(MARKER, "here")
    calm = dppo.train(settings(tmp_path / "calm", solver(tmp_path)))
    marker = tmp_path / "killed"
    once = f"steps == 7 and not os.path.exists({str(marker)!r})"
    trouble = f"if {once}: open({str(marker)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    disturbed = dppo.train(settings(tmp_path / "run", solver(tmp_path, trouble)))
    assert marker.exists()
    assert disturbed.weights_sha256 == calm.weights_sha256
    assert disturbed.incidents == {"program_restarted": 1}
    line = r"sampler \d \(dppo\.remote:make\), env 0: the solver ended in step 7 of .* is started again"
    assert len(re.findall(line, caplog.text)) == 1 + is_actor


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gfortran") is None, reason="no Fortran compiler")
def test_the_fortran_example_is_an_environment(tmp_path: Path) -> None:
    header = INCLUDE / "dppo.h"
    sources = f"{INCLUDE / 'dppo_module.f90'} {EXAMPLES / 'heat.f90'}"
    for command in (
        f"cc -c -x c -DDPPO_IMPLEMENTATION {header} -o dppo.o",
        f"gfortran -o heat {sources} dppo.o",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    env = make([str(tmp_path / "heat")], scratch_dir=str(tmp_path))
    env.reset(seed=1)

    def is_truncated() -> bool:
        _, _, _, truncated, _ = env.step(np.full(3, 0.5))
        return truncated

    for _ in range(99):
        assert not is_truncated()
    assert is_truncated()
    env.close()
