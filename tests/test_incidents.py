"""An environment that fails leaves a folder, from which `dppo replay` plays its episode again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from builders import make_config, tiny_run
from matrix import REBUILD
from recorder import Notes, Recorder

import dppo
from dppo.__main__ import main
from dppo.errors import EnvFault, EnvironmentFault
from dppo.ppo.exchange.records import Incident, IncidentKind
from dppo.records.files import incidents
from dppo.records.files.incidents import IncidentWriter
from dppo.records.metrics.reading import last_row

Capture = pytest.CaptureFixture[str]


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    world = {"env_id": "worlds.faulty:crashing", "env_kwargs": {"at_episode": 1, "at_step": 3}}
    return tiny_run(run_dir, samplers=2, iterations=4, **world | changes)


def incident_of(run_dir: Path, **changes: Any) -> Path:
    """Train a run that a fault ends, and return the folder of its incident."""
    with pytest.raises(EnvironmentFault):
        dppo.train(settings(run_dir, on_env_fault="raise", **changes))
    [folder] = (run_dir / "incidents").iterdir()
    return folder


@pytest.fixture(scope="module")
def failed(module_path: Path) -> Path:
    """Return the folder of a run that a fault has ended."""
    return incident_of(module_path / "failed").parents[1]


def test_the_fault_that_ends_a_run_leaves_its_episode(failed: Path) -> None:
    folder = failed / "incidents" / "001"
    incident = json.loads((folder / "incident.json").read_text())
    place = {"kind": "env_raised", "phase": "step", "episode": 1, "step": 3}
    assert incident.items() >= place.items()
    assert len(incident["actions"]) == 3
    assert len(incident["last_obs"].split()) >= 4
    report = (folder / "report.txt").read_text()
    assert "RuntimeError: the simulator failed in its step" in report
    assert incident["versions"]["dppo"] == dppo.__version__
    last = last_row(failed)
    assert incident["ended_after"] == last.get("iteration", 0)


@pytest.mark.parametrize("word", ["hung or died", "fatal"])
def test_a_step_that_a_run_has_given_up_is_not_played_in_folders_of_any_version(
    word: str, failed: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The step would raise here, as it would end the process in such a run."""
    run = shutil.copytree(failed, tmp_path / "run")
    folder = run / "incidents" / "001"
    path = folder / "incident.json"
    incident = json.loads(path.read_text())
    incident["error"] = word
    incident["actions"].pop()
    path.write_text(json.dumps(incident))
    assert main(["replay", str(folder), "--trust"]) == 0
    assert "which the run gave up" in capsys.readouterr().out


def test_a_run_that_fails_gets_no_advice_on_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the fault and its traceback, it would hide the reason."""
    monkeypatch.setattr("dppo.records.notes.flat_note", lambda *_: "this run was flat")
    recorder = Recorder()
    with pytest.raises(EnvironmentFault):
        dppo.train(settings(tmp_path / "failed", on_env_fault="raise"), observers=[recorder])
    assert recorder.result is not None
    assert "this run was flat" not in recorder.result.notes
    whole = dppo.train(settings(tmp_path / "whole", on_env_fault="rebuild", env_faults="unlimited"))
    assert "this run was flat" in whole.notes


@pytest.mark.parametrize(
    ("world", "maker"),
    [
        ({"env_id": "worlds.faulty:Brittle", "env_kwargs": {"where": "constructor"}}, "the environment's constructor"),
        ({"env_id": "CartPole-v1", "env_kwargs": {}, "wrappers": ("worlds.faulty:unlicensed",)},
         "the wrapper worlds.faulty:unlicensed"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_made_is_named_with_its_place_and_leaves_no_folder(
    world: Any, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment has been made yet, so that none is waited for."""
    clock = SimpleNamespace(sleep=lambda _: pytest.fail("the run waits"))
    monkeypatch.setattr("dppo.attempts.time", clock)
    with pytest.raises(EnvironmentFault) as caught:
        dppo.train(settings(tmp_path / "run", **world))
    words = rf"env 0: {maker} raised .*LicenceError: licence server said 503 \(.*faulty.py, line "
    assert re.search(words, caught.value.message)
    assert "src/dppo" not in caught.value.remote_traceback
    assert os.listdir(tmp_path) == []


def test_a_resumed_run_that_cannot_start_tries_again_or_leaves_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The licence of the run that was killed may not be free at once."""
    licence = tmp_path / "licence"
    licence.touch()
    kwargs = {"where": "constructor", "marker": str(licence)}
    config = settings(tmp_path / "run", env_kwargs=kwargs)
    dppo.train(config, observers=[Recorder(interrupt_at=2)])
    licence.unlink()
    monkeypatch.setattr("dppo.transports.in_process.WAITS_S", ())
    with pytest.raises(EnvironmentFault):
        dppo.train(config, resume=tmp_path / "run")
    report = (tmp_path / "run" / "incidents" / "001" / "report.txt").read_text()
    assert "RuntimeError: the simulator failed in its constructor" in report
    licence.unlink()
    monkeypatch.setattr("dppo.transports.in_process.WAITS_S", (0,))
    result = dppo.train(config, resume=tmp_path / "run")
    assert (result.stopped_by, result.incidents) == (None, {"env_raised": 1})


@pytest.mark.parametrize("num_actors", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_actions_of_earlier_segments_are_among_them(
    num_actors: int, request: pytest.FixtureRequest, tmp_path: Path, capsys: Capture
) -> None:
    if num_actors:
        request.getfixturevalue("ray_session")
    endless = {"world": "worlds.slow:Endless", "world_kwargs": {"slow": "no"}}
    kwargs = endless | {"at_episode": None, "at_step": 40}
    folder = incident_of(tmp_path / "run", env_kwargs=kwargs, num_actors=num_actors)
    incident = json.loads((folder / "incident.json").read_text())
    assert len(incident["actions"]) == 40
    assert main(["replay", str(folder), "--trust"]) == 0
    assert "the simulator failed in its step (episode 0, step 40)" in capsys.readouterr().out


@pytest.mark.parametrize("world", ["CartPole-v1", "Pendulum-v1"])
def test_a_fault_of_the_first_reset_is_played_again_without_actions(
    world: str, tmp_path: Path, capsys: Capture
) -> None:
    kwargs = {"world": world, "where": "reset", "at_episode": 0}
    folder = incident_of(tmp_path / "run", env_kwargs=kwargs)
    assert main(["replay", str(folder), "--trust"]) == 0
    out = capsys.readouterr().out
    assert "The fault happens again" in out
    assert "the simulator failed in its reset (episode 0, step 0)" in out


def test_replay_repeats_the_fault(
    failed: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Any] = []
    monkeypatch.setattr("pdb.post_mortem", faults.append)
    # Each instance counts its own episodes, so that another one fails in its first one.
    text = (failed / "config.yaml").read_text()
    (failed / "config.yaml").write_text(text.replace("at_episode: 1", "at_episode: 0"))
    words = ["replay", str(failed / "incidents" / "001")]
    assert main(words) == 2
    assert "Add --trust if you trust that folder" in capsys.readouterr().err
    assert main([*words, "--trust", "--debug"]) == 0

    out = capsys.readouterr().out
    assert "The fault happens again" in out
    assert "step of episode 1" in out
    assert "the simulator failed in its step (episode 0, step 3)" in out

    [innermost] = faults
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    assert innermost.tb_frame.f_code.co_name == "_fail_if"


def test_replay_makes_the_environment_with_its_number_and_wrappers(
    tmp_path: Path, capsys: Capture
) -> None:
    """The factory makes only the second environment of the second sampler one that fails; a wrapper fails with it."""
    world = {"env_id": "worlds.asking:numbered_failing", "env_kwargs": {}, "envs_per_sampler": 2}
    with Notes() as notes:
        folder = incident_of(tmp_path / "run", **world, wrappers=("worlds.asking:Doubled",))
    assert any(note.endswith(f"dppo replay {folder} --trust") for note in notes.texts)
    assert main(["replay", str(folder), "--trust"]) == 0
    assert "RuntimeError: 1 1 failed" in capsys.readouterr().out


def test_a_fault_that_does_not_follow_from_seed_and_actions_is_said_to(
    failed: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = shutil.copytree(failed, tmp_path / "run")
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("at_step: 3", "at_step: 99"))
    assert main(["replay", str(run / "incidents" / "001"), "--trust"]) == 1
    assert capsys.readouterr().out.startswith("No fault in 3 steps")


def test_incidents_of_a_run_that_goes_on_are_bounded_and_can_be_replayed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "MAX_INCIDENTS", 2)
    bad = {"obs": [float("nan")] * 2, "episodes": list(range(9))}
    config = settings(tmp_path / "run", env_id="worlds.faulty:Faulty", env_kwargs=bad, **REBUILD)
    with Notes() as notes:
        result = dppo.train(config)
    assert sum(result.incidents.values()) > 2

    first, second = sorted((tmp_path / "run" / "incidents").iterdir())
    assert first.name == "001"
    assert second.name == "002"
    assert any(f"dppo replay {second} --trust" in text for text in notes.texts)
    assert main(["replay", str(second), "--trust"]) == 0
    assert "nan" in capsys.readouterr().out


def test_the_incident_that_ends_a_run_is_written_after_the_last_of_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More faults than folders, in the iteration that exceeds env_faults."""
    monkeypatch.setattr(incidents, "MAX_INCIDENTS", 2)
    bad = {"obs": [float("nan")] * 2, "episodes": list(range(9))}
    config = settings(
        tmp_path / "run",
        env_id="worlds.faulty:Faulty",
        env_kwargs=bad,
        **REBUILD | {"env_faults": "2/h"},
    )
    with pytest.raises(EnvironmentFault):
        dppo.train(config)
    paths = sorted(tmp_path.glob("run/incidents/*/incident.json"))
    endings = [json.loads(path.read_text())["ended_after"] for path in paths]
    assert endings == [None, None, 0]


class Odd(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that raises once, with the name of a file that is no Unicode in the text."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 5:
            raise ValueError("cannot read frame\udcff.bin")
        return self.env.step(action)


def test_a_message_that_is_no_unicode_ends_no_run_and_a_folder_with_a_space_is_quoted(
    tmp_path: Path,
) -> None:
    config = settings(tmp_path / "my run", env_id=Odd, env_kwargs={}, **REBUILD)
    with Notes() as notes:
        result = dppo.train(config)
    assert result.stopped_by is None
    folder = tmp_path / "my run" / "incidents" / "001"
    report = (folder / "report.txt").read_text()
    assert r"ValueError: cannot read frame\udcff.bin" in report
    lines = "".join(notes.texts).splitlines()
    assert all(line.isprintable() for line in lines)
    [text, *_] = [text for text in notes.texts if f"env_raised: see {folder}" in text]
    assert shlex.split(text.rpartition(": ")[2]) == ["dppo", "replay", str(folder), "--trust"]


KINDS = {"ValueError": "env_raised", "invalid": "bad_step"}


@pytest.mark.parametrize("error", KINDS)
def test_the_fault_that_ends_a_run_has_the_kind_of_one_that_does_not(
    error: str, tmp_path: Path
) -> None:
    config = make_config({"env_id": "CartPole-v1"})
    writer = IncidentWriter(tmp_path, config, is_resumed=True)
    fault = EnvFault("step", error, "", 0)
    ending = EnvironmentFault("failed", "", fault)
    writer.on_end(None, ending)
    file = tmp_path / "incidents" / "001" / "incident.json"
    text = file.read_text()
    incident = json.loads(text)
    assert incident["kind"] == KINDS[error]


def test_a_fault_of_an_iteration_that_is_repeated_is_written_once(tmp_path: Path) -> None:
    config = make_config({"env_id": "CartPole-v1"})
    fault = EnvFault("step", "ValueError", "", 0, episode=4, seed=3, step=2)
    first = Incident(IncidentKind.ENV_RAISED, "first", fault=fault)
    IncidentWriter(tmp_path, config, is_resumed=False).on_incident(first)

    resumed = IncidentWriter(tmp_path, config, is_resumed=True)
    resumed.on_incident(first)
    folder = tmp_path / "incidents"
    assert len([*folder.iterdir()]) == 1

    resumed.on_incident(Incident(IncidentKind.ENV_RAISED, "second", fault=fault))
    assert len([*folder.iterdir()]) == 2


FORGED = {
    "deep": "[" * 10**5,
    "none": '{"actions": null, "message": "\\u001b[2J"}',
    "ragged": '{"actions": [1, [2]], "dtype": "int64", "seed": 1, "episode": 1}',
    "object": '{"actions": [1], "dtype": "object", "seed": 1, "episode": 1}',
    "seed": '{"actions": [1], "dtype": "int64", "seed": "\\u001b", "episode": 1}',
}


@pytest.mark.parametrize("content", ["a pipe", "a terabyte", *FORGED])
def test_a_forged_incident_is_refused(
    content: str, failed: Path, tmp_path: Path, capsys: Capture
) -> None:
    """tests/records/test_folder_files.py has links."""
    run = shutil.copytree(failed, tmp_path / "run")
    folder = run / "incidents" / "001"
    path = folder / "incident.json"
    path.unlink()
    if content == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text(FORGED.get(content, ""))
    if content == "a terabyte":
        os.truncate(path, 2**40)
    assert main(["replay", str(folder), "--trust"]) == 2

    text = capsys.readouterr().err
    assert "incident.json: " in text
    assert "\x1b" not in text
    assert len(text.splitlines()) == 1


def test_a_folder_that_leads_elsewhere_is_refused(
    failed: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = shutil.copytree(failed, tmp_path / "run")
    folder = run / "incidents" / "001"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert main(["replay", str(folder), "--trust"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
