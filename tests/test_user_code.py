"""The folder of the user: it was deleted, or its files hide modules of Python; and what its modules find elsewhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders import tiny_run
from commandline import Command
from remedies import executes

import dppo
from dppo import user_code
from dppo.__main__ import main
from dppo.commands import discovery
from dppo.errors import ConfigError, EnvironmentFault
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.pickling import packed_model, unpacked_model
from dppo.user_code import hidden_by, hiding_files, in_a_line

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that was deleted."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@executes("user_code.py: Change to another one (cd)")
def test_a_deleted_current_folder_is_named_and_help_works(
    deleted: None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("train", "eval", "doctor", "report"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])

    capsys.readouterr()
    words = [
        "train",
        "CartPole-v1",
        "--num-steps",
        "8",
        "--total-timesteps",
        "64",
        "--progress",
        "off",
    ]
    words += ["--run-dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        "dppo train: the current folder was deleted. Change to another one (cd)"
    )
    with pytest.raises(ConfigError, match="the current folder was deleted"):
        dppo.train(tiny_run(tmp_path / "run"))

    monkeypatch.chdir(tmp_path)
    assert main(words) == 0


def test_files_that_hide_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numbers.py", "yaml.py", "test.py", "mysim.py", "types.txt"):
        (tmp_path / name).touch()
    (tmp_path / "filelock").mkdir()
    (tmp_path / "filelock" / "__init__.py").touch()
    (tmp_path / "copy").mkdir()  # no package
    assert [path.name for path in hiding_files([str(tmp_path), "/no/such/folder"])] == [
        "filelock",
        "numbers.py",
        "yaml.py",
    ]
    assert hidden_by(str(tmp_path)) == ""

    module = ModuleType("yaml")
    module.__file__ = str(tmp_path / "yaml.py")
    monkeypatch.setitem(sys.modules, "yaml", module)
    assert hidden_by(str(tmp_path)).startswith(
        f"{tmp_path}/yaml.py hides the module yaml of Python or of a package."
    )


@executes("user_code.py: Rename it, or use another folder.")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbers", "yaml", "filelock"])
def test_a_file_that_hides_a_module_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("API_KEY = 'x'\n")
    words = ["train", "CartPole-v1", "--num-steps", "8", "--total-timesteps", "64"]
    program = ("-P", "-m", "dppo") if sys.version_info >= (3, 11) else ("-m", "dppo")
    with Command(words, tmp_path, program=program) as command:
        assert command.wait(60) == 2
        assert f"{tmp_path}/{name}.py hides the module {name}" in command.err
        assert "Traceback" not in command.err
    (tmp_path / f"{name}.py").rename(tmp_path / "keys.py")
    with Command(words, tmp_path, program=program) as command:
        assert command.wait(60) == 0


@executes("commands/discovery.py: Correct the package")
@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("email", "AttributeError: module 'email' has no attribute 'main'. Correct the package"),
        ("no_such_package.cli", "ModuleNotFoundError: No module named 'no_such_package'. Correct the package"),
        ("broken_command", "NameError: name 'x' is not defined ({}/broken_command.py, line 1). Correct the package"),
    ],
)  # fmt: skip
def test_a_command_of_another_package_that_cannot_run_is_named_and_the_others_do(
    module: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "broken_command.py").write_text("x\n")
    monkeypatch.syspath_prepend(tmp_path)
    commands = discovery.CORE | {"other": module}
    monkeypatch.setattr(discovery, "command_modules", lambda: commands)
    monkeypatch.setattr("dppo.__main__.command_modules", lambda: commands)
    assert main(["other", "--help"]) == 2
    shown = capsys.readouterr().err
    assert f"dppo other: {module}, which another package adds" in shown
    assert problem.format(tmp_path) in shown


@pytest.mark.parametrize(
    ("module", "source", "summary"),
    [
        ("unfinished", b"def main(", "(its source cannot be read)"),
        ("latin", b"# \xe4", "(its source cannot be read)"),
        ("sys", b"", "(its source cannot be read)"),  # built into Python
        ("no_such_package", b"", "(its package cannot be imported)"),
        ("no_such_package.cli", b"", "(its package cannot be imported)"),
        ("summarized", b"'''`dppo other`: do it.\n\nMore.'''", "Do it."),
    ],
)
def test_a_command_whose_source_cannot_be_read_does_not_end_the_help(
    module: str, source: bytes, summary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source:
        (tmp_path / f"{module}.py").write_bytes(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "command_modules", lambda: {"other": module})
    assert discovery.summary("other") == summary


class WithWords:
    """Unpickled by calling what `__reduce__` returns, as importing a user's module."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (self._code,)


def test_modules_in_other_processes_find_the_command_line_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--speed", "2"])
    packed = packed_model(WithWords("__import__('sys').argv[1:]"))
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=127.0.0.1"])
    hidden: Any = unpacked_model(packed)
    assert hidden == ["--speed", "2"]


def test_a_package_is_installed_with_the_versions_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README: without them, pip may replace NumPy or torch."""
    clone = tmp_path / "my clone"
    for folder in (clone, tmp_path / "lib" / "site-packages"):
        folder.mkdir(parents=True)
    (clone / "constraints.txt").touch()
    (clone / "pyproject.toml").touch()
    python = shlex.quote(sys.executable)
    monkeypatch.setattr(user_code, "PACKAGE", clone / "src" / "dppo")
    command = user_code.pip_install("onnx av")
    assert command == f"{python} -m pip install -c '{clone}/constraints.txt' onnx av"
    monkeypatch.setattr(user_code, "PACKAGE", tmp_path / "lib" / "site-packages" / "dppo")
    assert user_code.pip_install("onnx av") == f"{python} -m pip install onnx av"


def test_a_module_that_exits_at_its_import_in_another_process_is_an_error_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"model: cannot be loaded on node \S+: SystemExit: no licence"
    ):
        unpacked_model(packed_model(WithWords("__import__('sys').exit('no licence')")))


def test_errors_of_imports_and_constructors_name_another_node() -> None:
    actor = PPOActor(b"")
    assert str(actor._sendable(ConfigError("importing mysim failed"))) == "importing mysim failed"
    actor._elsewhere = "n7"
    assert (
        str(actor._sendable(ConfigError("importing mysim failed")))
        == "importing mysim failed\nThis was on node n7; `upload` sends a folder to all nodes."
    )
    fault = EnvironmentFault("it raised", "Traceback ...")
    assert str(actor._sendable(fault)) == str(fault)


SCRIPT = """
import argparse, sys, dppo
import argv_env
if __name__ == "__main__":
    result = dppo.train(dppo.Config(env_id="argv_env:Env", num_samplers=2, num_steps=32, total_timesteps=128,
                        num_actors=argv_env.args.actors, run_dir="run", progress="plain"))
"""
MODULE = """
import argparse, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
parser = argparse.ArgumentParser()
parser.add_argument("--actors", type=int, default=0)
args = parser.parse_args()
class Env(CartPoleEnv):
    pass
"""


@pytest.mark.slow
def test_a_module_that_reads_the_command_line_works_in_actors(tmp_path: Path) -> None:
    (tmp_path / "argv_env.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    with Command(["script.py", "--actors", "1"], tmp_path, program=()) as command:
        assert command.wait(120) == 0
        assert "Done after 128 steps" in command.out


def test_the_place_of_an_error_may_be_in_a_package_whose_name_begins_with_ours() -> None:
    file = f"{user_code.PACKAGE}_plugin/tracker.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("\n1 / 0", file, "exec"))
    assert user_code.place_of(raised.value) == f" ({file}, line 2)"


def test_a_long_message_is_cut_between_words() -> None:
    error = ValueError("set MLFLOW_ALLOW_FILE\nor use a database.")
    assert in_a_line(error) == "ValueError: set MLFLOW_ALLOW_FILE or use a database"
    assert in_a_line(error, 40) == "ValueError: set MLFLOW_ALLOW_FILE (...)"
    without_words = ValueError(f"{{'runtime_env':{'x' * 50}}}")
    assert in_a_line(without_words, 40) == "ValueError: {'runtime_env':xxxxxxx (...)"
