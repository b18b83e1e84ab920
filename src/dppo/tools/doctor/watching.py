"""Watch the process that examines an environment, which may hang, die, or print megabytes."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from threading import Thread
from typing import Any

import psutil

from dppo.envs.checks.faults import PACKAGE
from dppo.machine import load_average, usable_cores
from dppo.tools.doctor.playing import FIRST_SHARE, FIRST_SIZES, WITH_SECOND, fingerprint_of
from dppo.tools.doctor.repetitions import with_repetition
from dppo.tools.doctor.speed import Facts

# longest silence of a call after the time is up; three times the longest call so far if that is more
PATIENCE_S = 10.0
SLOW_S = 60.0  # longest silence of starting or closing, after the time is up
UPDATING_S = 20.0  # longest silence of an update, after the time is up
MAX_ENTRIES = 1000  # of a folder whose files are compared; a scan of a larger one may take long
MIN_SECOND_EXAMINATION_S = 5.0
MAX_REPEATED_SEGMENTS = 6
# reported call -> its description
CALLS = {
    "m": ", in a constructor (call {:,})",
    "r": ", in reset (call {:,})",
    "s": ", in step (call {:,})",
}
MADE = "d\n"  # reported at the end of a constructor
STAGES = {
    "making": "making the environment",
    "playing": "playing episodes",
    "comparing with other episodes": "playing the same episodes again",
    WITH_SECOND: "playing the same episodes in a second instance",
    "updating": "measuring how long updates take",
    "playing controllers": "playing zero actions, random actions and any baseline",
    "asking the baseline": "taking the first action of the baseline",
    "closing": "closing the environment",
}
STAGES_OF_SECOND = {**STAGES, "playing": "playing the same episodes again"}
CHECKS = (
    "playing controllers",
    "asking the baseline",
    "comparing with other episodes",
    WITH_SECOND,
    "making a second instance in another process",
    "asking Gymnasium's checker",
)
"""Stages between playing and updating."""
TIMES = ("collect_s", "update_s", "algorithms", "core_share_of_updates")
"""Facts of the stage `updating`."""
Show = Callable[[str], None]
"""It is called with each stage."""
FilesHere = set[tuple[str, int, int]]
"""Name, size and time of change of each file."""
EXAMINATION = ("-m", "dppo.tools.doctor.examination")


class Watch:
    """Collects the reports of a process that is examined, and describes its end."""

    def __init__(self, program: Sequence[str], request: dict[str, Any], show: Show) -> None:
        """Start `python PROGRAM DESCRIPTOR`, with `request` as JSON in its stdin; `show` is called with each stage."""
        self.facts: Facts = {
            "output": 0,
            "last_line": "",
            "stage": "starting",
            "threads_ended": False,
            "threads_left": [],
        }
        self._show = show
        self._call = ""  # the call into the environment that is running, in words
        self._calls = 0
        self._stack = ""
        self._last_report = time.monotonic()
        self._longest_call_s = 0.0
        report_end, write_end = os.pipe()
        with tempfile.TemporaryFile() as stdin:  # arguments of a command have 128 kB at most
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, *program, str(write_end)],
                pass_fds=[write_end],
                start_new_session=True,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(write_end)
        self._readers = [
            Thread(target=self._read_output, daemon=True),
            Thread(target=self._read_reports, args=(report_end,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, seconds: float) -> Facts:
        """Return the facts when the process has ended, or has been ended because it hangs."""
        until = time.monotonic() + seconds
        patience_s = min(PATIENCE_S, seconds)
        try:
            while self._process.poll() is None and not self._is_stuck():
                silent_s = time.monotonic() - self._last_report
                is_late = self.facts["stage"] == "over" or time.monotonic() > until
                if is_late and silent_s > self._allowed_silence_s(patience_s):
                    self._note_stuck(silent_s)
                time.sleep(0.02)
        finally:
            self._end()
        for reader in self._readers:
            reader.join(1.0)  # a process that has escaped may hold the pipes
        if not self._is_stuck() and self.facts["stage"] != "over":
            self._note_death(self._process.returncode)
        return self.facts

    def _is_stuck(self) -> bool:
        return "hung" in self.facts or "late" in self.facts

    def _allowed_silence_s(self, patience_s: float) -> float:
        """Return the longest time without a report that is allowed in this stage, once the time is up."""
        stage = self.facts["stage"]
        is_ending = stage == "over" and self.facts.get("threads_ended", False)
        is_starting = stage in ("starting", "making") and not self._call  # imports take long
        if stage == "updating":
            return UPDATING_S
        if stage == "closing" or is_ending or is_starting:
            return SLOW_S
        if stage == "over":  # its threads may still have to notice that they should end
            return PATIENCE_S
        return max(patience_s, 3 * self._longest_call_s)

    def _note_stuck(self, silent_s: float) -> None:
        if self.facts["stage"] == "updating":  # not the fault of the environment
            self.facts["late"] = f"{silent_s:.0f} s"
        else:
            text = (
                f"{self._doing()} has not returned for {silent_s:.0f} s. {self._place_on_signal()}"
            )
            self.facts["hung"] = text.rstrip(". ")

    def _note_death(self, code: int) -> None:
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was ended by {signal.Signals(-code).name}"
        place = self._place() or self.facts["last_line"]
        text = f"its process {end} while {self._doing()}. {place}"
        self.facts["died"] = text.rstrip(". ")

    def _doing(self) -> str:
        return self.facts["stage"] + self._call.format(self._calls)

    def _place_on_signal(self) -> str:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return self._place()

    def _place(self) -> str:
        """Return the place of the main thread in the user's code, or else in any code; "" if no stacks were printed."""
        main_thread = self._stack.rpartition("most recent call first")[2]
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', main_thread)
        if not frames:
            return ""
        code_of_others = re.compile(f"{re.escape(PACKAGE)}|.*(/lib/python|<frozen)")
        user_frames = [frame for frame in frames if not code_of_others.match(frame[0])]
        path, line, function = (user_frames or frames)[0]
        return f"It was in {path}, line {line}, in {function}."

    def _end(self) -> None:
        """End the process and all processes that it has started, also those in sessions of their own."""
        children = list[Any]()
        with suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        self._process.wait()

    def _read_output(self) -> None:
        with self._process.stdout as output:  # type: ignore[union-attr]
            while data := os.read(output.fileno(), 1 << 16):
                self.facts["output"] += len(data)
                text = data.decode(errors="replace").strip()
                last_line = text.rpartition("\n")[2]
                if last_line:
                    self.facts["last_line"] = last_line[-100:]

    def _read_reports(self, report_end: int) -> None:
        with os.fdopen(report_end, errors="replace") as reports:
            for line in reports:
                now = time.monotonic()
                if self._call:
                    self._longest_call_s = max(self._longest_call_s, now - self._last_report)
                self._last_report = now
                self._record(line)

    def _record(self, line: str) -> None:
        """Record a line of the process: the beginning or the end of a call, facts as JSON, or a part of a stack."""
        if line == MADE:
            self._call = ""
        elif line[:-1] in CALLS:
            self._call = CALLS[line[0]]
            self._calls += 1
        elif line[0] != "{":
            self._stack += line
        else:
            facts = json.loads(line)
            self.facts |= facts
            if "stage" in facts:
                self._call = ""
                if facts["stage"] != "over":
                    self._show(facts["stage"])


def examine_apart(
    settings: dict[str, Any],
    seconds: float,
    sizes: Sequence[int] = (),
    show: Show = lambda stage: None,
    *,
    updates: bool = False,
) -> Facts:
    """Return what a process of its own finds; with `sizes`, it only plays segments of these sizes.

    Args:
        updates: time updates, after everything else.
    """
    request = {
        "settings": settings,
        "seconds": seconds,
        "asked_at": time.time(),
        "sizes": sizes,
        "updates": updates,
    }
    return Watch(EXAMINATION, request, show).wait(seconds)


def examine(settings: dict[str, Any], seconds: float, show: Show = lambda stage: None) -> Facts:
    """Return the facts about the environment of these settings, measured in a process and repeated in another one."""
    until = time.monotonic() + seconds
    files_before = _files_here()

    def repeat(seconds: float, *, updates: bool = False) -> Facts:
        return examine_apart(
            settings,
            max(MIN_SECOND_EXAMINATION_S, seconds),
            facts.get("sizes", [])[:MAX_REPEATED_SEGMENTS],
            lambda stage: show(f"in a second process: {STAGES_OF_SECOND.get(stage, stage)}"),
            updates=updates,
        )

    facts = examine_apart(
        settings,
        FIRST_SHARE * seconds,
        show=lambda stage: show(STAGES.get(stage, stage)),
        updates=True,
    )
    facts |= {
        "cpus": usable_cores(),
        "load": load_average(),
        "available_mb": psutil.virtual_memory().available / 2**20,
        "written": _written_since(files_before),
    }
    trace = facts.pop("trace", ())
    facts["fingerprint"] = fingerprint_of(trace)
    has_trouble_with_two = _trouble_with_two(facts)
    ended_early = _ended_in_a_check(facts)
    if has_trouble_with_two or ended_early:
        repeated = repeat(PATIENCE_S, updates=ended_early)
        facts |= {name: repeated[name] for name in TIMES if ended_early and name in repeated}
        if has_trouble_with_two:
            return _examined_alone(facts, trace, repeated.get("trace", ()))
    differences = facts.get("same", {})
    if not differences or any(differences.values()):
        return facts
    repeated = repeat(until - time.monotonic())
    if not repeated.get("trace"):
        reasons = filter(None, map(repeated.get, ("error", "died", "hung")))
        return facts | {"alone": next(reasons, "for lack of time")}
    place = "in a fresh process"
    if len(repeated["trace"]) < facts["compared"]:
        place += f" (the first {len(repeated['trace']):,})"
    return with_repetition(facts, place, trace, repeated["trace"])


def _files_here() -> FilesHere | None:
    """Return the files in the current folder, without output of this command; None for a large folder."""
    outputs = {stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream}
    inodes = {os.fstat(output).st_ino for output in outputs}
    with suppress(OSError), os.scandir() as folder:  # unless it cannot be read
        entries = list(islice(folder, MAX_ENTRIES + 1))
        if len(entries) > MAX_ENTRIES:
            return None
        files = set()
        for entry in entries:
            with suppress(OSError):  # removed meanwhile
                status = entry.stat()
                if entry.is_file() and status.st_ino not in inodes:
                    files.add((entry.name, status.st_size, status.st_mtime_ns))
        return files
    return None


def _written_since(files_before: FilesHere | None) -> list[str]:
    files = None if files_before is None else _files_here()
    if files_before is None or files is None:
        return []
    return sorted(name for name, _, _ in files - files_before)


def simulator(settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the packages and the fingerprint of the environment of these settings, from a process of its own."""
    facts = examine_apart(settings, seconds, FIRST_SIZES)
    fingerprint = fingerprint_of(facts.get("trace", ()))
    return {"packages": facts.get("packages", {}), "first_steps": fingerprint}


def _ended_in_a_check(facts: Facts) -> bool:
    """Return whether the process ended, or hung, between playing and timing updates."""
    has_ended = bool(facts.keys() & {"hung", "died"})
    return has_ended and "sizes" in facts and facts["stage"] in CHECKS


def _trouble_with_two(facts: Facts) -> bool:
    """Return whether something went wrong only while the process had two instances."""
    if _end_with_two(facts):
        return True
    differences = facts.get("same", {})
    return any(differences.values()) and not differences.get("after other episodes", True)


def _end_with_two(facts: Facts) -> str:
    """Return how the process ended or hung with a second instance; "" if it did not."""
    if facts["stage"] != WITH_SECOND:
        return ""
    return facts.get("hung", "") or facts.get("died", "")


def _examined_alone(facts: Facts, trace: Sequence[Any], repeated: Sequence[Any]) -> Facts:
    """Return the facts about an environment that fails or differs while a process has two instances of it.

    If a single instance plays the same steps in another process, the second instance disturbed the first one.
    """
    place = "in a fresh process"
    repeated_facts = with_repetition(facts, place, trace, repeated)
    if not repeated or repeated_facts["same"][place]:
        return facts
    end = _end_with_two(facts)
    if not end:
        return facts | {"disturbed": True, "elsewhere": True}
    survived = {name: fact for name, fact in repeated_facts.items() if name not in ("hung", "died")}
    return survived | {"stage": "over", "single": end, "silent": True, "elsewhere": True}
