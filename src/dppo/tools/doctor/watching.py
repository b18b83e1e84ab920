"""Watch the process that examines an environment: it may hang, die, or print megabytes."""

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
from functools import partial
from threading import Thread
from typing import Any

import psutil

from dppo.envs.checks.faults import PACKAGE
from dppo.machine import usable_cores
from dppo.tools.doctor.playing import WITH_SECOND, agreement

PATIENCE_S = 10.0  # after the time is up, for a call of which none has taken longer; three times the longest if one has
SLOW_S = 60.0  # after the time is up, for an update, and to close
CALLS = {"m": ", in a constructor (call {:,})", "r": ", in reset (call {:,})", "s": ", in step (call {:,})"}
MADE = "d\n"
STAGES = {
    "making": "making the environment",
    "playing": "playing episodes",
    "comparing with other episodes": "playing the same episodes again",
    WITH_SECOND: "playing the same episodes in a second instance",
    "updating": "measuring how long updates take",
    "closing": "closing the environment",
}
AGAIN = {**STAGES, "playing": "playing the same episodes again"}
EXAMINATION = ("-m", "dppo.tools.doctor.examination")


class Watch:
    """Collects the reports of a process that is examined, and describes its end."""

    def __init__(self, program: Sequence[str], wanted: dict[str, Any], show: Callable[[str], None]) -> None:
        """Start `python PROGRAM DESCRIPTOR`, with `wanted` as JSON in its stdin; `show` is called with each stage."""
        self.facts: dict[str, Any] = {"output": 0, "last_line": "", "stage": "starting"}
        self._show, self._call, self._calls, self._stack = show, "", 0, ""
        self._since, self._longest = time.monotonic(), 0.0
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as given:  # not an argument, which has 128 kB at most
            given.write(json.dumps(wanted).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, *program, str(writing)], pass_fds=[writing], start_new_session=True,
                stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        os.close(writing)
        readers = self._read_output, partial(self._read_reports, reading)
        self._threads = [Thread(target=one, daemon=True) for one in readers]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> dict[str, Any]:
        """Return the facts when the process has ended, or has been ended because it hangs."""
        until, patience, facts = time.monotonic() + seconds, min(PATIENCE_S, seconds), self.facts
        try:
            while self._process.poll() is None and not facts.keys() & {"hung", "late"}:
                slow = facts["stage"] in ("updating", "closing") or (facts["stage"] == "making" and not self._call)
                silent_s, allowed_s = (
                    time.monotonic() - self._since,
                    SLOW_S if slow else max(patience, 3 * self._longest),
                )
                if silent_s > allowed_s and (facts["stage"] == "over" or time.monotonic() > until):
                    if facts["stage"] == "updating":  # which is no affair of the environment
                        facts["late"] = f"{silent_s:.0f} s"
                    else:
                        facts["hung"] = (
                            f"{self._doing()} has not returned for {silent_s:.0f} s. {self._where()}".rstrip(". ")
                        )
                time.sleep(0.02)
        finally:
            self._end()
        for thread in self._threads:
            thread.join(1.0)  # a process that has escaped may hold the pipes
        code = self._process.returncode
        if not facts.keys() & {"hung", "late"} and facts["stage"] != "over":
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            facts["died"] = f"its process {how} while {self._doing()}. {self._place() or facts['last_line']}".rstrip(
                ". "
            )
        return facts

    def _doing(self) -> str:
        return self.facts["stage"] + self._call.format(self._calls)

    def _where(self) -> str:
        """Return the place of the main thread, which it prints on a signal."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return self._place()

    def _place(self) -> str:
        """Return the place of the main thread in the user's code, or at all, if stacks were printed."""
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', self._stack.rpartition("most recent call first")[2])
        others = re.compile(f"{re.escape(PACKAGE)}|.*(/lib/python|<frozen)")
        users = [one for one in frames if not others.match(one[0])]
        return "It was in {}, line {}, in {}.".format(*(users or frames)[0]) if frames else ""

    def _end(self) -> None:
        """End the process and all that it has started, also in sessions of their own."""
        ours = list[Any]()
        with suppress(psutil.Error):
            ours = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in ours:
            with suppress(psutil.Error):
                child.kill()
        self._process.wait()

    def _read_output(self) -> None:
        with self._process.stdout as output:  # type: ignore[union-attr]
            while data := os.read(output.fileno(), 1 << 16):
                self.facts["output"] += len(data)
                last = data.decode(errors="replace").strip().rpartition("\n")[2][-100:]
                self.facts["last_line"] = last or self.facts["last_line"]

    def _read_reports(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as reports:
            for line in reports:
                before, self._since = self._since, time.monotonic()
                if self._call:
                    self._longest = max(self._longest, self._since - before)
                if line == MADE:
                    self._call = ""
                elif line[:-1] in CALLS:
                    self._call, self._calls = CALLS[line[0]], self._calls + 1
                elif line[0] != "{":
                    self._stack += line
                else:
                    new = json.loads(line)
                    self.facts |= new
                    if "stage" in new:
                        self._call = ""
                        self._show(new["stage"])


def examine(
    settings: dict[str, Any], seconds: float, show: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Return the facts about the environment of these settings, measured in a process and repeated in another one."""
    until, wanted = time.monotonic() + seconds, {"settings": settings, "seconds": seconds}

    def show_first(stage: str) -> None:
        if stage != "over":
            show(STAGES.get(stage, stage))

    def show_again(stage: str) -> None:
        if stage != "over":
            show(f"in a second process: {AGAIN.get(stage, stage)}")

    facts = Watch(EXAMINATION, wanted | {"sizes": []}, show_first).wait(seconds)
    facts |= {"cpus": usable_cores(), "available_mb": psutil.virtual_memory().available / 2**20}
    trace, same = facts.pop("trace", ()), facts.get("same", {})
    disturbed = [where for where in same if same[where]]  # only where there are two instances in the process
    stopped = [facts[end] for end in ("hung", "died") if end in facts and facts["stage"] == WITH_SECOND]
    once_more = wanted | {"sizes": facts.get("sizes", [])[:6]}
    if stopped or (disturbed and not same.get("after other episodes", True)):
        return _one_alone(facts, trace, stopped, Watch(EXAMINATION, once_more, show_again))
    if same and not any(same.values()):
        again = Watch(EXAMINATION, once_more, show_again).wait(max(5, until - time.monotonic()))
        if not (made := again.get("trace", ())):
            why = (again.get(one) for one in ("error", "died", "hung"))
            return facts | {"alone": next(filter(None, why), "for lack of time")}
        few = f" (the first {len(made):,})" if len(made) < facts["compared"] else ""
        facts = agreement(facts, f"in a fresh process{few}", trace, made)
    return facts


def _one_alone(facts: dict[str, Any], trace: Sequence[Any], stopped: list[str], watch: Watch) -> dict[str, Any]:
    """Return the facts about an environment with which something is wrong while a process has two of them.

    If one alone plays the same steps in another process, a second one is what disturbs it.
    """
    again = watch.wait(max(5, PATIENCE_S)).get("trace", ())
    alone = agreement(facts, "in a fresh process", trace, again)
    if not again or alone["same"]["in a fresh process"]:
        return facts
    if not stopped:
        return facts | {"disturbed": True, "elsewhere": True}
    kept = {name: fact for name, fact in alone.items() if name not in ("hung", "died")}
    return kept | {"stage": "over", "single": stopped[0], "silent": True, "elsewhere": True}
