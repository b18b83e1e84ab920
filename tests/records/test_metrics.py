"""metrics.jsonl stays complete and strict through kills, full disks and resuming; TensorBoard shows the same."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from builders import tiny_run
from processes import wait_until
from recorder import Notes

import dppo
from dppo.errors import DppoError
from dppo.records.files import disk as disk_files
from dppo.records.files.disk import Disk
from dppo.records.files.run_files import METRICS
from dppo.records.metrics.reading import read_metrics
from dppo.records.metrics.tensorboard import TensorBoard
from dppo.records.metrics.writer import MetricsWriter, cut_rows
from dppo.run.file_observers import cut_row_files

DEEP = '{"iteration": 1, "x": ' + "[" * 100_000
INFINITE = '{"iteration": 1, "global_step": Infinity}'
HUGE = '{"iteration": 1, "global_step": 1' + "0" * 400 + "}"


def row(iteration: int, **figures: float) -> dict[str, float]:
    return {
        "iteration": iteration,
        "global_step": 256 * iteration,
        "charts/SPS": 1000.5 + iteration,
        **figures,
    }


def write(folder: Path, rows: list[dict[str, float]], resume: int | None = None) -> list[str]:
    """Write rows to both files, as a run does; return the log."""
    with Notes() as notes:
        earlier = cut_row_files(folder, resume)
        writer = MetricsWriter(folder / METRICS)
        board = TensorBoard(
            folder, 1 + max((int(row["global_step"]) for row in earlier), default=0)
        )
        for observer in (writer, board):
            for row in rows:
                observer.on_iteration(row)
            observer.on_end(None, None)
    return notes.texts


def events(folder: Path) -> list[Any]:
    """Return the events as TensorBoard reads them, after checking every length and checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = data[12 : 16 + length]
            for part in (data[:12], event):
                assert part[-4:] == struct.pack("<I", masked_crc32c(part[:-4]))
            events.append(Event.FromString(event[:-4]))
            data = data[16 + length :]
    return events


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by step. As in TensorBoard, each START except the first drops later values."""
    values: dict[int, float] = {}
    started = False
    for event in events(folder):
        if event.HasField("session_log"):
            assert event.session_log.status == event.session_log.START
            values = {
                step: value for step, value in values.items() if step < event.step or not started
            }
            started = True
        for value in event.summary.value:
            if value.tag == tag:
                values[event.step] = value.simple_value
    return values


def test_rows_come_back_as_they_were_but_for_one_that_is_being_written(tmp_path: Path) -> None:
    first = row(1)
    second = row(2, **{"charts/episodic_return": 0.1 + 0.2, "losses/entropy": -1e-300})
    third: Any = {"iteration": np.int64(3), "global_step": np.int32(9), "x": np.float32(1.5)}
    assert write(tmp_path, [first, second, third]) == []
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"iteration": 4, "global_st')
    third_as_plain = {"iteration": 3, "global_step": 9, "x": 1.5}
    assert read_metrics(tmp_path) == [first, second, third_as_plain]
    assert read_metrics(tmp_path / METRICS) == read_metrics(tmp_path)


def test_the_file_is_strict_json_and_nan_comes_back(tmp_path: Path) -> None:
    written = row(1, a=math.nan, b=math.inf, c=-math.inf, d=float(np.float32(0.5)))
    write(tmp_path, [written])
    text = (tmp_path / METRICS).read_text()
    content = json.loads(text, parse_constant=pytest.fail)
    assert content == written | dict.fromkeys("abc")
    assert math.isnan(read_metrics(tmp_path)[0]["a"])


def test_a_row_costs_one_write_at_once_and_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MetricsWriter(tmp_path / METRICS)
    calls: list[str] = []
    real_write = os.write

    def write_once(handle: int, data: bytes) -> int:
        calls.append("write")
        return real_write(handle, data)

    monkeypatch.setattr(os, "write", write_once)
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("fsync"))
    for iteration in range(1, 4):
        writer.on_iteration(row(iteration))
        assert len(read_metrics(tmp_path)) == iteration
    assert calls == ["write"] * 3

    writer.on_end(None, None)
    assert calls[3:] == ["fsync"]
    writer.on_end(None, None)


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[1]", "3", '{"x": 1}', '{"iteration": 1}', DEEP, HUGE, ""],
    ids=lambda line: line[:40],
)
def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(row(1)) + f"\n{line}\n" + json.dumps(row(2)) + "\n"
    )
    with pytest.raises(DppoError, match=r"metrics\.jsonl:2: not a row"):
        read_metrics(tmp_path)


def test_rows_of_different_runs_are_never_mixed_and_missing_ones_are_an_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(DppoError, match=r"No such file or directory\. Pass the folder of a run"):
        read_metrics(tmp_path)
    write(tmp_path, [row(1)])
    with pytest.raises(DppoError, match="contains a run already"):
        cut_rows(tmp_path / METRICS, None)
    with pytest.raises(DppoError, match="No such file or directory"):
        MetricsWriter(tmp_path / "nowhere" / METRICS)


def test_rows_past_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    tag = "charts/x"

    def rows(value: float, *iterations: int) -> list[dict[str, float]]:
        return [row(iteration, **{tag: value}) for iteration in iterations]

    write(tmp_path, rows(1, 1, 2, 3, 4, 5))
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"iteration": 6, "glo')
    resumed = rows(2, 4, 5)
    assert write(tmp_path, resumed, resume=3) == []
    assert read_metrics(tmp_path) == rows(1, 1, 2, 3) + resumed
    assert scalars(tmp_path, tag) == {256: 1, 512: 1, 768: 1, 1024: 2, 1280: 2}

    write(tmp_path, rows(3, 3), resume=2)
    assert scalars(tmp_path, tag) == {256: 1, 512: 1, 768: 3}


@pytest.mark.parametrize("resume", [0, 2])
def test_resuming_without_rows_starts_a_new_file(tmp_path: Path, resume: int) -> None:
    if resume == 0:
        write(tmp_path, [row(1)])
    write(tmp_path, [row(resume + 1)], resume=resume)
    assert read_metrics(tmp_path) == [row(resume + 1)]


@pytest.mark.parametrize(
    ("line", "ending", "remaining"),
    [
        *((line, "\n", [1, 2, 3]) for line in ("\0\0", '{"iteration": 1}', INFINITE, DEEP, HUGE)),
        ("\0\0", "", [1, 3]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_run_with_a_damaged_or_incomplete_row_can_be_resumed(
    tmp_path: Path, line: str, ending: str, remaining: list[int]
) -> None:
    extra_line = json.dumps({**row(2), "words": "x", "list": [1]})
    (tmp_path / METRICS).write_text(f"{json.dumps(row(1))}\n{line}\n{extra_line}{ending}")
    [note] = write(tmp_path, [row(3)], resume=2)
    assert "skipped 1 malformed line" in note
    assert read_metrics(tmp_path) == [row(number) for number in remaining]


def test_a_full_disk_while_rows_are_cut_off_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, [row(i) for i in range(1, 6)])

    class Full(Disk):
        def write(self, path: Path, *parts: bytes | memoryview) -> None:
            path.write_bytes(b"".join(parts)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(DppoError, match="Free some disk space"),
        patch.object(disk_files, "DISK", Full()),
    ):
        cut_rows(tmp_path / METRICS, 3)

    assert len(read_metrics(tmp_path)) == 5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("room_again", "remaining", "lost"),
    [(10**6, [1, 2, 3, 4], ""), (0, [1], "3 rows could not be written")],
)
def test_a_full_disk_is_logged_once_and_no_row_is_lost_if_there_is_room_again(
    room_again: int,
    remaining: list[int],
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = MetricsWriter(tmp_path / METRICS)
    writer.on_iteration(row(1))
    real = os.write
    room = 7

    def write_little(handle: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(handle, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write_little)
    writer.on_iteration(row(2))
    writer.on_iteration(row(3))
    assert read_metrics(tmp_path) == [row(1)]

    room = room_again
    writer.on_iteration(row(4))
    writer.on_end(None, None)

    assert read_metrics(tmp_path) == [row(number) for number in remaining]
    first, *later = caplog.messages
    assert "No space left on device. Free some disk space. Training continues." in first
    assert len(later) == bool(lost)
    assert lost in "".join(later)


def test_every_row_reaches_tensorboard(tmp_path: Path) -> None:
    began = time.time()
    entropies = {i: 0.25 * i for i in range(1, 301)}
    rows = [row(i, **{"losses/entropy": x, "perf/x": math.nan}) for i, x in entropies.items()]
    write(tmp_path, rows)
    written = events(tmp_path)
    assert written[0].file_version == "brain.Event:2"
    assert scalars(tmp_path, "losses/entropy") == {256 * i: x for i, x in entropies.items()}
    assert scalars(tmp_path, "perf/x") == {}, "NaN is not shown"

    tags = {value.tag for event in written for value in event.summary.value}
    assert tags == {"charts/SPS", "losses/entropy"}, "keys without a slash are the axes"
    assert all(began <= event.wall_time <= time.time() for event in written)


def test_events_are_visible_while_training_runs(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 1)
    board.on_iteration(row(1))
    wait_until(lambda: bool(scalars(tmp_path, "charts/SPS")))
    board.on_end(None, None)
    assert scalars(tmp_path, "charts/SPS") == {256: 1001.5}


def test_training_continues_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as if it was not installed
    notes = write(tmp_path, [row(i) for i in range(1, 6)])
    assert len(notes) == 1
    assert "No more events are written for TensorBoard" in notes[0]
    assert len(read_metrics(tmp_path)) == 5


def test_the_constructor_does_not_wait_for_the_import_of_tensorboard(tmp_path: Path) -> None:
    code = f"""
        import os, sys, threading
        from pathlib import Path
        from dppo.records.metrics.tensorboard import TensorBoard
        assert "tensorboardX" not in sys.modules and "torch" not in sys.modules
        constructed = threading.Event()

        class Blocking:
            def find_spec(self, name, path, target=None):
                assert name != "tensorboardX" or constructed.wait(), name

        sys.meta_path.insert(0, Blocking())
        board = TensorBoard(Path({str(tmp_path)!r}), 1)
        constructed.set()
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


REPLACEMENTS: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, precious: path.parent.rmdir(),
    "a link": lambda path, precious: path.symlink_to(precious),
    "another file": lambda path, precious: path.write_text("x"),
}


@pytest.mark.parametrize("instead", REPLACEMENTS)
def test_rows_are_written_anew_if_the_folder_is_deleted_or_the_file_replaced(
    instead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    precious = tmp_path / "file"
    precious.write_text("precious")
    writer = MetricsWriter(run / METRICS)
    writer.on_iteration(row(1))
    writer.path.unlink()
    REPLACEMENTS[instead](writer.path, precious)
    writer.on_iteration(row(2))
    writer.flush()
    writer.on_iteration(row(3))
    writer.on_end(None, None)

    assert read_metrics(run) == [row(1), row(2), row(3)]
    assert precious.read_text() == "precious"
    assert ["written again" in text for text in caplog.messages].count(True) == 1
    assert "written again" in caplog.messages[0]
    assert os.listdir(run) == [METRICS]


def test_a_run_without_actors_has_no_metrics_of_actors(tmp_path: Path) -> None:
    for row in dppo.train(tiny_run(tmp_path / "run")).metrics:
        assert not any(key.startswith("actors/") for key in row)
