"""Commands that are printed begin as the program was called, everywhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import trees

from dppo import invocation
from dppo.__main__ import main
from dppo.commands.discovery import command_modules
from dppo.invocation import VARIABLE, as_called, command, program, take_called_as, typed_path

BIN = Path(sys.executable).parent
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def forget(monkeypatch: Patch) -> None:
    monkeypatch.setattr(invocation, "_called_as", [])


def test_all_commands_of_dppo_are_recognized_in_texts() -> None:
    modules = command_modules().items()
    ours = {name for name, module in modules if module.startswith("dppo.")}
    assert set(invocation.NAMES.split("|")) == ours


@pytest.mark.parametrize(
    ("called_as", "argv0", "path", "printed"),
    [
        ("./dppo", "/clone/.venv/bin/dppo", "/usr/bin", "./dppo"),
        ("/my clone/dppo", "/my clone/.venv/bin/dppo", "/usr/bin", "'/my clone/dppo'"),
        ("", str(BIN / "dppo"), f"/usr/bin:{BIN}", "dppo"),
        ("", "program.py", f"/usr/bin:{BIN}", "dppo"),
        ("", ".venv/bin/dppo", "/nowhere", ".venv/bin/dppo"),
        ("", "program.py", "/nowhere", f"{sys.executable} -m dppo"),
        ("", "program.py", "only python", "python -m dppo"),
    ],
)
def test_the_program_is_what_the_user_can_type(
    called_as: str, argv0: str, path: str, printed: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    if path == "only python":
        (tmp_path / "python").symlink_to(sys.executable)
        path = str(tmp_path)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv(VARIABLE, called_as)
    monkeypatch.setattr(sys, "argv", [argv0])
    take_called_as()
    assert program() == printed
    assert command("eval", "my run") == f"{printed} eval 'my run'"
    assert VARIABLE not in os.environ  # so that no process of this one takes it for its own

    monkeypatch.setenv(VARIABLE, typed_path())  # as `train --seeds` hands it down
    monkeypatch.setattr(sys, "argv", ["/site-packages/dppo/__main__.py"])
    take_called_as()
    assert program() == printed


def test_a_launcher_that_the_path_leads_to_is_called_by_its_name(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "dppo").write_text("#!/bin/sh\n")
    (tmp_path / "dppo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "dppo"))
    take_called_as()
    assert program() == "dppo"


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def without_commands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes within `node` that hold no text for users, or one to which `as_called` is applied."""
    if isinstance(node, ast.Expr):
        yield node.value
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
        yield node.body[0]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "as_called":
        yield from node.args
    is_constant = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper()
    is_keyword = isinstance(node, ast.keyword) and node.arg in ("prog", "description", "own")
    if is_constant or is_keyword:
        assert isinstance(node, ast.Assign | ast.keyword)
        yield from ast.walk(node.value)


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module, but for docstrings and texts to which `as_called` is applied."""
    nodes = list(ast.walk(tree))
    skipped = {id(inner) for node in nodes for inner in without_commands(node)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in skipped:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_text_has_a_command_that_is_written_out() -> None:
    """Use `command(...)`, or `as_called` for a text that is shown later."""
    written_out = re.compile(rf"(?<![/.\w-])dppo ({'|'.join(command_modules())})\b(?!:)")
    written_commands = [
        f"{path}:{line}: {text}"
        for path, tree in trees().items()
        for line, text in strings(tree)
        if written_out.search(text)
    ]
    assert written_commands == []


def test_help_usage_and_errors_say_how_it_was_called(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "./dppo")
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert "usage: ./dppo COMMAND" in shown
    assert "  ./dppo train CartPole-v1\n" in shown
    assert main(["trian"]) == 2
    assert "`./dppo --help` lists them" in capsys.readouterr().err
    assert main(["plot"]) == 2
    assert "For example: ./dppo plot runs/a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--help"])

    shown = capsys.readouterr().out
    assert "usage: ./dppo train ENV_ID" in shown
    assert "`./dppo presets`" in shown

    without_command = "is not a dppo checkpoint: see dppo/errors.py"
    assert as_called(without_command) == without_command


def test_a_command_is_replaced_once_by_the_words_of_a_module(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dppo.invocation.program", lambda: "python -m dppo")
    text = as_called("Run dppo train ENV_ID.")
    assert text == as_called(text) == "Run python -m dppo train ENV_ID."
    assert main(["replay", "a", "b"]) == 2
    assert "'b': python -m dppo replay takes one RUN" in capsys.readouterr().err


def test_a_run_says_how_to_go_on_with_the_words_of_the_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv(VARIABLE, "../dppo")
    sizes = "--num-samplers 1 --num-steps 8 --total-timesteps 8 --num-actors 0 --progress plain"
    words = f"train CartPole-v1 {sizes} --run-dir {tmp_path / 'run'}"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "../dppo eval " in out
    rest_of_output = out.replace("../dppo", "LAUNCHER")
    assert not re.search(r"(?<![/.\w-])dppo (?!:)(eval|train|report)", rest_of_output)


def test_the_variable_does_not_reach_processes_that_a_command_starts(tmp_path: Path) -> None:
    code = "import os; print([name for name in os.environ if name.startswith('DPPO_CALLED')])"
    env = os.environ | {VARIABLE: "./dppo"}
    starter = "import subprocess, sys\nfrom dppo.__main__ import main\nmain(['--version'])\n"
    starter += f"subprocess.run([sys.executable, '-c', {code!r}])"
    shown = subprocess.run(
        [sys.executable, "-c", starter], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert shown.endswith("[]\n")


def test_closed_standard_streams_are_the_null_device_also_of_programs(tmp_path: Path) -> None:
    look = f"(readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2) >{tmp_path}/streams; :"
    code = f"import os; from dppo.__main__ import main; main(['version']); os.system({look!r})"
    command = f"{shlex.join([sys.executable, '-c', code])} <&- >&- 2>&-"
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert (tmp_path / "streams").read_text().split() == [os.devnull] * 3
