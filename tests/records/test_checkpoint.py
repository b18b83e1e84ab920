"""Checkpoints survive faults at every step of writing, and damaged ones are never loaded."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import re
import shutil
import stat
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from remedies import executes

from dppo.errors import CheckpointError, CheckpointNotWritten
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files import disk as disk_files
from dppo.records.files import sealed
from dppo.records.files.checkpoint import DTYPES, Checkpoint, Keep, find, load, making_room, save
from dppo.records.files.disk import Disk

OLD = "old"
NEW = "new"
RUN: dict[str, Any] = {"iteration": 0, "global_step": 0, "episodes": 0, "config": {}, "model": {}}
SHAPES: list[tuple[int, ...]] = [(), (0,), (0, 3), (2, 3)]
Arrays = dict[str, dict[str, np.ndarray]]


def small(text: str) -> Checkpoint:
    arrays = {"model": {"weights": np.arange(3.0)}, "samplers": {}}
    return Checkpoint(arrays, RUN | {"text": text})


def put(
    folder: Path, iteration: int, text: str = NEW, *, keep: int = 1, score: float | None = None
) -> Path:
    """Save a small checkpoint."""
    return save(folder, iteration, small(text), keep=Keep(keep), score=score)


def text_of(path: Path) -> str:
    return str(load(path).state["text"])


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors") for path in folder.iterdir())


def stored(folder: Path, arrays: Arrays, **state: Any) -> Checkpoint:
    """Return what is read back of a checkpoint."""
    written = Checkpoint(arrays, RUN | state)
    path = save(folder, 7, written, keep=Keep(1), score=None)
    return load(path)


ARRAYS = {
    "strides": np.arange(12.0).reshape(3, 4).T,
    "steps": np.arange(12)[::-2],
    "order": np.arange(6, dtype=">i4"),
    "repeated": np.broadcast_to(np.float32(7), (2, 2)),
    "nan": np.array([np.nan, -0.0, np.inf, 5e-324]),
    **{
        f"{dtype} {shape}": np.resize(range(6), shape).astype(dtype)
        for dtype, shape in product(DTYPES, SHAPES)
    },
}


def test_arrays_are_restored_bit_for_bit_in_the_order_of_this_machine(tmp_path: Path) -> None:
    restored = stored(tmp_path, {"samplers": ARRAYS}).arrays["samplers"]
    for name, back in restored.items():
        array = ARRAYS[name]
        native = array.astype(array.dtype.newbyteorder("="))
        assert back.dtype == native.dtype, name
        assert back.shape == native.shape, name
        assert back.tobytes() == native.tobytes(), name
        assert back.flags.writeable, name


def test_state_and_several_parts_are_restored(tmp_path: Path) -> None:
    values = {"config": {"env_id": "Tür", "x": [1, None, True]}, "lr": 0.1 + 0.2, "n": 2**70}
    arrays = {"a": np.full(2, 1), "b.c": np.ones(1)}
    parts = {"model": arrays, "optimizer": arrays}
    back = stored(tmp_path / "run" / "checkpoints", parts, **values)
    assert back.state == RUN | values
    assert list(back.arrays) == ["model", "optimizer"]
    for restored in back.arrays.values():
        assert sorted(restored) == ["a", "b.c"]
    without_arrays = stored(tmp_path, {}, x=math.nan)
    assert math.isnan(without_arrays.state["x"])


def test_a_checkpoint_is_one_file_that_any_reader_of_safetensors_opens(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = put(tmp_path, 123)
    assert path == tmp_path / "iter_000123.safetensors"
    assert names(tmp_path) == ["iter_000123"]

    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["model/weights"]
        np.testing.assert_array_equal(file.get_tensor("model/weights"), np.arange(3.0))
        metadata = file.metadata()
    assert json.loads(metadata["state"]) == {**RUN, "text": NEW}
    assert metadata["format"] == str(checkpoints.FORMAT)
    assert load(path).arrays["samplers"] == {}, "a part without arrays is kept"


def test_text_that_looks_like_a_checksum_is_harmless(tmp_path: Path) -> None:
    seal = f'"header_sha256":"{sealed.UNSEALED}"'
    text = f'{seal} "arrays_sha256":"{sealed.UNSEALED}"'
    arrays = {name: np.zeros(1) for name in ("header_sha256", seal)}
    back = stored(tmp_path, {"model": arrays}, text=text)
    assert back.state == RUN | {"text": text}
    assert back.arrays["model"].keys() == arrays.keys()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = [1.0, 9.0, 3.0, math.nan, 9.0, None, math.inf, 2.0, 4.0]
    for iteration, score in enumerate(scores):
        put(tmp_path, iteration, keep=2, score=score)
    assert names(tmp_path) == ["best.json", "iter_000004", "iter_000007", "iter_000008"]
    assert find(tmp_path).path.stem == "iter_000008"

    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {
        "checkpoint": "iter_000004.safetensors",  # the newer of two with the same score
        "iteration": 4,
        "score": 9.0,
    }

    without = tmp_path / "without"
    put(without, 1, score=math.nan)
    assert names(without) == ["iter_000001"]


def test_each_nth_iteration_is_kept_besides_the_newest(tmp_path: Path) -> None:
    for iteration in range(9):
        save(tmp_path, iteration, small(NEW), keep=Keep(2, every=3), score=None)
    assert names(tmp_path) == [f"iter_00000{iteration}" for iteration in (0, 3, 6, 7, 8)]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    put(tmp_path, 5, OLD, keep=3, score=8.0)
    put(tmp_path, 5, NEW, keep=3, score=2.0)
    assert names(tmp_path) == ["best.json", "iter_000005"]
    assert text_of(find(tmp_path).path) == NEW
    score = json.loads((tmp_path / "best.json").read_text())["score"]
    assert score == 2.0, "the one with score 8 was replaced"


def test_a_run_resumed_further_back_continues_from_its_own_checkpoints(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 15):
        put(tmp_path, iteration, keep=3)
    assert find(tmp_path).path.stem == "iter_000015"
    assert names(tmp_path) == ["iter_000015", "iter_000020", "iter_000030"]


class Killed(BaseException):
    """SIGKILL or a power cut: no more of our code runs."""


class FaultyDisk(Disk):
    """The real disk until operation `fail_at`; data that is not flushed may be lost in a power cut."""

    def __init__(self, folder: Path, fail_at: int, fault: BaseException, *, lasting: bool) -> None:
        self.operations = 0
        self.fail_at = fail_at
        self.fault = fault
        self.lasting = lasting
        self.folder = folder
        self.listed = folder.with_name("listed")  # the files that a power cut leaves in the folder
        self.unflushed = set[int]()  # inodes of files whose content may be lost
        self.listed.mkdir(parents=True)
        if folder.exists():
            self._list()

    @property
    def failed(self) -> bool:
        return self.operations >= self.fail_at

    def _list(self) -> None:
        shutil.rmtree(self.listed)
        shutil.copytree(self.folder, self.listed, copy_function=os.link)

    def _count(self) -> None:
        """Count an operation, which may fail."""
        self.operations += 1
        if self.operations == self.fail_at or (self.lasting and self.failed):
            raise self.fault

    def write(self, path: Path, *parts: bytes | memoryview) -> None:
        data = b"".join(parts)
        half = len(data) // 2
        super().write(path, data[:half])
        self.unflushed.add(path.stat().st_ino)
        self._count()
        with path.open("ab") as file:
            file.write(data[half:])

    def sync(self, path: Path) -> None:
        self._count()
        self.unflushed.discard(path.stat().st_ino)
        if path == self.folder:
            self._list()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def power_cut(self, *, lose_names: bool) -> None:
        if lose_names:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.listed.rename(self.folder)
        for path in self.folder.glob("*"):
            if path.stat().st_ino in self.unflushed:
                os.truncate(path, 1)


# the iteration of an old checkpoint; 0: there is none
had_before = pytest.mark.parametrize("old", [0, 1, 2, 9])


Attempt = tuple[Path, FaultyDisk, BaseException | None]


def save_on(disk: FaultyDisk, score: float | None) -> BaseException | None:
    """Save a new checkpoint, and return the error that this raises."""
    try:
        with patch.object(disk_files, "DISK", disk):
            save(disk.folder, 2, small(NEW), keep=Keep(1), score=score)
    except (CheckpointError, Killed) as error:
        return error
    return None


def faulty_saves(tmp_path: Path, old: int, fault: BaseException, lasting: bool) -> list[Attempt]:
    """Save a new checkpoint once for each operation that can fail, and once without a fault."""
    # a run resumed from a checkpoint before 9 has no score yet
    score = None if old == 9 else 2.0
    attempts: list[Attempt] = []
    while not attempts or attempts[-1][1].failed:
        fail_at = len(attempts) + 1
        folder = tmp_path / str(fail_at) / "checkpoints"
        if old:
            put(folder, old, OLD, score=score and 1.0)
        disk = FaultyDisk(folder, fail_at, fault, lasting=lasting)
        raised = save_on(disk, score)
        attempts.append((folder, disk, raised))
    assert attempts[-1][2] is None
    return attempts


def assert_old_or_new(folder: Path, old: int) -> str | None:
    written = [path for path in folder.glob("*") if path.name.startswith("iter_")]
    if not old and not written:
        return None
    latest = find(folder)
    assert not latest.damaged
    best = folder / "best.json"
    if best.exists():
        json.loads(best.read_text())
    text = text_of(latest.path)
    assert text in ([OLD, NEW] if old else [NEW])
    return text


def assert_usable_again(folder: Path) -> None:
    """The next save succeeds and deletes what the failed one has left."""
    put(folder, 3, "next", score=3.0)
    assert names(folder) == ["best.json", "iter_000003"]
    assert find(folder).path.stem == "iter_000003"


@pytest.mark.parametrize("lose_names", [False, True])
@had_before
def test_a_kill_or_power_cut_at_any_time_leaves_the_old_or_new_one(
    tmp_path: Path, old: int, lose_names: bool
) -> None:
    texts = []
    attempts = faulty_saves(tmp_path, old, Killed(), lasting=True)
    assert len(attempts) >= 6
    for folder, disk, raised in attempts:
        disk.power_cut(lose_names=lose_names)
        texts.append(assert_old_or_new(folder, old))
        if raised is None:
            assert texts[-1] == NEW, "a checkpoint survives a power cut once save() has returned"
        assert_usable_again(folder)
    assert texts[0] == (OLD if old else None)
    assert texts == sorted(texts, key=lambda text: text == NEW), "the new one stays once it exists"


@pytest.mark.parametrize("lasting", [False, True])
@had_before
def test_a_full_disk_is_an_error_and_leaves_the_old_or_the_new_one(
    tmp_path: Path, old: int, lasting: bool
) -> None:
    fault = OSError(errno.ENOSPC, "No space left on device")
    written = []
    for folder, _, raised in faulty_saves(tmp_path, old, fault, lasting):
        text = assert_old_or_new(folder, old) if folder.exists() else None
        written.append(raised is None)
        if raised is None:
            assert text == NEW
        else:
            assert isinstance(raised, CheckpointNotWritten)
            assert re.search(r"No space left on device\.\n.* Free some disk space\.", str(raised))
            if not lasting:
                assert not list(folder.glob(".tmp-*")), "the temporary file is removed"
        assert_usable_again(folder)
    assert written == sorted(written), "an error while deleting old files is not an error of saving"


class Stubborn(Disk):
    """Refuses to delete two files, as if they belonged to another user."""

    def remove(self, path: Path) -> None:
        if path.name.startswith(("iter_000001", ".tmp-")):
            raise PermissionError(errno.EACCES, "Permission denied")
        super().remove(path)


def test_old_ones_that_cannot_be_deleted_stop_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".tmp-x-another-host-8").write_bytes(b"half")
    for iteration in range(1, 6):
        with patch.object(disk_files, "DISK", Stubborn()):
            put(tmp_path, iteration, str(iteration), keep=2)
        assert text_of(find(tmp_path).path) == str(iteration)
    remaining = [".tmp-x-another-host-8", "iter_000001", "iter_000004", "iter_000005"]
    assert names(tmp_path) == remaining
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "once for each file, not with each checkpoint"
    assert "iter_000001.safetensors: cannot be deleted or replaced: Permission denied." in logged[1]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_network_disk_that_cannot_flush_folders_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    assert text_of(put(tmp_path, 1)) == NEW


def test_a_flipped_bit_and_a_missing_end_are_detected_anywhere(tmp_path: Path) -> None:
    path = put(tmp_path, 1, score=1.5)
    rng = np.random.default_rng(1)
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << int(rng.integers(8))
        for content in (bad, good[:position]):
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="expected"):
                load(path)
    path.write_bytes(good)
    assert text_of(path) == NEW


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "truncated": lambda path, data: path.write_bytes(data[:-1]),
    "cut in its header": lambda path, data: path.write_bytes(data[:99]),
    "cut in its length": lambda path, data: path.write_bytes(data[:5]),
    "longer": lambda path, data: path.write_bytes(data + b"\n"),
    "empty": lambda path, data: path.write_bytes(b""),
    "zeros": lambda path, data: path.write_bytes(bytes(len(data))),
    "long header": lambda path, data: path.write_bytes(struct.pack("<Q", 2**62) + data[8:]),
    "missing": lambda path, data: None,
    "link": lambda path, data: path.symlink_to(path.with_name("copy")),
    "folder": lambda path, data: path.mkdir(),
    "pipe": lambda path, data: os.mkfifo(path),  # reading it would block for ever
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_error_names_expected_and_found_content(tmp_path: Path, damage: str) -> None:
    path = put(tmp_path, 1)
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    DAMAGES[damage](path, (tmp_path / "copy").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load(path)

    first, second = str(caught.value).splitlines()
    is_short = damage in ("cut in its header", "cut in its length")
    assert ("the beginning of one, which was cut short" in first) == is_short
    assert re.search(f"{re.escape(str(path))}.*expected.*found", first)
    assert "newest good one" in second

    if damage != "missing":  # it neither disturbs later saves and searches, nor is deleted by them
        newer = put(tmp_path, 2)
        assert find(tmp_path).path == newer
        assert os.path.lexists(path) or damage in ("truncated", "longer")  # with a good header


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["a pickle", "a zip archive"])
def test_a_pickle_is_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "iter_000001.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    if kind == "a zip archive":  # as torch.save writes it
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=f"found {kind}"):
        load(path)
    assert not (tmp_path / "exploded").exists()


def made_up(path: Path, arrays: dict[str, np.ndarray] | None = None, **metadata: str) -> Path:
    """Write a file with valid checksums."""
    whole = {
        "format": str(checkpoints.FORMAT),
        "iteration": "1",
        "serial": "0",
        "score": "null",
        "parts": '["model"]',
        "state": json.dumps(RUN),
    }
    parts = sealed.seal(arrays or {}, whole | metadata)
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"state": "3"}, "expected"),
        ({"state": "\u0080\u0004K\u0001."}, "expected"),
        ({"state": "[" * 100_000}, "expected"),
        ({"parts": "7"}, "expected"),
        ({"parts": "{"}, "expected"),
        ({"format": "abc"}, "expected"),
        ({"format": "0"}, "expected"),
        ({"format": str(checkpoints.FORMAT + 1)}, "Use a newer dppo"),
        ({"arrays": {"../secret": np.zeros(1)}}, "another safetensors file"),
    ],
)
def test_invalid_content_with_valid_checksums_is_refused(
    tmp_path: Path, content: dict[str, Any], match: str
) -> None:
    good = made_up(tmp_path / "good.safetensors")
    assert load(good).state == RUN
    invalid = made_up(tmp_path / "iter_000001.safetensors", **content)
    with pytest.raises(CheckpointError, match=match):
        load(invalid)


@pytest.mark.parametrize(
    "metadata", [{"iteration": "x"}, {"serial": ""}, {"score": '"high"'}, {"score": "{"}]
)
def test_invalid_figures_in_one_file_do_not_disturb_the_others(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    made_up(tmp_path / "iter_000009.safetensors", None, **metadata)
    put(tmp_path, 2, NEW, score=1.0)
    assert text_of(find(tmp_path).path) == NEW
    assert (tmp_path / "iter_000009.safetensors").exists()


def test_a_checkpoint_is_found_by_either_folder_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    path = put(folder, 1)
    for place in (tmp_path, folder, path, path.with_suffix("")):
        assert find(place).path == path
    copy = tmp_path / "my favourite.safetensors"
    shutil.copy(path, copy)
    assert find(copy).path == copy, "without its run"
    monkeypatch.chdir(folder)
    assert find(Path(".")).path == Path(path.name)


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_damaged_newest_checkpoint_is_skipped_and_reported(tmp_path: Path, place: int) -> None:
    folder = tmp_path / "checkpoints"
    for iteration in (1, 2, 3):
        newest = put(folder, iteration, str(iteration), keep=3)
    data = bytearray(newest.read_bytes())
    data[place] ^= 1
    newest.write_bytes(data)

    latest = find(tmp_path)
    assert text_of(latest.path) == "2"
    [damaged] = latest.damaged
    assert str(newest) in damaged
    assert "\n" not in damaged
    with pytest.raises(CheckpointError, match=newest.name):
        find(newest)


def test_only_a_damaged_newest_one_is_reported(tmp_path: Path) -> None:
    older = put(tmp_path, 1, keep=2)
    newer = put(tmp_path, 2, keep=2)
    assert not find(older).newest
    assert find(newer).newest
    assert find(tmp_path).newest
    older.write_bytes(b"x")
    assert find(tmp_path).damaged == ()


def test_best_json_leads_to_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    for iteration, score in ((1, 1.0), (2, 9.0), (3, 2.0)):
        put(tmp_path, iteration, score=score)
    best = find(tmp_path / "best.json")
    assert best.path.name == "iter_000002.safetensors"
    assert not best.newest


@executes(
    "records/files/checkpoint.py: names no checkpoint. Pass one of the checkpoints beside it",
    "records/files/checkpoint.py: or pass one of the checkpoints beside it to play a policy",
)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ("{}", "names no checkpoint. Pass"),
        ('{"checkpoint": "../iter_000001.safetensors"}', "names no checkpoint. Pass"),
        ('{"checkpoint": null, "deployed": "baseline"}', "because the run deploys its baseline"),
        ('{"checkpoint": "iter_000007.safetensors"}', "iter_000007.*found nothing"),
    ],
)
def test_a_best_json_without_a_checkpoint_beside_it_is_refused(
    content: str, problem: str, tmp_path: Path
) -> None:
    checkpoint = put(tmp_path, 1)
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        find(tmp_path / "best.json")
    assert find(checkpoint).newest


WRONG_PATHS = {
    "nowhere": "does not exist",
    "file": "is not a checkpoint",
    "empty": "contains no checkpoint",
    "run": "contains no checkpoint",
    "iter_000001": "expected a checkpoint, found an empty file",
    "iter_000002.safetensors": "expected a file, found nothing",
    "iter_000003.safetensors": "expected a checkpoint",
}


def test_each_wrong_path_has_its_own_message(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "iter_000001.safetensors").touch()
    save_file({"model/weights": np.zeros(3)}, tmp_path / "iter_000003.safetensors")
    for name, message in WRONG_PATHS.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            find(tmp_path / name)
        assert len(str(caught.value).splitlines()) <= 2
    with pytest.raises(CheckpointError, match="could not be written"):
        put(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("room", "remaining"),
    [
        (1, ["best.json", "iter_000001", "iter_000003", "iter_000004", "iter_000005"]),
        (2, ["best.json", "iter_000001", "iter_000003", "iter_000005"]),
        (3, None),
    ],
)
def test_the_last_one_may_take_the_room_of_older_ones_but_not_of_the_newest_and_the_best(
    room: int, remaining: list[str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # the last is the newest, of a run that was resumed from an older one
    for iteration, score in ((1, 9.0), (2, None), (4, None), (3, None)):
        put(tmp_path, iteration, keep=4, score=score)

    class Small(Disk):
        removed = 0

        def write(self, path: Path, *parts: bytes | memoryview) -> None:
            if self.removed < room:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(path, *parts)

        def remove(self, path: Path) -> None:
            self.removed += path.name.startswith("iter_")
            super().remove(path)

    write = partial(put, tmp_path, 5, keep=9)
    with patch.object(disk_files, "DISK", Small()):
        with pytest.raises(CheckpointNotWritten):
            write() if remaining else making_room(write, tmp_path)
        if remaining:
            making_room(write, tmp_path)
            assert names(tmp_path) == remaining
            assert "iter_000002.safetensors: deleted to make room" in caplog.text
