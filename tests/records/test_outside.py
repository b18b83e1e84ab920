"""A disk or a tracker that does not answer: the run says so, goes on or ends, and loses nothing in silence."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from commandline import Command, Typed
from processes import wait_until
from recorder import Notes, Recorder

import dppo
from dppo.errors import CheckpointNotWritten
from dppo.records.files import disk
from dppo.records.outside import NoAnswer, OutsideThread

LIMIT_S = OutsideThread.limit_s


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, steps=32, iterations=4, **changes)


class BlockingDisk:
    """Blocks each write to a file of a name, and each write of a new file, while it is `blocked`.

    Only then is the run impatient: on a busy machine, other calls may also wait for a part of a second.
    """

    limit_s = 0.2  # of the run's patience

    def __init__(self, name: str) -> None:
        self._name = name
        self._free = threading.Event()
        self._free.set()
        self._write = os.write
        self.waiting = threading.Event()

    def block(self) -> None:
        OutsideThread.limit_s = self.limit_s
        self._free.clear()

    def unblock(self) -> None:
        OutsideThread.limit_s = LIMIT_S
        self._free.set()

    def block_for_two_iterations(self, iteration: int) -> None:
        if iteration == 1:
            self.block()
        if iteration == 3:
            self.unblock()

    def wait(self, path: str) -> None:
        if self._name in path and not self._free.is_set():
            self.waiting.set()
            self._free.wait()

    def write(self, handle: int, data: Any) -> int:
        self.wait(os.readlink(f"/proc/self/fd/{handle}"))
        return self._write(handle, data)


@pytest.fixture
def blocking(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlockingDisk]:
    """Let a part of the disk block, and the run wait for fractions of a second in place of seconds."""
    blocking = BlockingDisk(getattr(request, "param", "metrics.jsonl"))

    class Blocking(disk.Disk):
        def write(self, path: Path, *parts: bytes | memoryview) -> None:
            blocking.wait(str(path))
            super().write(path, *parts)

    monkeypatch.setattr(disk, "DISK", Blocking())
    monkeypatch.setattr(os, "write", blocking.write)
    monkeypatch.setattr(OutsideThread, "said_s", 0.1)
    monkeypatch.setattr("dppo.records.outside.ENDING_S", 0.3)
    monkeypatch.setattr("dppo.run.outputs.ENDING_S", 0.3)
    monkeypatch.setattr("dppo.records.outside.TICK_S", 0.02)
    yield blocking
    blocking.unblock()


@pytest.mark.proves("rows, episodes, incidents")
def test_rows_wait_in_memory_while_the_disk_blocks_and_none_is_lost(
    blocking: BlockingDisk, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    undisturbed = dppo.train(settings(tmp_path / "undisturbed"))

    def act(iteration: int) -> None:
        if iteration == 3:
            assert blocking.waiting.is_set()
            assert (run / "metrics.jsonl").read_text().count("\n") == 1
        blocking.block_for_two_iterations(iteration)

    with Notes() as notes:
        result = dppo.train(settings(run), observers=[Recorder(after_iteration=act)])
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert [row["iteration"] for row in result.metrics] == [1, 2, 3, 4]

    waits = re.compile(f"waiting for the disk of {run}: writing metrics.jsonl for . s")
    assert [bool(waits.fullmatch(text)) for text in notes.texts].count(True) == 1
    assert f"the disk of {run} answers again, after " in "".join(notes.texts)


@pytest.mark.proves("a checkpoint")
@pytest.mark.parametrize("blocking", ["iter_"], indirect=True)
def test_a_checkpoint_that_the_disk_does_not_take_is_counted_and_the_next_one_written(
    blocking: BlockingDisk, tmp_path: Path
) -> None:
    config = settings(tmp_path / "run", checkpoint_interval_s=0)
    recorder = Recorder(after_iteration=blocking.block_for_two_iterations)
    with Notes() as notes:
        result = dppo.train(config, observers=[recorder])
    assert result.incidents["checkpoint_failed"] >= 1
    failed = r"could not be written: the disk of .* has not answered for .*\(writing a checkpoint\)"
    assert len(re.findall(failed, "\n".join(notes.texts))) == 1
    assert result.checkpoint.name == "iter_000004.safetensors"
    assert dppo.load_policy(result.checkpoint).weights.size


@pytest.mark.parametrize("blocking", ["iter_"], indirect=True)
def test_a_signal_ends_a_run_whose_disk_blocks_for_good_and_says_what_was_not_saved(
    blocking: BlockingDisk, tmp_path: Path
) -> None:
    blocking.limit_s = 600.0
    began = time.monotonic()

    def act(iteration: int) -> None:
        if iteration == 2:
            blocking.block()
            threading.Thread(target=press, daemon=True).start()

    def press() -> None:
        blocking.waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder(after_iteration=act)
    config = settings(tmp_path / "run", checkpoint_interval_s=0)
    with (
        Notes() as notes,
        pytest.raises(CheckpointNotWritten, match=r"Earlier checkpoints are untouched\. Check the"),
    ):
        dppo.train(config, observers=[recorder])
    assert time.monotonic() - began < 60
    assert isinstance(recorder.error, CheckpointNotWritten)

    place = f"the disk of {tmp_path / 'run'}"
    assert f"{place} does not answer: writing metrics.jsonl was not finished" in notes.texts
    assert any("run.lock stays there" in text for text in notes.texts)

    blocking.unblock()
    wait_until((tmp_path / "run" / "checkpoints" / "iter_000002.safetensors").exists)


@pytest.mark.proves("the run folder, at the start")
@pytest.mark.parametrize("blocking", ["nothing"], indirect=True)
def test_a_run_folder_that_cannot_be_opened_is_refused(
    blocking: BlockingDisk, desk: Path, refused: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(
        "dppo.records.files.run_folder.check_run_files", lambda path: released.wait()
    )
    blocking.block()
    with Notes() as notes:
        message = refused("train CartPole-v1 --run-dir run --progress plain")
    released.set()
    assert "run_dir: the disk of the run folder has not answered for " in message
    assert "the disk of the run folder: opening the run folder for " in "".join(notes.texts)


def test_errors_of_calls_that_nobody_waited_for_are_raised_by_later_ones(
    blocking: BlockingDisk,
) -> None:
    thread = OutsideThread("a place")
    released = threading.Event()

    def fail() -> None:
        released.wait()
        raise ValueError("told later")

    blocking.block()
    assert not thread.post("failing", fail)
    with pytest.raises(NoAnswer, match=r"a place has not answered for \d+ s \(failing\)"):
        thread.call("another call", lambda: pytest.fail("it was given up"))

    blocking.unblock()
    released.set()
    wait_until(lambda: thread._current is None)
    with pytest.raises(ValueError, match="told later"):
        thread.call("third", int)
    assert thread.call("fourth", lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        thread.call("fifth", lambda: 1 / 0)
    thread.close()


BLOCKED = """
import pathlib, sys, threading
from dppo.records.files import disk
class Blocking(disk.Disk):
    def write(self, path, *parts):
        while pathlib.Path("block").exists():
            pathlib.Path("blocked").touch()
            threading.Event().wait(0.5)
        super().write(path, *parts)
disk.DISK = Blocking()
from dppo.__main__ import main
sys.exit(main())
"""


@pytest.mark.proves("the last checkpoint, after Ctrl-C or SIGTERM")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_whose_disk_blocks_ends_soon_after_a_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = "--total-timesteps 1e9 --run-dir run --checkpoint-interval-s 1 --progress plain"
    with Command(f"train CartPole-v1 {words}", tmp_path, program=("-c", BLOCKED)) as command:
        command.wait_until(lambda: "return" in command.out)
        (tmp_path / "block").touch()
        waits = f"waiting for the disk of {tmp_path / 'run'}: writing a checkpoint for "
        command.wait_until(lambda: waits in command.out)
        command.send(number)
        sent = time.monotonic()
        assert command.wait(60) == 1
        assert time.monotonic() - sent < 25  # 10 on a machine with nothing else to do
        assert "the checkpoint could not be written: the disk of" in command.err
