"""Actors on the worst day: they hang, die, come late and never start. Through real causes, and with an end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from commandline import SOURCE, TESTS, actors_of_this_process, command_line, fresh_environment, run
from odd_worlds import reporting_cartpole
from recorder import Notes, Recorder

import dppo
from dppo.config import make_config
from dppo.errors import ClusterError, EnvironmentFault

pytestmark = pytest.mark.usefixtures("ray_session")
SIZES = {"num_samplers": 4, "num_steps": 40, "total_timesteps": 4 * 40 * 4, "update_epochs": 1, "progress": "off"}
# For a segment of some milliseconds, on a machine that may be busy; what hangs here hangs for an hour.
PATIENCE_S = 8.0


def settings(run_dir: Path, env_id: Any = "CartPole-v1", **changes: Any) -> dppo.Config:
    return make_config({"env_id": env_id, "run_dir": run_dir, **SIZES, **changes})


def crashing(run_dir: Path, how: str, where: str = "step", marker: Path | None = None, **changes: Any) -> dppo.Config:
    """CartPole that fails in its 30th step, or in its constructor: once if there is a marker, always otherwise."""
    failure = {"how": how, "where": where} | ({"at_step": 3, "at_episode": 2} if where == "step" else {})
    failure |= {} if marker is None else {"marker": str(marker)}
    return settings(run_dir, "testbeds:crashing_cartpole", env_kwargs=failure, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the run here when nothing goes wrong, made in this process."""
    return dppo.train(settings(tmp_path_factory.mktemp("undisturbed") / "run")).weights_sha256


# ------------------------------------------------------------------ lost and replaced


def test_a_simulator_that_hangs_is_killed_and_replaced(undisturbed: str, tmp_path: Path) -> None:
    recorder = Recorder()
    config = crashing(tmp_path / "run", "hang", marker=tmp_path / "marker", num_actors=2, segment_timeout_s=PATIENCE_S)
    with Notes() as notes:
        result = dppo.train(config, observers=[recorder])
    assert (tmp_path / "marker").exists()
    assert result.weights_sha256 == undisturbed
    assert result.incidents == {"actor_hung": 1}
    assert re.search(r"actor \d \(samplers \d, \d\) sent no segment for segment_timeout_s=8", notes.texts[0])
    assert "raise --segment-timeout-s" in notes.texts[0]
    assert "Incidents: 1 x actor_hung" in recorder.ending


@pytest.mark.slow
def test_a_simulator_that_hangs_while_it_is_made_is_killed_and_replaced(undisturbed: str, tmp_path: Path) -> None:
    config = crashing(
        tmp_path / "run", "hang", "constructor", tmp_path / "marker", num_actors=2, segment_timeout_s=PATIENCE_S
    )
    result = dppo.train(config)
    assert result.weights_sha256 == undisturbed
    assert result.incidents == {"actor_hung": 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_all_actors_lost_at_once(number: signal.Signals, undisturbed: str, tmp_path: Path) -> None:
    """In the middle of a segment. SIGTERM is what they get where a node is drained or preempted."""

    def end_all(iteration: int) -> None:
        if iteration == 2:
            for pid in actors_of_this_process():
                os.kill(pid, number)

    slow = {"longest_s": 0.02}
    config = settings(tmp_path / "run", "slow_worlds:delayed_cartpole", env_kwargs=slow, num_actors=3)
    result = dppo.train(config, observers=[Recorder(after_iteration=end_all)])
    assert result.weights_sha256 == undisturbed
    assert result.incidents == {"actor_lost": 3}


def test_actors_frozen_past_their_deadline_are_killed_and_not_heard_when_they_thaw(
    undisturbed: str, tmp_path: Path
) -> None:
    """SIGSTOP, as on a machine that is suspended or swaps.

    One wakes as soon as it is given up, with an answer to an old question. The other cannot hear that it has to
    end, and yet must, for it may hold a licence or a port that its successor needs.
    """
    frozen: list[int] = []

    def freeze(number: int) -> None:
        if number == 1:
            frozen.extend(actors_of_this_process())
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)

    def thaw_one(note: str) -> None:
        if "counts as hung" in note:
            with suppress(ProcessLookupError):  # killed already, which is as good
                os.kill(frozen[0], signal.SIGCONT)

    slow = {"longest_s": 0.02}  # or an actor might be done with its segments before it is frozen
    try:
        config = settings(
            tmp_path / "run",
            "slow_worlds:delayed_cartpole",
            env_kwargs=slow,
            num_actors=2,
            segment_timeout_s=PATIENCE_S,
        )
        with Notes(after=thaw_one):
            result = dppo.train(config, observers=[Recorder(after_iteration=freeze)])
        assert len(frozen) == 2
        assert result.weights_sha256 == undisturbed
        assert result.incidents == {"actor_hung": 2}
        wait_until(lambda: not set(frozen) & actors_of_this_process())
    finally:
        for pid in set(frozen) & actors_of_this_process():
            os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------ long replays

LONG = {"num_samplers": 1, "num_steps": 60, "total_timesteps": 60 * 34, "update_epochs": 1, "progress": "off"}
DEADLINE_S = 2.0  # for a segment of 0.24 s; after 30 of them a replay takes more than three times as long


def endless(folder: Path, num_actors: int) -> dppo.Config:
    """Steps take their time once there is a file "slow" in `folder`."""
    at_work = {"num_actors": num_actors} | ({"segment_timeout_s": DEADLINE_S} if num_actors else {})
    kwargs = {"env_kwargs": {"slow": str(folder / "slow")}, "run_dir": folder / "run"}
    return make_config({"env_id": "slow_worlds:Endless", **LONG, **at_work, **kwargs})


@pytest.fixture(scope="module")
def never_ending(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the run whose episode never ends."""
    return dppo.train(endless(tmp_path_factory.mktemp("endless"), 0)).weights_sha256


def test_a_replay_that_takes_several_deadlines_is_left_alone(never_ending: str, tmp_path: Path) -> None:
    def kill(iteration: int) -> None:
        if iteration == 30:
            for pid in actors_of_this_process():
                os.kill(pid, signal.SIGKILL)

    (tmp_path / "slow").touch()
    result = dppo.train(endless(tmp_path, 1), observers=[Recorder(after_iteration=kill)])
    assert result.weights_sha256 == never_ending
    assert result.incidents == {"actor_lost": 1}
    rows = result.metrics
    assert [row["iteration"] for row in rows if row["replay/steps"]] in ([31], [32])
    assert sum(row["replay/s"] for row in rows) > 3 * DEADLINE_S


def test_a_resumed_run_whose_replay_takes_several_deadlines_goes_on(never_ending: str, tmp_path: Path) -> None:
    stopped = dppo.train(endless(tmp_path, 0), observers=[Recorder(interrupt_at=30)])
    assert stopped.iterations == 30
    (tmp_path / "slow").touch()
    result = dppo.train(endless(tmp_path, 1), resume=tmp_path / "run")
    assert result.weights_sha256 == never_ending
    assert result.incidents == {}
    assert result.metrics[0]["replay/steps"] == 30 * 60
    assert result.metrics[0]["replay/s"] > 3 * DEADLINE_S


# ------------------------------------------------------------------ lost again and again


@pytest.mark.parametrize(("how", "where"), [("kill", "step"), ("exit", "constructor")])
def test_a_crash_loop_comes_to_an_end(how: str, where: str, tmp_path: Path) -> None:
    config = crashing(tmp_path / "run", how, where, num_actors=1, max_actor_restarts=2)
    with Notes() as notes, pytest.raises(ClusterError) as stopped:
        dppo.train(config)
    said = str(stopped.value)
    assert re.search(r"actor 0 \(samplers 0, 1, 2, 3\) died", said)
    assert "replaced 2 times in a row" in said
    assert "max_actor_restarts=2" in said
    assert "--num-actors 0" in said
    assert [note for note in notes.texts if "replaced" in note] == notes.texts
    assert len(notes.texts) == 2
    wait_until(lambda: not actors_of_this_process())


def test_a_simulator_that_always_hangs_comes_to_an_end(tmp_path: Path) -> None:
    config = crashing(tmp_path / "run", "hang", "constructor", num_actors=1, max_actor_restarts=0, segment_timeout_s=5)
    with pytest.raises(ClusterError) as stopped:
        dppo.train(config)
    assert "segment_timeout_s=5" in str(stopped.value)
    assert "actor 0" in str(stopped.value)
    wait_until(lambda: not actors_of_this_process())


def test_an_actor_lost_now_and_then_does_not_use_up_the_restarts(tmp_path: Path) -> None:
    """Every delivered segment gives them back: a run of weeks may lose many actors, if not in a row."""

    def kill(number: int) -> None:
        for pid in actors_of_this_process():  # none, where the last one died after it had delivered
            os.kill(pid, signal.SIGKILL)

    config = settings(tmp_path / "run", num_actors=1, num_samplers=1, total_timesteps=10 * 40, max_actor_restarts=1)
    result = dppo.train(config, observers=[Recorder(after_iteration=kill)])
    assert result.iterations == 10
    assert result.incidents["actor_lost"] > 2


# ------------------------------------------------------------------ interrupted from within


def test_a_keyboard_interrupt_in_a_simulator_stops_the_run_in_good_order(undisturbed: str, tmp_path: Path) -> None:
    result = dppo.train(crashing(tmp_path / "run", "interrupt", marker=tmp_path / "marker", num_actors=2))
    assert result.stopped_by == "SIGINT"
    assert result.iterations < 4
    assert result.checkpoint.stem == f"iter_{result.iterations:06}"
    config = crashing(tmp_path / "run", "interrupt", marker=tmp_path / "marker", num_actors=2)
    assert dppo.train(config, resume=tmp_path / "run").weights_sha256 == undisturbed


def test_a_keyboard_interrupt_in_a_constructor_ends_the_command_as_ctrl_c_does(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        dppo.train(crashing(tmp_path / "run", "interrupt", "constructor", num_actors=2))


def test_whatever_a_simulator_raises_is_its_fault_and_leaves_a_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"env 0: step of episode 2 \(seed \d+, step 3\) raised BaseException"):
        dppo.train(crashing(tmp_path / "run", "bare", marker=tmp_path / "marker", num_actors=2))
    config = crashing(tmp_path / "run", "bare", marker=tmp_path / "marker", num_actors=2)
    assert dppo.train(config, resume=tmp_path / "run").weights_sha256 == undisturbed


# ------------------------------------------------------------------ where simulators live


def test_simulators_live_in_actors_which_are_light_and_see_no_gpu(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    kwargs = {"folder": str(reports), "gravity": [9.8, {"on": "earth"}]}
    dppo.train(settings(tmp_path / "run", reporting_cartpole, env_kwargs=kwargs, num_actors=2))
    told = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    pids = {report["pid"] for report in told}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert len(told) > 12  # 4 constructors and resets, some of them after an update
    for report in told:
        assert report["kwargs"] == {"gravity": [9.8, {"on": "earth"}]}
        assert report["heavy"] == []
        assert report["cuda"] == ""
        assert report["omp"] == "1"
        assert set(report["blas_threads"][:1]) == {1}


def test_a_function_that_cannot_be_imported_anywhere_can_still_be_sent(undisturbed: str, tmp_path: Path) -> None:
    length = 0.5  # of the pole, as CartPole has it

    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1")
        env.unwrapped.length = length * kwargs["longer"]  # type: ignore[attr-defined]
        return env

    config = settings(tmp_path / "run", make, env_kwargs={"longer": 1.0}, num_actors=2)
    assert dppo.train(config).weights_sha256 == undisturbed
    config = settings(tmp_path / "lambda", lambda: gym.make("CartPole-v1"), num_actors=1)
    assert dppo.train(config).weights_sha256 == undisturbed


SCRIPT = """
import gymnasium as gym
from dppo import Config, train

class MyCartPole(gym.Wrapper):
    def step(self, action):
        return self.env.step(action)

def make():
    return MyCartPole(gym.make("CartPole-v1"))

if __name__ == "__main__":
    print(train(Config(env_id=make, num_actors=2, run_dir="run", **SIZES)).weights_sha256)
"""


def test_a_function_of_a_script_can_be_sent(undisturbed: str, tmp_path: Path) -> None:
    """By a process of its own, which takes part in the Ray that runs here."""
    import ray

    (tmp_path / "script.py").write_text(SCRIPT.replace("SIZES", repr(SIZES)))
    env = fresh_environment(RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    env |= {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [undisturbed]


# ------------------------------------------------------------------ what a run leaves as it found it


def test_a_ray_that_was_there_stays_and_has_everything_back(tmp_path: Path) -> None:
    import ray

    class Memory:  # in here, so that Ray sends all of it
        def __init__(self, number: int) -> None:
            self._number = number

        def add(self, number: int) -> int:
            self._number += number
            return self._number

    remember: Any = ray.remote(num_cpus=0)(Memory).remote(41)
    before = ray.cluster_resources()
    dppo.train(settings(tmp_path / "run", num_actors=2))
    assert ray.is_initialized()
    assert ray.cluster_resources() == before
    wait_until(lambda: ray.available_resources().get("CPU") == before["CPU"])
    assert ray.get(remember.add.remote(1), timeout=30) == 42
    ray.kill(remember)
    wait_until(lambda: not actors_of_this_process())


def test_the_processs_own_handlers_variables_and_threads_are_as_before(tmp_path: Path) -> None:
    import torch

    def handler(*_: object) -> None: ...

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    environ, threads = dict(os.environ), torch.get_num_threads()
    try:
        dppo.train(settings(tmp_path / "run", num_actors=1))
        assert {signal.getsignal(number) for number in before} == {handler}
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
    assert dict(os.environ) == environ
    assert torch.get_num_threads() == threads


def test_training_from_a_thread_works(undisturbed: str, tmp_path: Path) -> None:
    """As in a notebook or a server: there are no signals to listen to there."""
    found: list[str] = []
    config = settings(tmp_path / "run", num_actors=1)
    thread = threading.Thread(target=lambda: found.append(dppo.train(config).weights_sha256))
    thread.start()
    thread.join(120)
    assert found == [undisturbed]


STARTS_RAY = """
import json, os, signal, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "1"  # the user's own choice
before = dict(os.environ)
import dppo
def handler(*_): pass
signal.signal(signal.SIGTERM, handler)
meanwhile = {}
class Look(dppo.Observer):
    def on_iteration(self, row):
        meanwhile.update(os.environ)
config = dppo.Config(env_id="CartPole-v1", num_actors=1, run_dir="run", **SIZES)
result = dppo.train(config, observers=[Look()])
import ray
changed = {name: os.environ.get(name) for name in before | dict(os.environ) if os.environ.get(name) != before.get(name)}
print(json.dumps({"changed": changed, "weights": result.weights_sha256, "ray": ray.is_initialized(),
                  "handler": signal.getsignal(signal.SIGTERM) is handler, "meanwhile": meanwhile}))
"""


def test_a_ray_of_its_own_is_stopped_and_changes_only_variables_of_ray(undisturbed: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_RAY.replace("SIZES", repr(SIZES))],
        cwd=tmp_path,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["weights"] == undisturbed
    assert told["ray"] is False
    assert told["handler"] is True
    assert all(name.startswith("RAY_") for name in told["changed"])
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in told["changed"]
    assert told["meanwhile"]["RAY_AUTH_MODE"] == "token"
    assert not Path(told["meanwhile"]["RAY_AUTH_TOKEN_PATH"]).exists()
    assert not [name for name in told["changed"] if name.startswith("RAY_AUTH")]


WITHOUT_DPPO = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "dppo":
            raise ModuleNotFoundError("No module named 'dppo'")
if any("default_worker" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_a_node_on_which_dppo_is_not_installed_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DPPO)
    path = os.pathsep.join(map(str, (tmp_path, SOURCE, TESTS)))
    code, _, err = run(["train", "CartPole-v1", "--num-actors", "2"], tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "No module named 'dppo'" in err
    assert "Install the same dppo on every node" in err
    assert "Traceback" not in err


def wait_until(happened: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        left = {pid: command_line(pid) for pid in actors_of_this_process()}
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s; actors: {left}"
        time.sleep(0.1)
