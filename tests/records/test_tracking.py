"""Trackers: settings, metrics, states and resumes, read back from the files of W&B's offline mode and of MLflow."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from builders import tiny_run
from commandline import Command
from processes import wait_until
from recorder import Notes, Recorder
from remedies import executes

import dppo
from dppo.errors import ConfigError
from dppo.signals import Interrupted, StopRequested
from dppo.tools.trackers import tracker as tracking
from dppo.tools.trackers.mlflow import Backend as MLflow

ITERATIONS = 4
trackers = pytest.mark.parametrize("name", ["wandb", "mlflow"])


def settings(run_dir: Path, name: str, **changes: Any) -> dppo.Config:
    tracked_run: dict[str, Any] = {"track": (name,), "eval_every": 128, "eval_episodes": 2}
    return tiny_run(run_dir, samplers=2, steps=32, iterations=ITERATIONS, **tracked_run | changes)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def tracked(name: str, run_dir: Path) -> tuple[list[dict[str, float]], dict[str, Any], list[str]]:
    """Return the rows, by step, the settings, and the last state of each run of the tracker."""
    if name == "mlflow":
        return tracked_by_mlflow(run_dir)
    files = list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    # another process writes them
    wait_until(lambda: len(tracked_by_wandb(run_dir)[2]) == len(files))
    assert files
    return tracked_by_wandb(run_dir)


def messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file of W&B, which is a log of LevelDB: chunks in blocks of 32 KiB, after 7 bytes."""
    data = path.read_bytes()
    at = 7
    message = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or the last part
            yield message
            message = b""


EXITS = {0: "FINISHED", 1: "FAILED", 255: "KILLED"}
Tracked = tuple[list[dict[str, float]], dict[str, Any], list[str]]
"""The rows, the settings and the states of a run in a tracker."""


def records_of_wandb(run_dir: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for message in messages(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record


def tracked_by_wandb(run_dir: Path) -> Tracked:
    rows = list[dict[str, float]]()
    config = dict[str, Any]()
    states = list[str]()
    ids = set[str]()
    for record in records_of_wandb(run_dir):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {}
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                row[key] = json.loads(item.value_json)
            rows.append(row)
        elif kind == "run":
            ids.add(record.run.run_id)
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
        elif kind == "exit":
            states.append(EXITS[record.exit.exit_code])
    assert ids <= {id_in(run_dir, "wandb")}
    flat = dict[str, Any]()
    for part in config.values():
        if isinstance(part, dict):
            flat |= part
    return rows, flat, states


def id_in(run_dir: Path, tracker: str) -> str:
    ids: dict[str, str] = json.loads((run_dir / "trackers.json").read_text())
    return ids[tracker]


def tracked_by_mlflow(run_dir: Path) -> Tracked:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("dppo")
    [run] = client.search_runs([experiment.experiment_id])
    run_id = run.info.run_id
    assert run_id == id_in(run_dir, "mlflow")
    rows: dict[int, dict[str, float]] = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run_id, key):
            row = rows.setdefault(metric.step, {"global_step": metric.step})
            row[key] = metric.value
    in_order = [rows[step] for step in sorted(rows)]
    return in_order, run.data.params, [run.info.status]


@pytest.mark.slow
@trackers
def test_a_tracker_has_the_settings_metrics_and_state_of_a_run_that_is_resumed(
    name: str, places: None, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    run = tmp_path / "run"
    without = dppo.train(settings(tmp_path / "without", name, track=()))
    dppo.train(settings(run, name), observers=[Recorder(interrupt_at=2)])
    _, _, states = tracked(name, run)
    assert states == ["KILLED"]

    result = dppo.train(settings(run, name), resume=run)
    assert result.weights_sha256 == without.weights_sha256

    rows, config, states = tracked(name, run)
    assert states[-1] == "FINISHED"
    assert str(config["env_id"]) == "CartPole-v1"
    assert str(config["num_steps"]) == "32"

    rows_by_step = {row["global_step"]: row for row in rows}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        there = rows_by_step[row["global_step"]]
        for key in ("charts/episodes", "losses/entropy"):
            assert there[key] == row[key]
        if "eval/iteration" not in row:
            continue
        evaluated_at = row["eval/global_step"]
        if name == "wandb":
            assert there["eval/global_step"] == evaluated_at
        else:
            evaluated = rows_by_step[evaluated_at]
            assert evaluated["eval/episodic_return"] == row["eval/episodic_return"]


@pytest.mark.slow
@trackers
def test_a_tracker_knows_that_a_run_has_failed(name: str, places: None, tmp_path: Path) -> None:
    pytest.importorskip(name)

    def fail(number: int) -> None:
        raise RuntimeError("an observer of the user")

    with pytest.raises(RuntimeError, match="an observer"):
        dppo.train(settings(tmp_path / "run", name), observers=[Recorder(after_iteration=fail)])
    assert tracked(name, tmp_path / "run")[2] == ["FAILED"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StopRequested(signal.SIGTERM), "KILLED"),
        (SystemExit(143), "KILLED"),
        (Interrupted(), "KILLED"),
        (ValueError(), "FAILED"),
    ],
)
def test_a_run_that_a_signal_ends_before_its_first_iteration_is_killed(
    error: BaseException, state: str
) -> None:
    assert tracking._state_of(None, error) == state


@pytest.mark.slow
@trackers
def test_a_command_that_gets_sigterm_ends_its_run_as_killed(
    name: str, places: None, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    words = f"train CartPole-v1 --track {name} --run-dir run --total-timesteps 1e9"
    with Command(words, tmp_path, PYTHONPATH=os.pathsep.join(sys.path)) as command:
        command.wait_until(lambda: "return" in command.out)
        command.send(signal.SIGTERM)
        assert command.wait(60) == 128 + signal.SIGTERM
    assert f"note: {name}: " in command.out
    assert tracked(name, tmp_path / "run")[2] == ["KILLED"]


@executes("tools/trackers/mlflow.py: Set MLFLOW_TRACKING_URI to a server, or to a file")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's database
@pytest.mark.parametrize("uri", ["nonsense://nowhere", "file:///tmp/mlruns", "http://127.0.0.1:9"])
def test_mlflow_that_refuses_is_refused_before_anything_starts(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(
        ConfigError, match=f"track=mlflow: MLFLOW_TRACKING_URI={uri} (refuses: |does not answer)"
    ):
        dppo.train(settings(tmp_path / "run", "mlflow"))
    assert not (tmp_path / "run").exists()

    # as the message says
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    if find_spec("sqlalchemy") is not None:
        dppo.train(settings(tmp_path / "run", "mlflow"))


@executes("tools/trackers/wandb.py: set WANDB_MODE=offline")
@pytest.mark.slow
def test_wandb_without_a_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    words = "train CartPole-v1 --track wandb --run-dir run --total-timesteps 512"
    places = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path), "WANDB_API_KEY": ""}
    with Command(words, tmp_path, WANDB_MODE="online", **places) as command:
        assert command.wait(120) == 2
        assert "track=wandb: Weights & Biases refuses: " in command.err
        assert "set WANDB_MODE=offline, or leave out --track" in command.err
    assert not (tmp_path / "run").exists()
    with Command(words, tmp_path, WANDB_MODE="offline", **places) as command:
        assert command.wait(120) == 0


@executes("tools/trackers/__init__.py: track={}: {} Use {}.")
def test_an_unknown_tracker_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"track=wandbb: wandbb is not a known tracker\. .* Use mlflow or wandb"
    ):
        dppo.train(settings(tmp_path / "run", "wandbb"))
    assert os.listdir(tmp_path) == []


@trackers
def test_a_tracker_that_is_not_installed_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.user_code.find_spec", lambda wanted: None)
    package = {"wandb": "wandb", "mlflow": "mlflow-skinny"}[name]
    with pytest.raises(
        ConfigError,
        match=f"track={name}: needs the package {name}. Install it: .* install .*{package}$",
    ):
        dppo.train(settings(tmp_path / "run", name))
    assert os.listdir(tmp_path) == []


class Fake:
    """A tracker that keeps the id that it is given."""

    package = "mlflow-skinny"
    place = "nowhere"
    remedy = ""
    opened: ClassVar[list[tuple[str, str | None]]] = []
    check = staticmethod(int)

    @staticmethod
    def server() -> str:
        return "MLFLOW_TRACKING_URI=file:///tmp"

    def __init__(self, run: Any, resumed_id: str | None) -> None:
        self.opened.append((type(self).__name__, resumed_id))
        self.id = resumed_id or f"new-{type(self).__name__}"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Other(Fake):
    """A second tracker."""


class OfPackage(Fake):
    """A tracker of an installed package, whose name is no module."""

    send = end = staticmethod(lambda *_: None)


@executes(
    "tools/trackers/__init__.py: Let the entry point name a class",
    "tools/trackers/__init__.py: Correct its package",
)
@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("test_tracking", "is not the class of a tracker. Let the entry point name a class"),
        ("test_tracking:ITERATIONS", "is not the class of a tracker"),
        ("test_tracking:Missing", "cannot be imported: AttributeError: .*Missing"),
        ("no_such_module:Own", "cannot be imported: ModuleNotFoundError: .*no_such_module"),
    ],
)
def test_a_tracker_of_another_package_needs_no_module_of_its_name(
    entry: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"own": f"{__name__}:OfPackage", "wrong": entry.replace("test_tracking", __name__)}
    monkeypatch.setattr(
        "dppo.tools.trackers.entry_points",
        lambda group: [EntryPoint(name, value, group) for name, value in entries.items()],
    )
    monkeypatch.setattr(OfPackage, "opened", [])
    with pytest.raises(ConfigError, match=f"track=wrong: {entries['wrong']} {problem}"):
        dppo.train(settings(tmp_path / "run", "wrong"))
    assert os.listdir(tmp_path) == []
    dppo.train(settings(tmp_path / "run", "own", total_timesteps=128))
    assert OfPackage.opened == [("OfPackage", None)]


Use = Callable[[dict[str, type[Fake]]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that replaces trackers."""

    def replace(trackers: dict[str, type[Fake]]) -> None:
        monkeypatch.setattr(tracking, "backend", trackers.get)

    monkeypatch.setattr(Fake, "opened", [])
    return replace


def test_a_resumed_run_continues_those_of_all_trackers(tmp_path: Path, use: Use) -> None:
    use({"wandb": Fake, "mlflow": Other})
    config = settings(tmp_path / "run", "wandb", track=("wandb", "mlflow"))
    dppo.train(config, observers=[Recorder(interrupt_at=2)])
    dppo.train(config, resume=tmp_path / "run")
    resumed = [("Fake", "new-Fake"), ("Other", "new-Other")]
    assert Fake.opened == [("Fake", None), ("Other", None), *resumed]


class Refusing(Fake):
    """A tracker whose first call fails, or never ends."""

    remedy = "Leave out `track`."
    blocked = threading.Event()


def refuse() -> None:
    raise RuntimeError("file stores are no longer supported")


def test_a_tracker_that_refuses_or_does_not_answer_is_refused_before_anything_starts(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use({"mlflow": Refusing})
    monkeypatch.setattr(Refusing, "check", refuse)
    server = "track=mlflow: MLFLOW_TRACKING_URI=file:///tmp"
    why = f"{server} refuses: RuntimeError: file stores are no longer supported. Leave out `track`."
    with pytest.raises(ConfigError, match=re.escape(why)):
        dppo.train(settings(tmp_path / "run", "mlflow"))

    monkeypatch.setattr(Refusing, "check", Refusing.blocked.wait)
    monkeypatch.setattr(tracking, "CHECK_S", 0.2)
    with pytest.raises(ConfigError, match=f"{server} does not answer within 0 s. Leave"):
        dppo.train(settings(tmp_path / "run", "mlflow"))

    Refusing.blocked.set()
    assert not (tmp_path / "run").exists()


class Failing(Fake):
    """A tracker that takes a row, and no other one."""

    rows = 0

    def send(self, row: Any) -> None:
        self.rows += 1
        if self.rows > 1:
            raise ConnectionError("the server is gone")


def test_a_tracker_that_fails_is_repeated_in_the_last_lines(tmp_path: Path, use: Use) -> None:
    use({"mlflow": Failing})
    recorder = Recorder()
    with Notes() as notes:
        result = dppo.train(
            settings(tmp_path / "run", "mlflow", total_timesteps=64 * 8), observers=[recorder]
        )
    fact = "nothing more is sent to mlflow (ConnectionError('the server is gone')); metrics.jsonl is complete"
    assert notes.texts.count(fact) == 1
    assert f"Tracking: {fact}" in recorder.ending
    assert result.stopped_by is None


class Waiting(Fake):
    """A tracker that never takes a row."""

    blocked = threading.Event()

    def send(self, row: Any) -> None:
        self.blocked.wait()


@pytest.mark.proves("rows that a tracker does not take")
def test_training_does_not_wait_for_a_tracker_that_does_not_answer(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use({"mlflow": Waiting})
    monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", "mlflow"))
    Waiting.blocked.set()
    assert len(result.metrics) >= ITERATIONS
    assert (
        "mlflow does not answer: the last rows were not sent; metrics.jsonl is complete"
        in notes.texts
    )


class Client:
    """A client of MLflow that keeps what it is sent; what it sends later cannot be sent, if `fails`."""

    tracking_uri = "nowhere"
    fails = False

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, float, int, int]]] = []
        self.state = ""

    def log_batch(self, run_id: str, *, metrics: list[Any], synchronous: bool) -> Client:
        self.batches.append(metrics)
        return self

    def wait(self) -> None:
        if self.fails:
            raise ConnectionError("the server is gone")

    def update_run(self, run_id: str, *, status: str) -> None:
        self.state = status

    def set_terminated(self, run_id: str, state: str) -> None:
        self.state = state


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MLflow:
    entities = SimpleNamespace(Metric=lambda *values: values, Param=None)
    monkeypatch.setitem(
        sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=entities)
    )
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return MLflow(SimpleNamespace(run_dir=Path("run")), "known")  # type: ignore[arg-type]


def test_mlflow_gets_names_that_it_allows_in_batches_that_it_accepts(mlflow: MLflow) -> None:
    faults = {
        f"faults/sampler {i // 16}, env {i % 16}: ValueError in step": 1.0 + i for i in range(1300)
    }
    mlflow.send(
        {
            "iteration": 2,
            "global_step": 64,
            "eval/global_step": 32,
            "eval/episodic_return": 5.0,
            **faults,
        }
    )
    batches = mlflow._client.batches
    sent = {name: (value, step) for batch in batches for name, value, _, step in batch}
    assert [len(batch) for batch in batches] == [2 + 1300 - len(batches[-1]), len(batches[-1])]
    assert max(map(len, batches)) <= 1000
    assert len(sent) == 2 + 1300
    assert sent["faults/sampler 1_ env 2_ ValueError in step"] == (19.0, 64)
    assert sent["eval/episodic_return"] == (5.0, 32)
    assert all(re.fullmatch(r"[\w./ -]+", name) for name in sent)


def test_the_run_of_mlflow_is_ended_even_if_its_last_rows_cannot_be_sent(
    mlflow: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "fails", True)
    mlflow.send({"iteration": 1, "global_step": 32, "charts/SPS": 9.0})
    assert mlflow._client.state == "RUNNING"
    with pytest.raises(ConnectionError):  # which `Tracker` logs
        mlflow.end("FINISHED")
    assert mlflow._client.state == "FINISHED"
