"""`dppo train ENV_ID --seeds 1..5`: a process and a run folder for each seed, resumed as a whole."""

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dppo.cluster.ray.capacity import usable_cores
from dppo.commands.plot import RETURN, plot
from dppo.config import Config
from dppo.config.files import plain
from dppo.config.resume import changes_on_resume
from dppo.errors import ConfigError, counted, printable
from dppo.records.files.checkpoint import FOLDER, file_name
from dppo.records.files.disk import make_folder, write_file
from dppo.records.files.run_folder import CONFIG, as_file_name, settings_to_resume
from dppo.records.metrics.reading import last_row
from dppo.records.terminal.view import duration
from dppo.records.terminal.view import number as figure
from dppo.records.together import interval, read_one
from dppo.signals import StopSignals

RUN_MB = 600  # of memory, for a run in its own process
LOOK_S, PRINT_S = 0.25, 60.0  # between two looks; between two lines about a seed, where there is no terminal
MOST = 1000


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

    @property
    def log(self) -> Path:
        """The file that its process prints to."""
        return self.folder.with_suffix(".log")

    def line(self) -> str:
        """Return its state and its progress."""
        row, total = last_row(self.folder), self.config.iterations * self.config.batch_size
        if not row:
            return f"seed {self.config.seed:<4} {self.state}"
        share, left = row["global_step"] / total, (total - row["global_step"]) / (row.get("charts/SPS") or 1.0)
        ends = f", {duration(left)} left" if self.state == "running" else ""
        reached = f"{share:4.0%} of {total:,} steps, return {figure(row.get(RETURN))}{ends}"
        return f"seed {self.config.seed:<4} {self.state:8} {reached}"

    def start(self, settings: Path) -> None:
        """Train in a process that Ctrl-C reaches through this one, and that saves and ends when this one is killed."""
        words = ["--config", settings, "--preset", "none", "--seed", self.config.seed, "--run-dir", self.folder]
        prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dppo", "train", *map(str, words), "--resume", "auto", "--progress", "plain"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: prctl(1, signal.SIGTERM),  # noqa: PLW1509  PR_SET_PDEATHSIG; there are no threads
            )
        self.state = "running"

    def look(self, stopped: signal.Signals | None) -> None:
        """Take note of its end."""
        if self.state == "running" and self.process is not None and (code := self.process.poll()) is not None:
            self.state = "done" if code == 0 else "stopped" if stopped else f"failed (exit code {code})"

    def last_line(self) -> str:
        """Return the last line that its process has printed."""
        return self.log.read_bytes()[-2000:].decode("utf8", "replace").strip().rpartition("\n")[2]


def train_seeds(
    settings: Mapping[str, Any], notes: Sequence[str], seeds: str | None = None, seeds_at_once: int | None = None
) -> int:
    """Train several seeds; return the exit code: 0, 1 if one failed, or 128 + n if signal n stopped them.

    Raises a ConfigError before the first starts if a setting is invalid, or differs from that of a run that exists.
    """
    if seeds is None:
        raise ConfigError(f"seeds_at_once={seeds_at_once} has no effect without --seeds. Leave it out.")
    runs, parent = _planned(settings, seeds_of(seeds))
    number, why = _number_at_once(runs[0].config, seeds_at_once)
    make_folder(parent)
    shared = {name: value for name, value in settings.items() if name != "run_dir"}
    write_file(parent / "settings.yaml", yaml.safe_dump(plain(shared)).encode())
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=runs[0].config.progress == "off")
    together = "one after another" if number == 1 else f"{number} at a time"
    console.print(*notes, f"{counted(len(runs), 'seed')}, {together}: {why}. Folder: {parent}", sep="\n")
    received = _run(runs, number, parent / "settings.yaml", console)
    failed = [run for run in runs if run.state.startswith("failed")]
    for run in failed:
        print(printable(f"seed {run.config.seed} {run.state}: {run.last_line()}\n  see {run.log}"), file=sys.stderr)
    if received is not None or failed:
        print(f"The same command with --run-dir {parent} continues the seeds that have not finished.", file=sys.stderr)
    if received is not None:
        return 128 + received
    for line in _aggregated([run for run in runs if run.state == "done"], parent):
        console.print(printable(line))
    return int(bool(failed))


def _planned(settings: Mapping[str, Any], seeds: Sequence[int]) -> tuple[list[Seed], Path]:
    """Return the runs, those that have finished marked, and the folder around them."""
    first = Config(**{**settings, "seed": seeds[0]})
    name = f"{as_file_name(first.env_name)}__{first.name}__seeds__{time.strftime('%Y%m%d-%H%M%S')}"
    parent = (first.run_dir or Path("runs") / name).absolute()
    if (parent / CONFIG).exists():
        raise ConfigError(f"run_dir={parent}: contains a single run. Use another folder for several seeds.")
    runs = []
    for seed in seeds:
        folder = parent / f"seed_{seed}"
        run = Seed(replace(first, seed=seed, run_dir=folder), folder)
        if (folder / FOLDER / file_name(first.iterations)).exists():
            changes_on_resume(settings_to_resume(folder), run.config, folder, first.iterations)
            run.state = "done"
        runs.append(run)
    return runs, parent


def _number_at_once(config: Config, asked: int | None) -> tuple[int, str]:
    """Return how many run at the same time, and why."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"seeds_at_once={asked}: must be at least 1. Leave it out.")
        return asked, "as asked for"
    if config.num_actors or config.num_learners or config.device != "cpu":
        return 1, "each uses Ray, or a GPU"
    memory_mb = psutil.virtual_memory().available / 2**20
    number = max(1, min(usable_cores() // max(1, config.learner_threads), int(memory_mb / RUN_MB)))
    return number, f"{counted(usable_cores(), 'core')}, {memory_mb / 1024:.0f} GB of free memory"


def _run(runs: Sequence[Seed], at_once: int, settings: Path, console: Console) -> signal.Signals | None:
    """Run all that have not finished; return the signal that stopped them."""
    shown, printed = dict[int, str](), time.monotonic()
    with StopSignals() as stop, ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        passed_on = False
        while True:
            for run in runs:
                run.look(stop.received)
            running = [run for run in runs if run.state == "running"]
            waiting = [run for run in runs if run.state == "waiting" and stop.received is None]
            if stop.received is not None and not passed_on:
                passed_on = True
                for run in running:
                    run.process.send_signal(stop.received) if run.process else None
            for run in waiting[: max(0, at_once - len(running))]:
                run.start(settings)
            due = time.monotonic() - printed > PRINT_S
            printed = time.monotonic() if due else printed
            if live is not None:
                live.update(Text("\n".join(run.line() for run in runs)), refresh=True)
            for run in runs if live is None else ():
                if shown.get(run.config.seed) != run.state or (due and run.state == "running"):
                    console.print(run.line())
                    shown[run.config.seed] = run.state
            if not running and not waiting:
                return stop.received
            time.sleep(LOOK_S)


def _aggregated(finished: Sequence[Seed], parent: Path) -> list[str]:
    """Write seeds.png and seeds.json; return lines about the mean of the finished seeds, and its interval."""
    read = {run.config.seed: read_one(run.folder, RETURN) for run in finished}
    last = {seed: float(one.values[-1]) for seed, one in read.items() if len(one.values)}
    if not last:
        return ["There is no episode to report."]
    mean, low, high = interval([np.array(list(last.values()))])
    found = {
        "env_id": finished[0].config.env_name,
        "metric": RETURN,
        "last": last,
        "mean": mean,
        "low": low,
        "high": high,
    }
    write_file(parent / "seeds.json", json.dumps(found, indent=1).encode() + b"\n")
    return [*plot([run.folder for run in finished], parent / "seeds.png"), f"Figures: {parent / 'seeds.json'}"]
