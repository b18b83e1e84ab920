"""Remedies for command lines: each is typed as the message says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from dppo.__main__ import main
from remedies.commands import COMMANDS
from remedies.running import pattern_of, problem

TESTS = Path(__file__).resolve().parents[1]
FINE = "remedies.worlds:Fine"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders that the words name."""
    parent = tmp_path_factory.mktemp("commands")
    assert problem(parent, env_id=FINE, trace_hashes=True) == ""
    assert problem(parent, env_id=FINE) == ""
    full = parent / "full"
    full.mkdir()
    (full / "file").write_text("5")
    (full / "settings.yaml").write_text("seed: 3")
    young = parent / "young"
    young.mkdir()
    settings = parent / "run0" / "config.yaml"
    (young / "config.yaml").write_bytes(settings.read_bytes())
    named = {"RUN": parent / "run0", "UNTRACED": parent / "run1"}
    named["FULL"] = full
    named["YOUNG"] = young
    return named


def typed(words: str, folders: dict[str, Path], tmp_path: Path) -> list[str]:
    for name, folder in {**folders, "TMP": tmp_path}.items():
        words = re.sub(rf"\b{name}\b", str(folder), words)
    return shlex.split(words)


def cases() -> Iterator[ParameterSet]:
    """Yield the rows; further ways to carry out a remedy, and what takes long, are slow tests."""
    remedies_so_far = set[str]()
    for remedy, words, command, otherwise in COMMANDS:
        slow = remedy in remedies_so_far or command.startswith(("export RUN TMP", "plot", "report"))
        remedies_so_far.add(remedy)
        marks = [pytest.mark.slow] if slow else []
        yield pytest.param(
            remedy, words, command, otherwise, id=f"{remedy} {command[:8]}", marks=marks
        )


@pytest.mark.parametrize(("remedy", "words", "command", "otherwise"), list(cases()))
def test_a_command_that_is_refused_works_as_the_message_says(
    remedy: str,
    words: str,
    command: str,
    otherwise: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for word, package in (("--video", "av"), ("export", "onnx")):
        if word in command.split():
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TESTS))
    assert main(typed(words, folders, tmp_path)) in (1, 2)
    message = capsys.readouterr().err
    assert re.search(pattern_of(remedy.partition(": ")[2], as_typed=True), message), message
    code = main(typed(command, folders, tmp_path))
    after = capsys.readouterr().err
    assert code == (2 if otherwise else 0), after
    assert otherwise in after
