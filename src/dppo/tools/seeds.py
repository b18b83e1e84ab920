"""`dppo train ENV_ID --seeds 1..5`: a process and a run folder for each seed, resumed as a whole."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dppo.commands.flags import as_words
from dppo.config import Config
from dppo.config.plain import as_typed, plain, refuse_objects
from dppo.config.resume import changed_settings, changes_on_resume
from dppo.errors import ConfigError, DppoError, counted, printable
from dppo.invocation import VARIABLE, typed_path
from dppo.machine import cores_in_words, usable_cores
from dppo.records.files.checkpoint import find, has_any
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_files import CONFIG
from dppo.records.files.run_folder import new_folder, settings_to_resume
from dppo.records.metrics.reading import last_row, missing_steps
from dppo.records.terminal.figures import duration, number
from dppo.records.terminal.view import has_trained
from dppo.signals import StopSignals
from dppo.tools.curves import NOT_COMPARED, RETURN
from dppo.tools.plot import plot
from dppo.tools.whole_time import SeveralRuns, WholeTime

RUN_MB = 600  # memory of a run in a process of its own
LOOK_EVERY_S = 0.25
PRINT_EVERY_S = 60.0  # a line about each running seed, where there is no terminal
MAX_SEEDS = 1000
SETTINGS = "settings.yaml"  # settings of all seeds
PR_SET_PDEATHSIG = 1
LOG_END = 2000  # bytes of a log in which the last line is looked for


def seeds_of(words: str) -> list[int]:
    """Return the seeds that `1..5`, `1,3,7` or `1..3,7` names; raise a ConfigError if it names less than two."""
    seeds = list[int]()
    for part in words.split(","):
        ends = re.fullmatch(r"\s*(\d{1,10})(?:\.\.(\d{1,10}))?\s*", part)
        if ends is None:
            raise ConfigError(
                f"seeds={words}: {part!r} is not a seed. Use --seeds 1..5 or --seeds 1,3,7."
            )
        first = int(ends[1])
        last = int(ends[2] or ends[1])
        seeds += range(first, min(last, first + MAX_SEEDS) + 1)
    if not 2 <= len(set(seeds)) == len(seeds) <= MAX_SEEDS:
        fact = f"names {counted(len(seeds), 'seed')}"
        if len(set(seeds)) < len(seeds):
            fact += f", {len(set(seeds)):,} of them different"
        raise ConfigError(
            f"seeds={words}: {fact}. Name 2 to {MAX_SEEDS:,} different ones: 1..5, or 1,3,7."
        )
    return seeds


@dataclass
class Seed:
    """A run of one seed, in the folder `run_dir` of its settings."""

    config: Config
    folder: Path
    state: str = "waiting"
    kept_text: str = ""
    """Settings of a finished run that differ from those asked for, in words."""
    process: subprocess.Popen[bytes] | None = None
    printed_state: str = ""
    printed_at: float = 0.0

    @property
    def log(self) -> Path:
        """The file that its process prints to."""
        return self.folder.with_suffix(".log")

    def line(self) -> str:
        line = f"seed {self.config.seed:<4} {self.state:8}"
        row = last_row(self.folder)
        if row:
            total = self.config.total_steps - missing_steps(row, self.config.batch_size)
            done = row["global_step"]
            line += f" {done / total:4.0%} of {total:,} steps, return {number(row.get(RETURN))}"
            if self.state == "running" and has_trained(row, self.config.collected_by_prior):
                line += f", {duration((total - done) / (row.get('charts/SPS') or 1.0))} left"
        return line.rstrip() + self.kept_text

    def start(self) -> None:
        """Train in a process that Ctrl-C reaches through this one, and that saves and ends when this one is killed."""
        flags = {
            "config": self.folder.with_name(SETTINGS),
            "seed": self.config.seed,
            "run_dir": self.folder,
            "preset": "none",
            "resume": "auto",
            "progress": "plain",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dppo", "train", *as_words(flags)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {VARIABLE: typed_path()},
                preexec_fn=_end_with_parent(),  # noqa: PLW1509  there are no threads
            )
        self.state = "running"

    def look(self, stopped: signal.Signals | None) -> None:
        """Note the end of its process, if it has ended."""
        if self.state != "running" or self.process is None:
            return
        code = self.process.poll()
        if code == 0:
            self.state = "done"
        elif code is not None:
            self.state = "stopped" if stopped else f"failed (exit code {code})"

    def print_if_due(self, console: Console) -> None:
        """Print a line if its state has changed, and every minute while it is running."""
        now = time.monotonic()
        is_late = self.state == "running" and now - self.printed_at > PRINT_EVERY_S
        if is_late or self.state != self.printed_state:
            console.print(self.line())
            self.printed_state = self.state
            self.printed_at = now


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function that lets Linux send its process SIGTERM when the parent dies; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)  # loaded before the fork
    return lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def train_seeds(
    settings: Mapping[str, Any],
    notes: Sequence[str],
    seeds: str | None = None,
    seeds_at_once: int | None = None,
) -> int:
    """Train several seeds; return the exit code: 0, 1 if one failed, or 128 + n if signal n stopped them.

    Raises a ConfigError before the first starts if a setting is invalid, or differs from an existing run.
    """
    if seeds is None:
        raise ConfigError(
            f"seeds_at_once={seeds_at_once} has no effect without --seeds. Leave it out."
        )
    runs = _planned(settings, seeds_of(seeds))
    at_once, reason = _number_at_once(runs[0].config, seeds_at_once)
    parent = runs[0].folder.parent
    shared = {name: value for name, value in settings.items() if name != "run_dir"}
    with writing(f"run_dir={parent}"):
        make_folder(parent)
        write_file(parent / SETTINGS, yaml.safe_dump(plain(shared)).encode())
    console = Console(
        highlight=False, markup=False, soft_wrap=True, quiet=runs[0].config.progress == "off"
    )
    order = "one after another"
    if at_once != 1:
        order = f"{at_once} at a time"
    console.print(
        *notes, f"{counted(len(runs), 'seed')}, {order}: {reason}. Folder: {parent}", sep="\n"
    )
    stopped_by = _run(runs, at_once, console)
    failed = [run for run in runs if run.state.startswith("failed")]
    reasons = dict[str, list[Seed]]()
    for run in failed:
        reasons.setdefault(f"{run.state}: {_last_line(run.log)}", []).append(run)
    for reason, alike in reasons.items():
        names = ", ".join(str(run.config.seed) for run in alike)
        print(printable(f"seed {names} {reason}\n  see {alike[0].log}"), file=sys.stderr)
    if stopped_by is not None or failed:
        folder = quote(str(parent))
        line = (
            f"The same command with --run-dir {folder} continues the seeds that have not finished."
        )
        print(printable(line), file=sys.stderr)
    if stopped_by is not None:
        return 128 + stopped_by
    finished = [run.folder for run in runs if run.state == "done"]
    if not finished:
        return 1
    try:
        for line in plot(finished, parent / "seeds.png"):
            console.print(printable(line))
    except DppoError as error:  # for example because no episode has ended
        print(error, file=sys.stderr)
    return 1 if failed else 0


def _last_line(log: Path) -> str:
    end = log.read_bytes()[-LOG_END:].decode("utf8", "replace")
    return end.strip().rpartition("\n")[2]


def _planned(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Seed]:
    """Return the runs, each in a folder of its own inside the user's, and mark those that have finished."""
    first = Config(**{**settings, "seed": seeds[0]})
    refuse_objects(settings, "which the processes of several seeds cannot be given")
    parent = (first.run_dir or new_folder(first.env_name, first.name, "seeds")).absolute()
    if (parent / CONFIG).exists():
        raise ConfigError(
            f"run_dir={parent}: contains a single run. Use another folder for several seeds."
        )
    runs = []
    for seed in seeds:
        folder = parent / f"seed_{seed}"
        run = Seed(replace(first, seed=seed, run_dir=folder), folder)
        if has_any(folder):
            state = find(folder).checkpoint.state
            stored_settings = settings_to_resume(folder)
            changes_on_resume(
                stored_settings, run.config, folder, state["iteration"], is_of_seeds=True
            )
            open_evaluations = (state.get("evaluations") or {}).get("open")
            if state["iteration"] >= first.iterations and not open_evaluations:
                run.state = "done"
                run.kept_text = "".join(
                    f", keeps {name}={as_typed(was)}, not {as_typed(value)}"
                    for name, was, value in changed_settings(stored_settings, run.config)
                    if name not in NOT_COMPARED
                )
        runs.append(run)
    return runs


def _number_at_once(config: Config, requested: int | None) -> tuple[int, str]:
    if requested is not None:
        if requested < 1:
            raise ConfigError(f"seeds_at_once={requested}: must be at least 1. Leave it out.")
        return requested, "as asked for"
    if config.num_actors or config.num_learners or config.device != "cpu":
        return 1, "each uses Ray, or a GPU"
    memory_mb = psutil.virtual_memory().available / 2**20
    by_cores = usable_cores() // max(1, config.learner_threads)
    by_memory = int(memory_mb / RUN_MB)
    at_once = max(1, min(by_cores, by_memory))
    return at_once, f"{cores_in_words()}, {memory_mb / 1024:.0f} GB of free memory"


def _run(runs: Sequence[Seed], at_once: int, console: Console) -> signal.Signals | None:
    """Run all that have not finished; return the signal that stopped them."""
    signal_sent = False
    num_left = sum(run.state == "waiting" for run in runs)
    runs_left = SeveralRuns(num_left, runs[0].config.total_steps, at_once=at_once)
    whole_time = WholeTime(runs_left, console.print)
    live = None
    if console.is_terminal:
        live = Live(console=console, auto_refresh=False)
    with StopSignals() as stop, live or nullcontext():
        while True:
            # signals of this round: one that arrives meanwhile counts in the next round
            stopped_by = stop.received
            for run in runs:
                run.look(stopped_by)
            running = [run for run in runs if run.state == "running"]
            waiting = [run for run in runs if run.state == "waiting" and stopped_by is None]
            for run in waiting[: max(0, at_once - len(running))]:
                run.start()
            if stopped_by is not None and not signal_sent:
                _send(stopped_by, running)
                signal_sent = True
            if waiting:
                _follow_first(running, whole_time)
            if live is not None:
                lines = "\n".join(run.line() for run in runs)
                live.update(Text(lines), refresh=True)
            else:
                for run in runs:
                    run.print_if_due(console)
            if not running and not waiting:
                return stop.received
            time.sleep(LOOK_EVERY_S)


def _follow_first(running: Sequence[Seed], whole_time: WholeTime) -> None:
    """Let the first of the running seeds show how long all take."""
    row = last_row(running[0].folder) if running else {}
    if row:
        whole_time.on_iteration(row)


def _send(stop_signal: signal.Signals, running: Sequence[Seed]) -> None:
    for run in running:
        assert run.process is not None
        run.process.send_signal(stop_signal)
