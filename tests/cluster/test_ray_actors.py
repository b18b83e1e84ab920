"""Actors on Ray that hang, die, restart and interrupt, through real causes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from builders import make_config
from commandline import SOURCE, TESTS, output_of, run
from processes import actors_of_this_process, ours, wait_until
from recorder import Notes, Recorder, lasting
from worlds.slow import Reporting

import dppo
from dppo.engine.mailbox import Mailbox
from dppo.errors import ClusterError, EnvironmentFault
from dppo.transports.ray import transport as ray_transport

pytestmark = pytest.mark.usefixtures("ray_session")
SIZES = {
    "num_samplers": 4,
    "num_steps": 40,
    "total_timesteps": 4 * 40 * 4,
    "update_epochs": 1,
    "progress": "off",
}
PATIENCE_S = 4.0  # deadline of a segment that takes less than half a second; whatever hangs here hangs for an hour


def settings(run_dir: Path, env_id: Any = "CartPole-v1", **changes: Any) -> dppo.Config:
    return make_config({"env_id": env_id, "run_dir": run_dir, **SIZES, **changes})


def crashing(
    run_dir: Path, kind: str, where: str = "step", marker: Path | None = None, **changes: Any
) -> dppo.Config:
    """CartPole that fails in its third episode or in its constructor: once with a marker, else always."""
    failure: dict[str, Any] = {"how": kind, "where": where}
    if where == "step":
        failure |= {"at_step": 3, "at_episode": 2}
    if marker is not None:
        failure["marker"] = str(marker)
    return settings(run_dir, "worlds.faulty:crashing", env_kwargs=failure, **changes)


@pytest.fixture(autouse=True)
def no_other_actors(ray_session: None) -> None:
    """Wait for the actors of earlier runs, which have been killed, to end."""
    wait_until(lambda: not actors_of_this_process())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of the same run in this process, without faults."""
    return dppo.train(settings(tmp_path_factory.mktemp("undisturbed") / "run")).weights_sha256


@pytest.mark.proves("hangs in a step or a constructor")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "constructor"])
def test_a_simulator_that_hangs_is_killed_and_replaced(
    where: str, undisturbed: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    marker = tmp_path / "marker"
    config = crashing(
        tmp_path / "run", "hang", where, marker, num_actors=2, segment_timeout_s=PATIENCE_S
    )
    with Notes() as notes:
        result = dppo.train(config, observers=[recorder])
    assert marker.exists()
    assert result.weights_sha256 == undisturbed
    assert lasting(result) == {"actor_hung": 1}
    assert any("1 x actor_hung" in line for line in recorder.ending)

    if where == "step":
        [hung] = [text for text in notes.texts if "counts as hung" in text]
        place = r"actor \d \(samplers \d, \d\) made no progress for segment_timeout_s=4, was last seen stepping"
        assert re.search(place, hung)
        assert "raise segment_timeout_s" in hung
        assert re.search(
            r'replaced; it was in File ".*faulty\.py", line \d+ in _fail_if; its log: .*actor-\d\.log$',
            hung,
        )
        [incident] = [incident for incident in recorder.incidents if incident.kind == "actor_hung"]
        assert "_fail_if" in incident.details
        assert "most recent call first" in incident.details


@pytest.mark.slow  # tests/test_promise.py kills single actors in the fast set
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_all_actors_lost_at_once(number: signal.Signals, undisturbed: str, tmp_path: Path) -> None:
    """In the middle of a segment. Actors receive SIGTERM when their node is drained or preempted."""

    def end_all(iteration: int) -> None:
        if iteration == 2:
            for pid in actors_of_this_process():
                os.kill(pid, number)

    slow = {"longest_s": 0.02}
    config = settings(tmp_path / "run", "worlds.slow:Delayed", env_kwargs=slow, num_actors=3)
    result = dppo.train(config, observers=[Recorder(after_iteration=end_all)])
    assert result.weights_sha256 == undisturbed
    assert lasting(result) == {"actor_lost": 3}


def test_a_run_that_is_stopped_keeps_the_incidents_of_the_iteration_that_it_drops(
    undisturbed: str, tmp_path: Path
) -> None:
    """A user stops a run because actors die: the incident is what they look for."""

    def kill(iteration: int) -> None:
        if iteration == 2:
            os.kill(min(actors_of_this_process()), signal.SIGKILL)

    def stop(text: str) -> None:
        if "died" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    slow = {"longest_s": 0.02}
    run_dir = tmp_path / "run"
    config = settings(run_dir, "worlds.slow:Delayed", env_kwargs=slow, num_actors=2)
    with Notes(stop):
        result = dppo.train(config, observers=[Recorder(after_iteration=kill)])
    assert result.stopped_by == "SIGTERM"
    assert lasting(result) == {"actor_lost": 1}
    report = (run_dir / "incidents" / "001" / "report.txt").read_text()
    assert re.match(r"actor \d \(samplers \d, \d\) died", report)
    resumed = dppo.train(config, resume=run_dir)
    assert resumed.weights_sha256 == undisturbed
    assert lasting(resumed) == {"actor_lost": 1}


def test_reports_of_ray_that_are_lost_change_nothing(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pending calls are looked at when nothing has been reported for a while."""
    reports: list[Any] = []

    put = Mailbox[Any].put

    def lose(mailbox: Mailbox[Any], item: Any) -> None:
        reports.append(item)
        if len(reports) <= 3:  # two starts and the spaces
            put(mailbox, item)

    monkeypatch.setattr(Mailbox, "put", lose)
    monkeypatch.setattr(ray_transport, "TICK_S", 0.02)
    monkeypatch.setattr(ray_transport, "POLL_S", 0.02)
    # an answer that is never seen ends the run
    once = {"segment_timeout_s": PATIENCE_S, "max_actor_restarts": 0}
    result = dppo.train(settings(tmp_path / "run", num_actors=2, **once))
    assert len(reports) > 3
    assert result.weights_sha256 == undisturbed
    assert not lasting(result)


@pytest.mark.proves("is frozen, and thaws later")
@pytest.mark.slow
def test_frozen_actors_are_killed_and_ignored_when_they_thaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, as on a machine that is suspended or swaps.

    One actor is thawed when both are abandoned, and may answer an old question. The other cannot react to SIGTERM, but
    must end, because it may hold a licence or a port that its successor needs.
    """
    # notice the deadline, and looks at the actors, at once
    monkeypatch.setattr(ray_transport, "TICK_S", 0.05)
    base = settings(tmp_path / "undisturbed", num_samplers=2, total_timesteps=2 * 40 * 3)
    undisturbed = dppo.train(base).weights_sha256
    frozen: list[int] = []
    hung: list[bool] = []

    def freeze(number: int) -> None:
        if number == 1:
            frozen.extend(actors_of_this_process())
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)

    def thaw_one(note: str) -> None:
        hung.append("counts as hung" in note)
        if sum(hung) == 2:
            with suppress(ProcessLookupError):  # killed already
                os.kill(frozen[0], signal.SIGCONT)

    config = dataclasses.replace(
        base, run_dir=tmp_path / "run", num_actors=2, segment_timeout_s=PATIENCE_S
    )
    try:
        with Notes(after=thaw_one):
            result = dppo.train(config, observers=[Recorder(after_iteration=freeze)])
        assert len(frozen) == 2
        assert result.weights_sha256 == undisturbed
        assert lasting(result) == {"actor_hung": 2}
        wait_until(lambda: not set(frozen) & actors_of_this_process())
    finally:
        for pid in set(frozen) & actors_of_this_process():
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_an_actor_that_dies_while_others_work_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no question, so no call fails. The others may be busy with a replay for minutes."""
    monkeypatch.setattr(ray_transport, "POLL_S", 0.1)

    def busy() -> set[int]:
        return set(ours("ray::PPOActor.make_segments"))

    def kill_the_idle_one() -> None:
        wait_until(lambda: len(busy()) == 2)
        wait_until(lambda: len(busy()) == 1)
        [idle] = actors_of_this_process() - busy()
        os.kill(idle, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_idle_one)
    killer.start()
    sizes = {
        "num_actors": 2,
        "num_samplers": 3,
        "total_timesteps": 3 * 40,
        "env_kwargs": {"step_s": 0.1},
    }
    result = dppo.train(settings(tmp_path / "run", "dppo/SlowCartPole-v0", **sizes))
    killer.join()
    assert lasting(result) == {"actor_lost": 1}, "there is no later question that could fail"


# for a segment of 0.24 s; after 30 segments a replay takes more than three deadlines
DEADLINE_S = 2.0


def endless(folder: Path, num_actors: int) -> dppo.Config:
    """Return settings of a run whose steps take 4 ms if the file "slow" is in `folder`."""
    changes: dict[str, Any] = {
        "num_actors": num_actors,
        "num_samplers": 1,
        "num_steps": 60,
        "total_timesteps": 60 * 34,
    }
    changes |= {"segment_timeout_s": DEADLINE_S} if num_actors else {}
    return settings(
        folder / "run", "worlds.slow:Endless", env_kwargs={"slow": str(folder / "slow")}, **changes
    )


@pytest.mark.proves("takes longer to replay than the limit")
@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_a_replay_may_take_several_deadlines(resumed: bool, tmp_path: Path) -> None:
    def kill(iteration: int) -> None:
        if iteration == 30 and not resumed:
            for pid in actors_of_this_process():
                os.kill(pid, signal.SIGKILL)

    expected = dppo.train(endless(tmp_path / "undisturbed", 0)).weights_sha256
    resume = None
    if resumed:
        stopped = dppo.train(endless(tmp_path, 0), observers=[Recorder(interrupt_at=30)])
        assert stopped.iterations == 30
        resume = tmp_path / "run"
    (tmp_path / "slow").touch()
    recorder = Recorder(after_iteration=kill)
    result = dppo.train(endless(tmp_path, 1), observers=[recorder], resume=resume)
    assert result.weights_sha256 == expected
    assert lasting(result) == ({} if resumed else {"actor_lost": 1})

    rows = [row for row in result.metrics if row["replay/steps"]]
    assert [row["iteration"] for row in rows] in ([31], [32])
    assert sum(row["replay/s"] for row in rows) > 3 * DEADLINE_S


@pytest.mark.proves("kills its process every time, in several places or in its constructor")
@pytest.mark.slow  # tests/cluster/test_engine.py lets actors fail for ever in the fast set
def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    config = crashing(tmp_path / "run", "exit", "constructor", num_actors=1, max_actor_restarts=2)
    facts = r"(?s)actor 0 \(samplers 0, 1, 2, 3\) died.*replaced 2 times in a row.*max_actor_restarts=2.*num_actors=0"
    with Notes() as notes, pytest.raises(ClusterError, match=facts):
        dppo.train(config)
    # A busy machine may log other lines as well, such as "waiting for ...".
    replacements = [note.partition("; replaced")[2] for note in notes.texts if "; replaced" in note]
    assert replacements == ["", " in 1 s"]
    wait_until(lambda: not actors_of_this_process())


@pytest.mark.slow  # tests/envs/test_group_faults.py has faults of all kinds in the fast set
@pytest.mark.parametrize("kind", ["interrupt", "bare"])
def test_interrupts_and_errors_of_a_simulator_leave_a_checkpoint(
    kind: str, undisturbed: str, tmp_path: Path
) -> None:
    config = crashing(
        tmp_path / "run", kind, marker=tmp_path / "marker", num_actors=2, on_env_fault="raise"
    )
    raised = {"interrupt": "KeyboardInterrupt", "bare": "BaseException"}[kind]
    with pytest.raises(
        EnvironmentFault, match=rf"env 0: step of episode 2 \(seed \d+, step 3\) raised {raised}"
    ):
        dppo.train(config)
    config = crashing(tmp_path / "run", kind, marker=tmp_path / "marker")
    assert dppo.train(config, resume=tmp_path / "run").weights_sha256 == undisturbed


@pytest.mark.slow
def test_a_keyboard_interrupt_in_a_constructor_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="constructor raised KeyboardInterrupt"):
        dppo.train(crashing(tmp_path / "run", "interrupt", "constructor", num_actors=2))


def test_a_local_function_makes_simulators_in_actors_without_heavy_modules_and_gpus(
    undisturbed: str, tmp_path: Path
) -> None:
    """The run is in a thread, as in a server: signals cannot be handled there."""
    reports = tmp_path / "reports"
    reports.mkdir()

    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        return Reporting(str(reports), **kwargs)

    kwargs = {"gravity": [9.8, {"on": "earth"}]}
    config = settings(tmp_path / "run", make, env_kwargs=kwargs, num_actors=2)
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(dppo.train(config).weights_sha256))
    thread.start()
    thread.join(120)
    assert results == [undisturbed]

    loaded = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    pids = {report["pid"] for report in loaded}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert len(loaded) > 12  # 4 constructors and resets, some of them after an update
    for report in loaded:
        assert report["kwargs"] == kwargs
        assert (report["heavy"], report["cuda"], report["omp"]) == ([], "", "1")
        assert set(report["blas_threads"][:1]) == {1}


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


@pytest.mark.slow
def test_a_function_of_a_script_can_be_sent_to_actors(undisturbed: str, tmp_path: Path) -> None:
    """The script runs in its own process, connected to the Ray of this one."""
    import ray

    (tmp_path / "script.py").write_text(SCRIPT.replace("SIZES", repr(SIZES)))
    ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    ours["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    assert output_of(["script.py"], tmp_path, **ours).split() == [undisturbed]


def test_a_run_restores_ray_signal_handlers_variables_and_threads(tmp_path: Path) -> None:
    import ray
    import torch

    class Memory:  # local, so that Ray pickles it by value
        def __init__(self, number: int) -> None:
            self._number = number

        def add(self, number: int) -> int:
            self._number += number
            return self._number

    remember: Any = ray.remote(num_cpus=0)(Memory).remote(41)

    def handler(*_: object) -> None: ...

    before = ray.cluster_resources()
    environ = dict(os.environ)
    threads = torch.get_num_threads()
    handlers = {
        number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        dppo.train(settings(tmp_path / "run", num_actors=1))
        assert {signal.getsignal(number) for number in handlers} == {handler}
    finally:
        for number, earlier in handlers.items():
            signal.signal(number, earlier)
    assert dict(os.environ) == environ
    assert torch.get_num_threads() == threads
    assert ray.is_initialized()
    assert ray.cluster_resources() == before

    wait_until(lambda: ray.available_resources().get("CPU") == before["CPU"])
    assert ray.get(remember.add.remote(1), timeout=120) == 42
    ray.kill(remember)
    wait_until(lambda: not actors_of_this_process())


STARTS_RAY = """
import json, os, signal, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "1"  # chosen by the user
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


@pytest.mark.slow
def test_a_ray_that_a_run_starts_is_stopped_and_changes_only_variables_of_ray(
    undisturbed: str, tmp_path: Path
) -> None:
    report = json.loads(output_of(["-c", STARTS_RAY.replace("SIZES", repr(SIZES))], tmp_path))
    assert report["weights"] == undisturbed
    assert report["ray"] is False
    assert report["handler"] is True
    assert all(name.startswith("RAY_") for name in report["changed"])
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV" not in report["changed"]
    assert report["meanwhile"]["RAY_AUTH_MODE"] == "token"
    assert not Path(report["meanwhile"]["RAY_AUTH_TOKEN_PATH"]).exists()
    assert not [name for name in report["changed"] if name.startswith("RAY_AUTH")]


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
def test_a_node_without_dppo_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DPPO)
    path = os.pathsep.join(map(str, (tmp_path, SOURCE, TESTS)))
    code, _, err = run(["train", "CartPole-v1", "--num-actors", "2"], tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "No module named 'dppo'" in err
    assert "Install the same dppo on every node" in err
    assert "Traceback" not in err
