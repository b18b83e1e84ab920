"""`dppo train ENV_ID --seeds 1..5`: a process and a run folder for each seed, resumed as a whole."""

import ctypes
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dppo.cluster.ray.capacity import usable_cores
from dppo.commands.plot import RETURN, plot
from dppo.commands.train import Arguments
from dppo.config import Config
from dppo.config.files import plain
from dppo.config.resume import changes_on_resume
from dppo.errors import ConfigError, counted, printable
from dppo.records.files.checkpoint import FOLDER, file_name
from dppo.records.files.disk import make_folder, write_file
from dppo.records.files.run_folder import CONFIG, as_file_name, settings_to_resume
from dppo.records.metrics.reading import last_row
from dppo.records.terminal.view import duration, number
from dppo.records.together import grouped_by_settings, interval, read_curve
from dppo.signals import StopSignals

RUN_MB = 600  # of memory, for a run in its own process
POLL_S, PRINT_S = 0.25, 60.0  # between two looks; between two lines about a seed, where there is no terminal
MOST_SEEDS = 1000


def seeds_of(words: str) -> list[int]:
    """Return the seeds that `1..5`, `1,3,7` or `1..3,7` names; raise a ConfigError if it names less than two."""
    found: list[int] = []
    for part in words.split(","):
        if not (ends := re.fullmatch(r"\s*(\d{1,10})(?:\.\.(\d{1,10}))?\s*", part)):
            raise ConfigError(f"seeds={words}: {part!r} is not a seed. Use --seeds 1..5 or --seeds 1,3,7.")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        found += range(first, min(last, first + MOST_SEEDS) + 1)
    if not 2 <= len(found) <= MOST_SEEDS or len(set(found)) < len(found):
        fact = "names a seed twice" if len(set(found)) < len(found) else f"names {counted(len(found), 'seed')}"
        raise ConfigError(f"seeds={words}: {fact}. Name 2 to {MOST_SEEDS:,} different ones: 1..5, or 1,3,7.")
    return found


@dataclass
class Seed:
    """A run of one seed."""

    config: Config
    folder: Path
    state: str = "waiting"
    process: subprocess.Popen[bytes] | None = None

    def line(self) -> str:
        """Return its state and its progress."""
        row, of = last_row(self.folder), self.config
        total, steps = of.iterations * of.batch_size, row.get("global_step", 0)
        left = (total - steps) / row["charts/SPS"] if row.get("charts/SPS") else float("nan")
        ends = f", {duration(left)} left" if self.state == "running" else ""
        reached = f"{steps / total:4.0%} of {total:,} steps, return {number(row.get(RETURN))}{ends}" if row else ""
        return f"seed {of.seed:<4} {self.state:9} {reached}".rstrip()

    @property
    def finished(self) -> bool:
        """True if the last checkpoint of the run exists."""
        return (self.folder / FOLDER / file_name(self.config.iterations)).exists()

    def start(self, settings: Path) -> None:
        """Train it in a process that ends, after saving, when this one does."""
        words = ["--config", settings, "--preset", "none", "--seed", self.config.seed, "--run-dir", self.folder]
        words = ["train", *words, "--resume", "auto", "--progress", "plain"]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dppo", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it once, from here
                preexec_fn=_ends_with_parent(),  # noqa: PLW1509  no thread runs here
            )
        self.state = "running"

    @property
    def output(self) -> Path:
        """The file that its process prints to."""
        return self.folder.with_suffix(".log")

    def look(self, *, stopping: bool) -> None:
        """Take note of its end."""
        if self.process is not None and self.state == "running" and (code := self.process.poll()) is not None:
            self.state = "done" if code == 0 else "stopped" if stopping else "failed"


def _ends_with_parent() -> Callable[[], Any] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def train_seeds(wanted: Arguments) -> int:
    """Train all seeds; return the exit code: 0, 1 if a seed failed, or 128 + n if signal n stopped them.

    Raises a ConfigError before the first starts if a setting is invalid, or differs from that of a run that exists.
    """
    settings, words, at_once = wanted.settings, str(wanted.seeds), wanted.seeds_at_once
    runs, parent = _planned(settings, seeds_of(words))
    number, why = _number_at_once(runs[0].config, len(runs)) if at_once is None else (at_once, "as you asked for")
    if number < 1:
        raise ConfigError(f"seeds_at_once={number}: must be at least 1. Leave it out.")
    make_folder(parent)
    shared = parent / "settings.yaml"
    write_file(shared, yaml.safe_dump(plain({k: v for k, v in settings.items() if k != "run_dir"})).encode())
    console = Console(highlight=False, quiet=settings.get("progress") == "off")
    together = f"{number} at a time" if number > 1 else "one after another"
    for note in wanted.notes:
        console.print(note, soft_wrap=True)
    console.print(f"{counted(len(runs), 'seed')}, {together}, {why}. Folder: {parent}", soft_wrap=True)
    received = _run(runs, number, shared, console)
    finished = [run.folder for run in runs if run.state == "done"]
    if received is None and finished:
        for line in _aggregate(runs, parent):
            console.print(line, soft_wrap=True, markup=False)
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        code = "" if run.process is None else run.process.returncode
        last = run.output.read_bytes()[-2000:].decode("utf8", "replace").strip().rpartition("\n")[2]
        print(
            printable(f"seed {run.config.seed} failed (exit code {code}): {last}\n  see {run.output}"), file=sys.stderr
        )
    if received is not None or failed:
        env = runs[0].config.env_name
        again = shlex.join(["dppo", "train", env, "--seeds", words, "--run-dir", str(parent)])
        print(f"Continue with the same flags: {again} ...", file=sys.stderr)
    return 128 + received if received is not None else int(bool(failed))


def _planned(settings: Mapping[str, Any], seeds: Sequence[int]) -> tuple[list[Seed], Path]:
    """Return the runs in their folders, those that have finished marked, and the folder around them."""
    first = Config(**{**settings, "seed": seeds[0]})
    name = f"{as_file_name(first.env_name)}__{first.name}__seeds__{time.strftime('%Y%m%d-%H%M%S')}"
    parent = (first.run_dir or Path("runs") / name).absolute()
    if (parent / CONFIG).exists():
        raise ConfigError(f"run_dir={parent}: contains a single run. Use another folder for several seeds.")
    runs = []
    for seed in seeds:
        folder = parent / f"seed_{seed}"
        run = Seed(replace(first, seed=seed, run_dir=folder), folder)
        if run.finished:
            changes_on_resume(settings_to_resume(folder), run.config, folder, run.config.iterations)
            run.state = "done"
        runs.append(run)
    return runs, parent


def _number_at_once(config: Config, most: int) -> tuple[int, str]:
    """Return the number of runs at a time, and why."""
    if config.num_actors or config.num_learners:
        return 1, "because each uses Ray"
    if config.device != "cpu":
        return 1, "because each uses the GPU"
    threads = max(config.learner_threads, 1)
    cores, memory = usable_cores() // threads, psutil.virtual_memory().available // (RUN_MB * 2**20)
    number = max(1, min(most, cores, memory))
    return number, f"for {counted(usable_cores(), 'core')} and {memory * RUN_MB / 1000:.0f} GB of free memory"


def _run(runs: Sequence[Seed], at_once: int, settings: Path, console: Console) -> int | None:
    """Run all that have not finished, so many at a time; return the number of the signal that stopped them."""
    shown, printed = dict[int, str](), time.monotonic()
    with StopSignals() as stop, ExitStack() as stack:
        live = None if not console.is_terminal else stack.enter_context(Live(console=console, auto_refresh=False))
        passed_on = False
        while True:
            for run in runs:
                run.look(stopping=stop.received is not None)
            running = [run for run in runs if run.state == "running"]
            waiting = [run for run in runs if run.state == "waiting" and stop.received is None]
            for run in waiting[: at_once - len(running)]:
                run.start(settings)
            if stop.received is not None and not passed_on:
                for run in running:
                    assert run.process is not None
                    run.process.send_signal(stop.received)
                passed_on = True
            due = time.monotonic() - printed > PRINT_S
            printed = time.monotonic() if due else printed
            if live is not None:
                live.update(Text("\n".join(run.line() for run in runs)), refresh=True)
            for run in runs if live is None else ():
                if shown.get(run.config.seed) != run.state or (due and run.state == "running"):
                    console.print(run.line(), soft_wrap=True)
                    shown[run.config.seed] = run.state
            if not running and not waiting:
                return stop.received
            time.sleep(POLL_S)


def _aggregate(runs: Sequence[Seed], parent: Path) -> list[str]:
    """Write seeds.png and seeds.json; return lines about the mean of the finished seeds, and its interval."""
    finished = [run for run in runs if run.state == "done"]
    curves = {run.config.seed: read_curve(run.folder, RETURN) for run in finished}
    each = {seed: float(curve.values[-1]) for seed, curve in curves.items() if len(curve.values)}
    if not each:
        return ["No episode has finished in any of them."]
    (group,) = grouped_by_settings([curve for curve in curves.values() if len(curve.values)])
    found = interval([group.last])
    states = {run.config.seed: run.state for run in runs}
    result = {"env_id": runs[0].config.env_name, "metric": RETURN, "seeds": states, "last": each, "mean": found.value}
    text = json.dumps(result | {"interval_95": [found.low, found.high]}, indent=1)
    write_file(parent / "seeds.json", text.encode() + b"\n")
    return [*plot([run.folder for run in finished], parent / "seeds.png"), f"Figures: {parent / 'seeds.json'}"]
