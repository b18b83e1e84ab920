"""`dppo report`: write a run as one HTML page that needs no network."""

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.commands.doctor import of_run
from dppo.commands.flags import Parser, UsageError, as_words, asks_for_help, one_word
from dppo.config import Config
from dppo.config.files import versions_in
from dppo.errors import ConfigError, DppoError, printable
from dppo.files import lock, read_file
from dppo.records.files.disk import cause, check_parts, remedy, write_file
from dppo.records.files.run_folder import CONFIG, settings_to_resume
from dppo.records.metrics.reading import sampled_metrics
from dppo.records.report.page import Facts, page

PROG = "dppo report"
DESCRIPTION = (
    "Write one HTML page about a RUN that goes on, has finished or has failed: curves, evaluation, losses, where the "
    "time goes, actors, incidents, settings, and the command to repeat it. It has no scripts and needs no network."
)
MOST, MOST_LOG = 100, 2**22  # incidents and logs that are read; bytes of a log
PROCESS = re.compile(r"(?m)^(?:(\S+ \S+) )?dppo: process (\d+) (began|ended) ?(.*)$")


def main(argv: list[str]) -> int:
    """Write the page; return the exit code."""
    parser = Parser(PROG, "RUN [--out FILE]", DESCRIPTION)
    parser.add_argument("--out", type=Path, metavar="FILE", help="The page. (default: RUN/report.html)")
    if asks_for_help(argv):
        parser.print_help()
        return 0
    flags, words = parser.split(argv)
    if (word := one_word(words, "RUN", PROG)) is None:
        raise UsageError(f"RUN is missing. For example: {PROG} runs/...")
    out = flags.get("out", Path(word) / "report.html")
    data = page(facts_of(Path(word))).encode("utf8", "replace")
    try:
        write_file(out, data)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written: {cause(error)} {remedy(error)}") from None
    print(printable(f"{out}: {len(data) / 1024:,.0f} kB. Open it in a browser."))
    return 0


def facts_of(run: Path) -> Facts:
    """Read a run folder, perhaps a stranger's; raise a DppoError if it is not one, or damaged."""
    settings = settings_to_resume(run)
    check_parts(run)
    config, rows, findings = Config(**settings), sampled_metrics(run), [("note", "it cannot be examined")]
    with suppress(DppoError):
        findings = list(of_run(run, rows))
    done = bool(rows) and rows[-1]["iteration"] >= config.iterations
    held = lock(run / "run.lock") if (run / "run.lock").exists() else -1
    if held is not None and held >= 0:
        os.close(held)
    return Facts(
        run=run,
        config=config,
        rows=rows,
        state="finished" if done else "running" if held is None else "stopped early",
        findings=findings,
        incidents=list(_incidents(run / "incidents")),
        actors=_lifetimes(run),
        versions=versions_in(run / CONFIG) if (run / CONFIG).is_file() else {},
        command=shlex.join(["dppo", "train", *as_words(config)]),
    )


def _incidents(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*/incident.json"))[:MOST]:
        with suppress(OSError, RecursionError, ValueError):
            check_parts(path.parent)
            found = json.loads(read_file(path, MOST_LOG))
            yield {"number": path.parent.name, **found} if isinstance(found, dict) else {}


def _lifetimes(run: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Return when each process of each actor began and ended, and how, from the logs of the actors."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    until = max((path.stat().st_mtime for path in run.glob("metrics.jsonl")), default=time.time())
    for path in sorted(run.glob("logs/actor-*.log"), key=lambda path: (len(path.name), path.name))[:MOST]:
        bars, name = found.setdefault(path.stem.replace("-", " ", 1), []), path.name
        with suppress(OSError):
            for when, pid, event, how in PROCESS.findall(read_file(path, MOST_LOG).decode("utf8", "replace")):
                at = until
                with suppress(ValueError, OverflowError):
                    at = time.mktime(time.strptime(when, "%Y-%m-%d %H:%M:%S")) if when else until
                if event == "began":
                    bars.append((at, max(at, until), f"{name}: process {pid} began {when}"))
                elif bars:
                    bars[-1] = bars[-1][0], max(bars[-1][0], at), f"{bars[-1][2]}, ended {when} {how}"
    first = min((bar[0] for bars in found.values() for bar in bars), default=0.0)
    return {name: [(a - first, b - first, said) for a, b, said in bars[-MOST:]] for name, bars in found.items() if bars}
