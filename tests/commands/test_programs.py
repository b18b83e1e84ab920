"""A run of a program is continued by the program, and by commands that import its file; both names mean the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import run_as_program
from remedies import executes

import dppo
from dppo.__main__ import main
from dppo.config.programs import imported_name, named_as_now
from dppo.errors import ConfigError

PROGRAM = """
import gymnasium as gym
import dppo
from torch import nn


def make():
    return gym.make("CartPole-v1")


def same(env):
    return env


class Network(nn.Module):
    def __init__(self, spaces, head_size):
        super().__init__()
        self.head = nn.Linear(spaces.obs.shape[0], head_size)
        self.value = nn.Linear(spaces.obs.shape[0], 1)

    def forward(self, obs):
        return self.head(obs), self.value(obs).squeeze(-1)


class Stop(dppo.Observer):
    def on_iteration(self, row):
        return True


if __name__ == "__main__":
    config = dppo.Config(
        env_id=make, wrappers=[same], model=Network, num_samplers=1, num_steps=32, total_timesteps=64, run_dir="run"
    )
    dppo.train(config, observers=[Stop()])
"""


@executes("user_code.py: Move it to a module of its own, and name it module:{}")
def test_a_run_of_a_program_is_resumed_and_branched_with_the_commands_of_the_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = subprocess.run(
        [sys.executable, program], check=True, timeout=120, capture_output=True, text=True
    )
    run = tmp_path / "run"
    assert f"Resume with: dppo.train(config, resume='{run}'), in the program that" in done.stdout

    replay = ["replay", "run", "--episode", "1", "--trust"]
    assert main(replay) == 2
    assert "make was defined in a program" in capsys.readouterr().err
    for words in (["--resume", "run", "--branch", "other"], ["--resume", "run"]):
        assert main(["train", *words, "--trust"]) == 2
        refused = capsys.readouterr().err
        assert f"run: make and Network and same were defined in {program}" in refused
        command = refused.partition("dppo train ")[2].partition(". That imports")[0]
        flags = "--model mine:Network --wrappers mine:same"
        assert command == f"mine:make {' '.join(words)} {flags}"
        assert main(["train", *command.split(), "--progress", "off"]) == 0
        assert dppo.load_policy(words[-1], trust=True).state["global_step"] == 64
    assert main(replay) == 0  # the run has the names of the module now
    sys.modules.pop("mine", None)


@pytest.fixture
def run_of_program(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a program, mine.py, with its run; it is the current one."""
    run_as_program(PROGRAM.replace("wrappers=[same], ", ""), desk / "mine.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return desk


@executes(
    "config/programs.py: Pass what its file defines: from {} import {}; dppo.evaluate({}{})",
    "records/files/run_folder.py: {}: contains a run already. Continue it with `{}`, or use another folder",
)
def test_messages_within_a_program_name_calls_of_python(run_of_program: Path) -> None:
    sys.path.insert(0, str(run_of_program))
    with pytest.raises(ConfigError, match="which is another program") as refused:
        dppo.evaluate("run", trust=True, episodes=1)
    message = str(refused.value)
    assert "--" not in message
    statements = message.partition("Pass what its file defines: ")[2].partition(" That imports")[0]
    names: dict[str, Any] = {"dppo": dppo}
    exec(statements.removesuffix("."), names)
    assert {"make", "Network"} <= names.keys()

    config = dppo.Config(
        env_id=names["make"],
        model=names["Network"],
        num_samplers=1,
        num_steps=32,
        total_timesteps=64,
        run_dir=Path("run"),
        progress="off",
    )
    with pytest.raises(ConfigError, match="contains a run already") as refused:
        dppo.train(config)
    call = str(refused.value).partition("`")[2].partition("`")[0]
    assert call == "dppo.train(config, resume='run')"
    result = eval(call, {"dppo": dppo, "config": config})
    assert result.global_step == 64
    sys.modules.pop("mine", None)


@executes("config/programs.py: Leave out the episodes of the model card: {}")
def test_an_export_of_the_run_of_a_program_names_the_export_that_works(
    run_of_program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    target = run_of_program / "exported"
    typed = ["export", "run", f"{target}/", "--model", "mine:Network", "--trust"]
    assert main(typed) == 2
    refused = capsys.readouterr().err
    words = refused.partition("model card: ")[2].partition("dppo ")[2].rstrip(".\n").split()
    assert words == [*typed, "--episodes", "0"]
    assert main(words) == 0
    assert (target / "policy.onnx").exists()
    sys.modules.pop("mine", None)


@executes("envs/names.py: Pass a file of settings as --config {}")
def test_a_file_of_settings_is_no_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = "env_id: CartPole-v1\nnum_samplers: 1\nnum_steps: 32\ntotal_timesteps: 32\n"
    Path("mine.yaml").write_text(settings, encoding="utf8")
    assert main(["train", "mine.yaml"]) == 2
    flags = capsys.readouterr().err.partition("Pass a file of settings as ")[2].strip(".\n").split()
    assert main(["train", *flags, "--progress", "off"]) == 0


@executes(
    "config/programs.py: Pass it in Python: dppo.train(config, resume=...) or dppo.evaluate(run, env=...)"
)
def test_a_run_of_a_notebook_is_continued_in_python(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_as_program(PROGRAM.replace("wrappers=[same], ", ""))
    for command in (["train", "--resume", "run"], ["eval", "run"]):
        assert main([*command, "--trust"]) == 2
        assert "which no command can import. Pass it in Python: " in capsys.readouterr().err
    assert dppo.evaluate("run", names["make"], 1, model=names["Network"]).returns


@pytest.mark.parametrize(
    ("named", "program", "name"),
    [
        ("__main__:make", "/a/mine.py", "mine:make"),
        ("__main__:make", None, "__main__:make"),
        ("other:make", "/a/mine.py", "other:make"),
        (("__main__:A", "other:B"), "/a/mine.py", ["mine:A", "other:B"]),
        (None, "/a/mine.py", None),
    ],
)
def test_a_definition_of_a_program_has_the_name_of_its_file(
    named: Any, program: str | None, name: Any
) -> None:
    assert imported_name(named, program) == name


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (("__main__:make", "/a/mine.py"), ("mine:make", "/b/__main__.py"), True),
        (("mine:make", "/b/__main__.py"), ("__main__:make", "/a/mine.py"), True),
        (("__main__:make", "/a/mine.py"), ("mine:other", None), False),
        (("__main__:make", "/a/mine.py"), ("__main__:make", "/a/other.py"), True),
        (("__main__:make", None), ("mine:make", None), False),
    ],
)
def test_names_of_the_same_definition_are_no_change_on_resume(
    before: tuple[str, Any], now: tuple[str, Any], is_same: bool
) -> None:
    settings = {"model": before[0], "gamma": 0.9}
    changed = {"model": now[0], "gamma": 0.5}
    renamed = named_as_now(settings, before[1], changed, now[1])
    assert (renamed["model"] == now[0]) == is_same
    assert renamed["gamma"] == 0.9
