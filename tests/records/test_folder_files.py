"""A run folder, perhaps a stranger's, changes no file elsewhere, and nothing in it makes a command wait for ever."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
from builders import tiny_run
from commandline import Typed

import dppo
from dppo.errors import CheckpointError, CheckpointNotWritten, ConfigError
from dppo.files import open_file
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.lock import locked
from dppo.records.files.run_files import FILE, PARTS, check_run_files
from dppo.records.files.run_folder import open_run

FILES = [name for name, part in PARTS.items() if part.kind == FILE and "*" not in name]
EVENTS = "events.out.tfevents.0000000001.host"

pytestmark = pytest.mark.timeout(120)  # a command that waits for a pipe would wait for ever


def settings(run_dir: Path) -> dppo.Config:
    return tiny_run(run_dir, checkpoint_interval_s=0)


class Hook(dppo.Observer):
    """Acts after the first iteration, and may stop the run."""

    def __init__(self, action: Callable[[], None] = lambda: None, *, stop: bool = False) -> None:
        self.action = action
        self.stop = stop

    def on_iteration(self, row: dict[str, float]) -> bool:
        if row["iteration"] == 1:
            self.action()
        return self.stop


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with some iterations left."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    dppo.train(settings(run), observers=[Hook(stop=True)])
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def precious(stopped: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a folder of files that must not change."""
    folder = Path(shutil.copytree(stopped / "checkpoints", tmp_path / "precious"))
    (folder / "file").write_text("precious\n" * 100)

    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    before = content()
    yield folder
    assert content() == before


Trick = Callable[[Path, Path], None]


def put_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious if path.name == "checkpoints" else precious / "file")


def put_dangling_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious / "new")


def put_pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path, precious: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/{path.name}")  # the path itself may be too long
        os.close(here)


TRICKS: dict[Trick, str] = {
    put_link: "is a symbolic link, not",
    put_dangling_link: "is a symbolic link, not",
    put_pipe: "is a pipe, not",
    put_socket: "is a socket, not",
}


def replace(path: Path, trick: Trick, precious: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    trick(path, precious)


@pytest.mark.parametrize(
    ("part", "trick"),
    [
        *((part, put_link) for part in (*FILES, EVENTS, "checkpoints")),
        *((FILES[0], trick) for trick in (put_dangling_link, put_pipe, put_socket)),
        ("checkpoints", put_pipe),
    ],
)
def test_a_run_folder_with_a_part_that_is_not_its_own_is_refused(
    part: str, trick: Trick, run: Path, precious: Path, desk: Path, refused: Typed
) -> None:
    replace(run / part, trick, precious)
    replace(desk / "new" / part, trick, precious)
    before = sorted(desk.rglob("*"))
    kind = "folder" if part == "checkpoints" else "regular file"
    for line in (
        "train --resume run",
        "train CartPole-v1 --resume auto --run-dir run",
        "train --resume run --branch branch",
        "eval run --episodes 1",
        "train CartPole-v1 --total-timesteps 256 --run-dir new",
    ):
        message = refused(line)
        assert f"{part}: {TRICKS[trick]} a {kind}" in message, line
        assert "Move it away" in message
        assert sorted(desk.rglob("*")) == before


@pytest.mark.parametrize(
    ("part", "trick"),
    [*product(("learning_curve.png", "checkpoints"), (put_link, put_pipe)), (EVENTS, put_link)],
)
def test_a_part_that_is_replaced_during_the_run_changes_no_file_elsewhere(
    part: str, trick: Trick, precious: Path, tmp_path: Path, pictures: None
) -> None:
    """The picture is renamed to its name, and the events have a new one."""
    run = tmp_path / "run"
    hook = Hook(lambda: replace(run / part, trick, precious))
    refused = pytest.raises(CheckpointNotWritten, match=r"checkpoints.* could not be written")
    with refused if part == "checkpoints" else nullcontext():
        dppo.train(settings(run), observers=[hook])
    if part == "learning_curve.png":
        assert (run / part).read_bytes().startswith(b"\x89PNG")
        assert not (run / part).is_symlink()


@pytest.mark.parametrize("trick", TRICKS)
def test_the_lock_and_the_name_of_the_best_checkpoint_follow_no_link_and_wait_for_nothing(
    trick: Trick, precious: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trick(tmp_path / "run.lock", precious)
    with pytest.raises(CheckpointError, match=r"run\.lock: is a "):
        locked(tmp_path).__enter__()
    folder = tmp_path / "checkpoints"
    replace(folder / "best.json", trick, precious)
    empty = checkpoints.Checkpoint({}, {})
    checkpoints.save(folder, 1, empty, keep=checkpoints.Keep(1), score=1.0)
    assert f"best.json: cannot be deleted or replaced: {TRICKS[trick]}" in caplog.text


def test_a_new_event_file_has_a_name_after_all_links_of_such_names(
    run: Path, precious: Path
) -> None:
    from dppo.records.metrics.tensorboard import _new_event_file

    later = run / f"events.out.tfevents.9999999990.{socket.gethostname()}"
    later.symlink_to(precious / "new")
    assert _new_event_file(run).name == later.name.replace("9990", "9991")


def test_a_run_folder_may_be_reached_through_a_link(tmp_path: Path, pictures: None) -> None:
    place = tmp_path / "disk" / "a"
    place.mkdir(parents=True)
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "disk" / "b").symlink_to("a")
    run = tmp_path / "runs" / "b"
    dppo.train(settings(run), observers=[Hook(stop=True)])
    assert dppo.train(settings(run), resume=run).iterations == 3
    dppo.evaluate(run, episodes=1)
    assert (place / "learning_curve.png").is_file()
    check_run_files(place)


def test_rows_are_not_appended_to_the_other_name_of_a_hard_link(run: Path, tmp_path: Path) -> None:
    """As in a snapshot made with `cp -al`."""
    os.link(run / "metrics.jsonl", tmp_path / "snapshot")
    before = (tmp_path / "snapshot").read_bytes()
    assert len(dppo.train(settings(run), resume=run).metrics) == 2
    assert (tmp_path / "snapshot").read_bytes() == before
    assert (run / "metrics.jsonl").read_bytes().startswith(before)


def test_a_hard_link_in_place_of_the_lock_is_refused(
    run: Path, precious: Path, tmp_path: Path
) -> None:
    os.link(precious / "file", run / "run.lock")
    with pytest.raises(
        CheckpointError, match=r"run.lock: is a hard link, not a file with a single name\. Move it"
    ):
        open_run(settings(run), run).__enter__()
    os.link(precious / "file", tmp_path / "run.lock")
    with pytest.raises(CheckpointError, match=r"run.lock: is a hard link"):
        open_run(settings(tmp_path), None).__enter__()
    (run / "run.lock").unlink()
    with locked(run):
        pass


def test_a_lock_of_deeply_nested_json_names_nobody(run: Path) -> None:
    with locked(run):
        (run / "run.lock").write_text("[" * 3000)
        with pytest.raises(ConfigError, match=r"in use by process \? on \? since \?"), locked(run):
            pass


def test_a_file_replaced_between_check_and_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    regular = os.lstat(tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    monkeypatch.setattr(os, "lstat", lambda path: regular)
    assert stat.S_ISREG(os.lstat(tmp_path / "pipe").st_mode)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"is a pipe|symbolic links"):
            open_file(tmp_path / name)
