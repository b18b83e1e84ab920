"""A Ray that starts here: in a folder that it can use, for one training at a time; and the versions of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from commandline import Command
from remedies import executes

from dppo.errors import ConfigError
from dppo.transports.ray import folder
from dppo.transports.ray.connecting import claimed, versions_remedy
from dppo.transports.ray.folder import LONGEST, usable_folder

LONG = f"/tmp/{'slurm_job_of_somebody_with_a_long_name' * 2}"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)


def uses(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", path)


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        (LONG, f"has 81 bytes, and the paths of Ray's sockets leave room for {LONGEST}"),
        ("/tmp/größe", "has spaces, quotes or letters beyond ASCII, with which Ray cannot start"),
        ("/tmp/o'c x", "has spaces, quotes or letters beyond ASCII, with which Ray cannot start"),
    ],
)
def test_a_folder_that_ray_cannot_use_is_replaced_with_a_line(
    path: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses(monkeypatch, path)
    notes = list[str]()
    with usable_folder(notes.append):
        assert os.environ["RAY_TMPDIR"] == "/tmp"
    assert "RAY_TMPDIR" not in os.environ
    assert notes == [f"TMPDIR={path}: {fact}. Ray uses /tmp; RAY_TMPDIR names another folder."]


def test_a_folder_that_ray_can_use_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    uses(monkeypatch, "/tmp/" + (LONGEST - 5) * "x")
    with usable_folder(pytest.fail):
        assert "RAY_TMPDIR" not in os.environ


def test_a_temporary_folder_that_python_leaves_out_is_that_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is full, for example: checks and messages are about the folder that Ray uses."""
    monkeypatch.setenv("TMPDIR", "/tmp/full")
    assert tempfile.gettempdir() != "/tmp/full"
    assert folder.ray_folder() == "/tmp/full"


@executes("transports/ray/environment.py: Set PYTHONUTF8=1, or use `num_actors=0`.")
@pytest.mark.parametrize(("utf8", "words"), [("0", "Set PYTHONUTF8=1"), ("1", "")])
def test_a_python_of_ascii_is_refused_beside_a_word_with_other_letters(
    utf8: str, words: str
) -> None:
    code = "from dppo.transports.ray.environment import check_encoding; check_encoding()"
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
    ended = subprocess.run(
        [sys.executable, "-c", code, "läufe"],
        check=False,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert words in ended.stderr
    assert bool(ended.returncode) == bool(words)


@executes("transports/ray/folder.py: Set RAY_TMPDIR to a folder with a plain name")
def test_a_folder_that_the_user_has_named_and_one_without_a_substitute_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses(monkeypatch, LONG)
    monkeypatch.setattr(folder, "PLACES", ("/no/such/place",))
    with pytest.raises(
        ConfigError,
        match=f"^TMPDIR={LONG}: .*/no/such/place cannot be written. Set RAY_TMPDIR to a",
    ):
        usable_folder(print).__enter__()

    monkeypatch.setenv("RAY_TMPDIR", f"{LONG}/of/mine")
    with pytest.raises(
        ConfigError,
        match=f"^RAY_TMPDIR={LONG}/of/mine: has 89 bytes, .* of at most {LONGEST} bytes",
    ):
        usable_folder(print).__enter__()

    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    with usable_folder(pytest.fail):
        pass


@pytest.mark.slow
def test_ray_starts_where_tmpdir_is_too_long_for_its_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("slurm_job_of_somebody" * 4)
    long.mkdir()
    sizes = "--num-actors 1 --num-steps 8 --total-timesteps 64"
    words = f"train CartPole-v1 {sizes} --run-dir run --progress plain".split()
    with Command(words, tmp_path, TMPDIR=str(long)) as command:
        assert command.wait(120) == 0
        assert (
            f"note: TMPDIR={long}: has {len(str(long))} bytes, and the paths of Ray's sockets"
            in command.out
        )


@executes("transports/ray/connecting.py: Train one after the other")
def test_a_training_beside_one_that_has_opened_ray_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dppo.transports.ray.connecting.is_connected", lambda: False)
    refusals = list[str]()

    def other() -> None:
        try:
            with claimed():
                pass
        except ConfigError as error:
            refusals.append(str(error))

    def run_other() -> list[str]:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return refusals

    with claimed():
        with claimed():  # in the same thread, such as an evaluation of a user's observer
            pass
        assert run_other()[0].startswith(
            "num_actors: another training in this process has started Ray"
        )
        refusals.clear()
    assert run_other() == []

    # the user has called ray.init()
    monkeypatch.setattr("dppo.transports.ray.connecting.is_connected", lambda: True)
    with claimed():
        assert run_other() == []


MISMATCH = """RuntimeError: Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on 10.77.0.2:0 was started with:
    Ray: {ray}
    Python: {python}
"""


@pytest.mark.parametrize(
    ("ray", "python", "steps"),
    [
        (
            "2.55.1",
            "3.11.7",
            "install the cluster's Ray here, `pip install ray==2.60.0`, or 2.55.1 on its nodes.",
        ),
        (
            "2.60.0",
            "3.12.1",
            "run this process with Python 3.11.7 as the cluster, or the cluster with 3.12.1.",
        ),
        (
            "2.60.0",
            "3.11.9",
            "Python is 3.11.9 here and 3.11.7 in the cluster: these two work together, if ",
        ),
    ],
)
def test_versions_that_differ_are_told_with_what_to_install_where(
    ray: str, python: str, steps: str
) -> None:
    remedy = versions_remedy(MISMATCH.format(ray=ray, python=python))
    assert remedy.startswith(f"The versions differ: {steps}")
    assert versions_remedy("ConnectionError: nobody answers") == ""
