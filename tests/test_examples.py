"""The examples run, and their wrappers for simulators keep seeds, time out, report errors and clean up."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from builders import tiny_run
from commandline import output_of
from gymnasium.utils.env_checker import check_env
from processes import descendants

import dppo
from dppo.__main__ import main
from dppo.records.terminal.figures import number

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HEAT = np.array([0.5], np.float32)
Example = Callable[[str], Any]


@pytest.fixture
def example(monkeypatch: Patch) -> Iterator[Example]:
    """Import an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def no_process_is_left() -> Iterator[set[int]]:
    """Return the processes that this one has started before the test, and assert that no others are left after it."""
    before = descendants(os.getpid())
    yield before
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize(
    ("name", "steps", "prints"),
    [
        (
            "python_api.py",
            1024,
            r"Result\(.*global_step=1024(?s:.*)4 iterations(?s:.*)drawn: \[[01] [01] [01]\]",
        ),
        ("curriculum.py", 512, r"Result\(.*global_step=512"),
        ("own_environment.py", 2048, r"Mean return after 2,048 steps: -\d+"),
        ("own_memory.py", 512, r"The pole stood for \d+ steps\.\nMean return after 512 steps: \d+"),
        ("own_network.py", 512, r"Mean return after 512 steps: \d+"),
        ("callback_simulator.py", 512, r"Mean return after 512 steps: -\d+"),
        ("socket_simulator.py", 2048, r"Mean return after 2,048 steps: -\d+"),
    ],
    ids=lambda value: value if str(value).endswith(".py") else "",
)
def test_an_example_runs(
    name: str,
    steps: int,
    prints: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Patch,
    no_process_is_left: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, str(steps)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(prints, capsys.readouterr().out)


@pytest.mark.slow
def test_the_cluster_example_resumes(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch, ray_session: None
) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: None)  # this process is connected already
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    for steps in ("512", "1024"):
        monkeypatch.setattr(sys, "argv", ["cluster.py", str(tmp_path / "run"), steps])
        runpy.run_path(str(EXAMPLES / "cluster.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "2 CPUs, 2 actors, 512 steps" in out
    assert "2 CPUs, 2 actors, 1,024 steps" in out
    assert "iter_000002 at step 512" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [("tune_optuna.py", "optuna"), ("tune_ray.py", "pyarrow")],
    ids=["Optuna", "Ray Tune"],
)
def test_an_example_of_tuning_runs(name: str, package: str, tmp_path: Path) -> None:
    """In a process with a Ray of its own; trials of Optuna share it and the study."""
    pytest.importorskip(package)
    # not one that others left
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": "local"}
    out = output_of([str(EXAMPLES / name), "2", "1024"], tmp_path, **variables)
    assert re.search(r"\d trials, best mean return \d+\.\d with \{.*'learning_rate': 0\.", out)
    assert len(list((tmp_path / "runs").rglob("config.yaml"))) >= 2


def test_the_plant_is_an_environment_and_its_controller_controls_it(example: Example) -> None:
    tanks = example("tanks")
    check_env(tanks.make(), skip_render_check=True)
    controlled = tanks.play(tanks.Controller().act, days=3)
    assert controlled > -10
    assert controlled > tanks.play(lambda _: np.full(3, 0.5), days=3) / 10


def test_the_pi_controller_is_evaluated_by_the_command_and_beats_proportional_control(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    tanks = example("tanks")
    controller = example("pi").PI
    words = ["eval", "tanks:make", "--policy", "pi:PI", "--info-keys", "energy", "violations"]
    assert main([*words, "--episodes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    evaluation = dppo.evaluate(controller, env=tanks.make, episodes=4)
    assert lines[1].startswith(f"return {number(evaluation.mean_return)} +- ")
    assert [line.split()[0] for line in lines[2:]] == ["in", "energy", "violations"]
    proportional = dppo.evaluate(tanks.Controller, env=tanks.make, episodes=4)
    assert evaluation.mean_return > proportional.mean_return > -10


def episode(env: Any, seed: int) -> list[tuple[list[float], float]]:
    """Play an episode at half power; return its observations and rewards."""
    obs, _ = env.reset(seed=seed)
    steps = [(obs.tolist(), 0.0)]
    done = False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(HEAT)
        assert env.observation_space.contains(obs)
        steps.append((obs.tolist(), reward))
        done = terminated or truncated
    return steps


@pytest.mark.parametrize(
    ("module", "maker"),
    [
        ("own_environment", "make"),
        ("callback_simulator", "Building"),
        ("socket_simulator", "SocketSimulator"),
    ],
)
def test_an_episode_follows_from_its_seed(module: str, maker: str, example: Example) -> None:
    make = getattr(example(module), maker)
    env = make()
    other = make()
    first = episode(env, 3)
    other.reset(seed=5)
    other.step(HEAT)  # in the middle of an episode
    assert episode(other, 3) == episode(env, 3) == first != episode(env, 4)
    for closed in (env, other, env):
        closed.close()


@pytest.mark.slow
def test_actors_repeat_the_episodes_of_a_socket_simulator(
    tmp_path: Path, example: Example, ray_session: None
) -> None:
    example("socket_simulator")
    settings: dict[str, Any] = {
        "samplers": 2,
        "steps": 64,
        "env_id": "socket_simulator:SocketSimulator",
    }
    alone, on_actors = (
        dppo.train(tiny_run(tmp_path / str(number), **settings, num_actors=number))
        for number in (0, 2)
    )
    assert alone.weights_sha256 == on_actors.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("num_actors", [0, 2])
def test_a_remote_simulator_goes_on_when_its_server_is_killed_and_starts_again(
    num_actors: int, tmp_path: Path, example: Example, ray_session: None
) -> None:
    serving = example("remote_server").serving
    with ExitStack() as servers:
        ports = [servers.enter_context(serving()).rpartition(":")[2] for _ in range(2)]
        stack = servers.enter_context(ExitStack())

        class Killer(dppo.Observer):
            def on_iteration(self, row: dict[str, float]) -> None:
                if row["iteration"] == 2:
                    victim = next(
                        child
                        for child in psutil.Process().children()
                        if child.cmdline()[1:2] == [script]
                    )
                    port = victim.net_connections()[0].laddr.port
                    victim.kill()
                    stack.enter_context(serving(port))

        script = example("remote_server").__file__
        settings = {
            "env_id": "remote_simulator:RemoteSimulator",
            "env_kwargs": {"addresses": [f"127.0.0.1:{port}" for port in ports]},
            "on_env_fault": "rebuild",
            "num_actors": num_actors,
        }
        config = tiny_run(tmp_path, samplers=2, steps=64, iterations=6, **settings)
        result = dppo.train(config, observers=[Killer()])
    assert result.iterations == 6
    assert result.incidents == {"env_raised": 1}

    [fault] = (name for name in result.env_faults if name != "steps lost")
    assert re.match(
        r"sampler [01], env 0: (ConnectionError|ConnectionResetError|BrokenPipeError) in step",
        fault,
    )


def test_each_remote_simulator_has_an_address_of_its_own(example: Example) -> None:
    module = example("remote_simulator")
    with example("remote_server").serving() as address:
        for sampler, env, number in ((0, 0, 0), (1, 0, 2), (1, 1, 3)):
            addresses = ["127.0.0.1:9"] * 4
            addresses[number] = address
            place = {"sampler_id": sampler, "env_index": env}
            with closing(
                module.RemoteSimulator(addresses, envs_per_sampler=2, reconnect_s=0.0, **place)
            ) as simulator:
                assert len(episode(simulator, 3)) > 10


def test_closing_ends_the_thread_of_a_callback_simulator(example: Example) -> None:
    before = threading.active_count()
    env = example("callback_simulator").Building()
    env.close()  # before the first reset
    env.reset(seed=1)
    env.step(HEAT)
    env.reset(seed=2)
    assert threading.active_count() == before + 1
    env.close()
    env.close()
    assert threading.active_count() == before


def test_a_callback_simulator_that_fails_or_hangs_is_reported_by_step(example: Example) -> None:
    released = threading.Event()

    def broken(on_step: Callable[..., float], seed: int) -> None:
        on_step(20.0, 0.0)
        raise ArithmeticError("the solver diverged")

    def hanging(on_step: Callable[..., float], seed: int) -> None:
        on_step(20.0, 0.0)
        released.wait()

    make = example("callback_simulator").Building
    failed = make(run=broken)
    hung = make(run=hanging)
    failed.reset(seed=1)
    with pytest.raises(ArithmeticError, match="the solver diverged"):
        failed.step(HEAT)

    failed.close()
    hung.reset(seed=1)
    hung.timeout_s = 0.1
    with pytest.raises(TimeoutError, match=r"no state within 0\.1 s"):
        hung.step(HEAT)

    released.set()
    hung.timeout_s = 60.0
    hung.close()


SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
stream = server.accept()[0].makefile("rw")
stream.readline()
stream.write('{"obs": [1.0, 0.3]}\\n')
stream.flush()
stream.readline()
"""
HANGS = SERVER + "stream.readline()"
DIES = SERVER + "sys.exit(3)"


def test_closing_ends_the_process_of_a_socket_simulator(
    example: Example, no_process_is_left: set[int]
) -> None:
    env = example("socket_simulator").SocketSimulator()
    assert len(descendants(os.getpid()) - no_process_is_left) == 1
    env.close()
    env.close()


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (HANGS, TimeoutError, r"did not answer {'step': 0\.5} within 0\.2 s"),
        (DIES, ConnectionError, r"closed the connection instead of answering {'step': 0\.5}"),
        ("print('no licence')", RuntimeError, r"printed 'no licence\\n' instead of its port"),
    ],
)
def test_a_socket_simulator_that_fails_is_reported(
    program: str, error: type[Exception], message: str, example: Example, no_process_is_left: Any
) -> None:
    def step_once() -> None:
        with closing(
            example("socket_simulator").SocketSimulator([sys.executable, "-c", program])
        ) as env:
            env.reset(seed=1)
            env.timeout_s = 0.2
            env.step(HEAT)

    with pytest.raises(error, match=message):
        step_once()
