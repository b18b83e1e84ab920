"""The versions in the launcher's `.venv`, which another installation may have changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dppo import __main__ as program
from dppo.commands import versions
from dppo.commands.versions import CORE, other_versions

PINS = "gymnasium==1.4.0\nnumpy==2.2.6 ; python_full_version < '3.11'\nnumpy==2.4.6 ; x\nray==2.60.0\ntorch==2.13.0\n"
PINNED = dict(zip(CORE, ("1.4.0", "2.4.6", "2.60.0", "2.13.0+cpu"), strict=True))


@pytest.mark.parametrize(
    ("changed", "says", "refuses"),
    [
        ({}, None, False),
        ({"numpy": "2.2.6"}, None, False),
        (
            {"gymnasium": "0.28.1"},
            "gymnasium 0.28.1 instead of 1.4.0; dppo does not work with gymnasium of that",
            True,
        ),
        (
            {"torch": "2.12.1+cu130"},
            r"torch 2.12.1+cu130 instead of 2.13.0; it is tested with the latter",
            False,
        ),
        (
            {"numpy": "1.20.0", "ray": "2.61.0"},
            "numpy 1.20.0 instead of 2.2.6 or 2.4.6, ray 2.61.0 instead of",
            True,
        ),
    ],
)
def test_packages_that_are_not_as_installed_are_named_with_the_repair(
    changed: dict[str, str], says: str | None, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "constraints.txt").write_text(PINS)
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(versions, "version", lambda name: (PINNED | changed)[name])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert other_versions() is None  # not made by the launcher

    (tmp_path / ".venv" / ".dppo-ready").touch()
    assert program.main(["presets"]) == (2 if refuses else 0)
    err = capsys.readouterr().err
    assert ("instead of" in err) == (says is not None)
    if says is not None:
        assert says in err
        assert (
            f"cd {tmp_path} && .venv/bin/python -m pip install -c constraints.txt -e '.[test]'"
            in err
        )
