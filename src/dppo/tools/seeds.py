"""`dppo train ENV_ID --seeds 1..5`: a process and a run folder for each seed, resumed as a whole."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dppo.config import Config
from dppo.config.plain import plain, refuse_objects
from dppo.config.resume import changes_on_resume
from dppo.errors import ConfigError, DppoError, counted, printable
from dppo.invocation import VARIABLE, program
from dppo.machine import cores_in_words, usable_cores
from dppo.records.files.checkpoint import find, has_any
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_files import CONFIG
from dppo.records.files.run_folder import as_file_name, settings_to_resume
from dppo.records.metrics.reading import last_row
from dppo.records.terminal.view import duration, number
from dppo.signals import StopSignals
from dppo.tools.curves import RETURN
from dppo.tools.plot import plot

RUN_MB = 600  # of memory, for a run in its own process
LOOK_S, PRINT_S = 0.25, 60.0  # between two looks; between two lines about a seed, where there is no terminal
MOST = 1000
SETTINGS = "settings.yaml"  # of all seeds


def seeds_of(words: str) -> list[int]:
    """Return the seeds that `1..5`, `1,3,7` or `1..3,7` names; raise a ConfigError if it names less than two."""
    found: list[int] = []
    for part in words.split(","):
        if not (ends := re.fullmatch(r"\s*(\d{1,10})(?:\.\.(\d{1,10}))?\s*", part)):
            raise ConfigError(f"seeds={words}: {part!r} is not a seed. Use --seeds 1..5 or --seeds 1,3,7.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        found += range(first, min(last, first + MOST) + 1)
    if not 2 <= len(set(found)) == len(found) <= MOST:
        fact = f"names {counted(len(found), 'seed')}, {len(set(found)):,} of them different"
        raise ConfigError(f"seeds={words}: {fact}. Name 2 to {MOST:,} different ones: 1..5, or 1,3,7.")
    return found


@dataclass
class Seed:
    """A run of one seed, in the folder `run_dir` of its settings."""

    config: Config
    folder: Path
    state: str = "waiting"
    process: subprocess.Popen[bytes] | None = None

    def line(self) -> str:
        """Return its state and its progress."""
        row, total = last_row(self.folder), self.config.iterations * self.config.batch_size
        line = f"seed {self.config.seed:<4} {self.state:8}"
        if row:
            left = duration((total - row["global_step"]) / (row.get("charts/SPS") or 1.0))
            line += f" {row['global_step'] / total:4.0%} of {total:,} steps, return {number(row.get(RETURN))}"
            line += f", {left} left" if self.state == "running" else ""
        return line.rstrip()

    def start(self) -> None:
        """Train in a process that Ctrl-C reaches through this one, and that saves and ends when this one is killed."""
        words = ["--config", self.folder.with_name(SETTINGS), "--seed", self.config.seed, "--run-dir", self.folder]
        words += ["--preset", "none", "--resume", "auto", "--progress", "plain"]
        prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: 0
        with self.folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dppo", "train", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {VARIABLE: program()},
                preexec_fn=lambda: prctl(1, signal.SIGTERM),  # noqa: PLW1509  PR_SET_PDEATHSIG; there are no threads
            )
        self.state = "running"

    def look(self, stopped: signal.Signals | None) -> None:
        """Take note of its end."""
        if self.state == "running" and self.process is not None and (code := self.process.poll()) is not None:
            self.state = "done" if code == 0 else "stopped" if stopped else f"failed (exit code {code})"


def train_seeds(
    settings: Mapping[str, Any], notes: Sequence[str], seeds: str | None = None, seeds_at_once: int | None = None
) -> int:
    """Train several seeds; return the exit code: 0, 1 if one failed, or 128 + n if signal n stopped them.

    Raises a ConfigError before the first starts if a setting is invalid, or differs from that of a run that exists.
    """
    if seeds is None:
        raise ConfigError(f"seeds_at_once={seeds_at_once} has no effect without --seeds. Leave it out.")
    runs = _planned(settings, seeds_of(seeds))
    at_once, why = _number_at_once(runs[0].config, seeds_at_once)
    parent = runs[0].folder.parent
    shared = {name: value for name, value in settings.items() if name != "run_dir"}
    with writing(f"run_dir={parent}"):
        make_folder(parent)
        write_file(parent / SETTINGS, yaml.safe_dump(plain(shared)).encode())
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=runs[0].config.progress == "off")
    together = "one after another" if at_once == 1 else f"{at_once} at a time"
    console.print(*notes, f"{counted(len(runs), 'seed')}, {together}: {why}. Folder: {parent}", sep="\n")
    received = _run(runs, at_once, console)
    failed = [run for run in runs if run.state.startswith("failed")]
    for run in failed:
        log = run.folder.with_suffix(".log")
        last = log.read_bytes()[-2000:].decode("utf8", "replace").strip().rpartition("\n")[2]
        print(printable(f"seed {run.config.seed} {run.state}: {last}\n  see {log}"), file=sys.stderr)
    if received is not None or failed:
        print(f"The same command with --run-dir {parent} continues the seeds that have not finished.", file=sys.stderr)
    if received is not None:
        return 128 + received
    try:
        for line in plot([run.folder for run in runs if run.state == "done"], parent / "seeds.png"):
            console.print(printable(line))
    except DppoError as error:  # for example because no episode has ended
        print(error, file=sys.stderr)
    return int(bool(failed))


def _planned(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Seed]:
    """Return the runs, in folders beside each other, and mark those that have finished."""
    first = Config(**{**settings, "seed": seeds[0]})
    refuse_objects(settings, "which the processes of several seeds cannot be given")
    name = f"{as_file_name(first.env_name)}__{as_file_name(first.name)}__seeds__{time.strftime('%Y%m%d-%H%M%S')}"
    parent, runs = (first.run_dir or Path("runs") / name).absolute(), []
    if (parent / CONFIG).exists():
        raise ConfigError(f"run_dir={parent}: contains a single run. Use another folder for several seeds.")
    for seed in seeds:
        folder = parent / f"seed_{seed}"
        run = Seed(replace(first, seed=seed, run_dir=folder), folder)
        if has_any(folder):
            state = find(folder).checkpoint.state
            changes_on_resume(settings_to_resume(folder), run.config, folder, state["iteration"], several=True)
            waiting = (state.get("evaluations") or {}).get("open")
            run.state = "done" if state["iteration"] >= first.iterations and not waiting else "waiting"
        runs.append(run)
    return runs


def _number_at_once(config: Config, asked: int | None) -> tuple[int, str]:
    """Return how many run at the same time, and why."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"seeds_at_once={asked}: must be at least 1. Leave it out.")
        return asked, "as asked for"
    if config.num_actors or config.num_learners or config.device != "cpu":
        return 1, "each uses Ray, or a GPU"
    memory_mb = psutil.virtual_memory().available / 2**20
    fitting = max(1, min(usable_cores() // max(1, config.learner_threads), int(memory_mb / RUN_MB)))
    return fitting, f"{cores_in_words()}, {memory_mb / 1024:.0f} GB of free memory"


def _run(runs: Sequence[Seed], at_once: int, console: Console) -> signal.Signals | None:
    """Run all that have not finished; return the signal that stopped them."""
    said, said_at, passed_on = dict[int, str](), time.monotonic(), False
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with StopSignals() as stop, live or nullcontext():
        while True:
            received = stop.received  # of this round: one that arrives meanwhile counts in the next
            for run in runs:
                run.look(received)
            running = [run for run in runs if run.state == "running"]
            waiting = [run for run in runs if run.state == "waiting" and received is None]
            for run in waiting[: max(0, at_once - len(running))]:
                run.start()
            for run in running if received is not None and not passed_on else ():
                assert run.process is not None
                run.process.send_signal(received or signal.SIGTERM)
            passed_on = received is not None
            if live is not None:
                live.update(Text("\n".join(run.line() for run in runs)), refresh=True)
            due = time.monotonic() - said_at > PRINT_S
            for run in runs if live is None else ():
                if said.get(run.config.seed) != run.state or (due and run.state == "running"):
                    console.print(run.line())
                    said[run.config.seed], said_at = run.state, time.monotonic()
            if not running and not waiting:
                return stop.received
            time.sleep(LOOK_S)
