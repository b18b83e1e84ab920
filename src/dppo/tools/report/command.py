"""`dppo report`: write a run as one HTML page that needs no network."""

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.commands.flags import Parser, as_words
from dppo.config import Config, plain_settings
from dppo.config.atari import with_atari
from dppo.config.parts import default_of
from dppo.config.plain import plain
from dppo.config.reading import versions_in
from dppo.errors import ConfigError, DppoError, printable
from dppo.files import check_kind, lock
from dppo.invocation import command
from dppo.records.files.disk import write_file, writing
from dppo.records.files.run_files import CONFIG, INCIDENT, read_run_file
from dppo.records.files.run_folder import run_dir_of, settings_to_resume
from dppo.records.metrics.reading import sampled_metrics
from dppo.tools.doctor.run_findings import of_run
from dppo.tools.report.page import Facts, page

PROG = "dppo report"
DESCRIPTION = (
    "Write one HTML page about a RUN that goes on, has finished or has failed: curves, evaluation, losses, where the "
    "time goes, actors, incidents, settings, and the command to repeat it. It has no scripts and needs no network."
)
MOST = 100  # incidents and logs that are read
PROCESS = re.compile(r"(?m)^(?:(\S+ \S+) )?dppo: (process \d+ (?:began|ended).*)$")


def main(argv: list[str]) -> int:
    """Write the page; return the exit code."""
    options = {"--out FILE": "The page. (default: RUN/report.html)"}
    flags, word = Parser(PROG, "RUN [--out FILE]", DESCRIPTION, options=options).split_one(argv)
    run = run_dir_of(Path(word))
    out = flags.get("out", run / "report.html")
    data = page(facts_of(run)).encode("utf8", "replace")
    with writing(f"out={out}"):
        write_file(out, data)
    print(printable(f"{out}: {len(data) / 1024:,.0f} kB. Open it in a browser."))
    return 0


def facts_of(run: Path) -> Facts:
    """Read a run folder, perhaps a stranger's; raise a DppoError if it is not one, or damaged."""
    config, rows = Config(**settings_to_resume(run, read_only=True)), sampled_metrics(run)
    findings = [("note", "not examined")]
    with suppress(DppoError):
        findings = list(of_run(run, rows))
    state = "finished" if rows and rows[-1]["iteration"] >= config.iterations else "stopped early"
    if (run / "run.lock").exists():
        if (handle := lock(run / "run.lock")) is None:
            state = "running"
        else:
            os.close(handle)
    versions = {}
    with suppress(ConfigError):  # there is none, or it is too large
        versions = versions_in(run / CONFIG)
    every = plain_settings(config)
    given = {name: every[name] for name in ("env_id", "env_kwargs", "clip_reward")}  # on which defaults of games depend
    usual = dict[str, Any](), with_atari(given), with_atari(given | {"atari": every["atari"]})
    own = {
        name: value
        for name, value in every.items()
        if any(value != plain(of.get(name, default_of(name))) for of in usual)
    }
    words = [own.pop("env_id"), "--preset", "none", *as_words(own)]
    return Facts(
        config, rows, state, findings, list(_incidents(run)), _lifetimes(run), versions, command("train", *words)
    )


def _incidents(run: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(run.glob("incidents/*"))[:MOST]:
        with suppress(OSError, RecursionError, ValueError):
            check_kind(folder, stat.S_IFDIR)
            found = json.loads(read_run_file(folder / INCIDENT))
            yield {**found, "number": folder.name} if isinstance(found, dict) else {}


def _lifetimes(run: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Return begin and end of each process of each actor, and how it ended, from the logs of the actors."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    until = max((path.stat().st_mtime for path in run.glob("metrics.jsonl")), default=0.0)
    for path in sorted(run.glob("logs/actor-*.log"), key=lambda path: (len(path.name), path.name))[:MOST]:
        bars = found.setdefault(path.stem, [])
        with suppress(OSError, OverflowError, ValueError):
            for when, said in PROCESS.findall(read_run_file(path).decode("utf8", "replace")):
                at = time.mktime(time.strptime(when, "%Y-%m-%d %H:%M:%S")) if when else until
                if "began" in said:
                    bars.append((at, max(at, until), f"{said} {when}"))
                elif bars:
                    begin, _, before = bars.pop()
                    bars.append((begin, max(begin, at), f"{before}, {said} {when}"))
    first = min((bar[0] for bars in found.values() for bar in bars), default=0.0)
    return {name: [(a - first, b - first, said) for a, b, said in bars[-MOST:]] for name, bars in found.items() if bars}
