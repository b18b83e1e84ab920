"""`dppo report`: write a run as one HTML page that needs no network."""

import math
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.commands.flags import Parser, as_words, print_lines
from dppo.config import Config, plain_settings
from dppo.config.parts import default_of
from dppo.config.plain import plain
from dppo.config.reading import versions_in
from dppo.config.settings import Settings
from dppo.errors import CheckpointError, ConfigError, DppoError, refuse
from dppo.files import sha256_of
from dppo.invocation import command
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.disk import write_file, writing
from dppo.records.files.lock import goes_on, training_notes
from dppo.records.files.run_files import (
    CERTIFICATE,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    json_in,
    read_run_file,
    stored_incidents,
)
from dppo.records.files.run_folder import run_dir_of, stored_config
from dppo.records.metrics.reading import Rows, sampled_metrics
from dppo.tools.curves import run_folders
from dppo.tools.doctor.run_findings import ending_incident, findings_of_run
from dppo.tools.report.charts import Bar
from dppo.tools.report.facts import Facts
from dppo.tools.report.page import page

PROG = "dppo report"
DESCRIPTION = (
    "Write one HTML page about a RUN that goes on, has finished or has failed: curves, evaluation, losses, where the "
    "time goes, actors, incidents, settings, and the command to repeat it. It has no scripts and needs no network. For "
    "a folder of several runs, write a page in each."
)
MAX_FILES = 100  # logs, and processes of an actor
PROCESS = re.compile(r"(?m)^(?:(\S+ \S+) )?dppo: (process \d+ (?:began|ended).*)$")
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def main(argv: list[str]) -> int:
    """Write the pages; return the exit code."""
    options = {"--out FILE": "The page of a single RUN. (default: RUN/report.html)"}
    parser = Parser(PROG, "RUN [--out FILE]", DESCRIPTION, {"options": options})
    flags, word = parser.split_word(argv)
    runs = list(run_folders([Path(word)]))
    if "out" in flags and len(runs) > 1:
        raise ConfigError(
            f"out={flags['out']}: is one page, and {word} contains {len(runs)} runs. Leave it out, or pass {runs[0]}."
        )
    problems = []
    for folder in runs:
        run = run_dir_of(folder)
        try:
            _write_page(run, flags.get("out", run / "report.html"))
        except (CheckpointError, ConfigError) as problem:  # other runs get their pages
            problems.append(ConfigError(str(problem)))
    refuse(problems)
    return 0


def _write_page(run: Path, out: Path) -> None:
    data = page(facts_of(run)).encode("utf8", "replace")
    with writing(f"out={out}"):
        write_file(out, data)
    size = f"{len(data) / 1024:,.0f}"
    print_lines(*training_notes(run), f"{out}: {size} kB. Open it in a browser.")


def facts_of(run: Path) -> Facts:
    """Read a run folder, perhaps a stranger's; raise a DppoError if it is not one, or damaged."""
    config = stored_config(run)
    rows = sampled_metrics(run)
    findings = [("note", "not examined")]
    with suppress(DppoError):
        findings = list(findings_of_run(run, rows))
    versions = {}
    with suppress(ConfigError):  # there is none, or it is too large
        versions = versions_in(run / CONFIG)
    return Facts(
        config=config,
        rows=rows,
        state=_state_of(run, rows, config),
        findings=findings,
        incidents=list(stored_incidents(run)),
        actors=_lifetimes(run),
        versions=versions,
        command=_command_of(config),
        certificate=_certificate(run),
        **_policies(run, config),
    )


def _policies(run: Path, config: Config) -> dict[str, Any]:
    """Return the facts about the policies of a run: the best one, and the one that is deployed."""
    paths = checkpoints.paths_in(run)
    if not paths:
        return {}
    best = None
    stored = json_in(run / CHECKPOINTS / checkpoints.BEST)
    with suppress(KeyError, OverflowError, TypeError, ValueError):
        score = float(stored["score"])
        iteration = int(stored["iteration"])
        if math.isfinite(score) and 0 <= iteration <= config.iterations:
            best = (score, iteration)
    if not config.never_worse:
        return {"best": best, "deployed": checkpoints.saved_iteration(paths[-1])}
    if best is None or stored.get("deployed") != "policy":
        return {"deploys_baseline": True}
    return {"best": best, "deployed": best[1]}


def _state_of(run: Path, rows: Rows, config: Config) -> str:
    if goes_on(run):
        return "running"
    last_row = {}
    if rows:
        last_row = rows[-1]
    if last_row.get("iteration", 0) >= config.iterations:
        return "finished"
    if ending_incident(run, last_row):
        return "failed"
    return "stopped early"


def _certificate(run: Path) -> dict[str, Any]:
    """Return the certificate of a run, and whether its files are unchanged since then; {} without one."""
    certificate = json_in(run / CERTIFICATE)
    if not certificate:
        return {}
    return {"files since then": _since_then(run, certificate.get("files")), **certificate}


def _since_then(run: Path, hashes: Any) -> str:
    """Return in words which files of a run have other hashes now; of a stranger's names, only known ones are opened."""
    if not isinstance(hashes, dict):
        return "unknown"
    files = [run / CONFIG, run / METRICS, *checkpoints.paths_in(run)[-1:]]
    changed = []
    for path in files:
        name = path.relative_to(run).as_posix()
        if path.is_file() and hashes.get(name) != sha256_of(path):
            changed.append(name)
    if changed:
        return f"changed: {', '.join(changed)}"
    return "unchanged"


def _command_of(config: Config) -> str:
    """Return the command that trains with these settings, without flags for defaults."""
    settings = plain_settings(config)
    flags = {name: value for name, value in settings.items() if value != plain(default_of(name))}
    # games and algorithms have other defaults
    reproduced = plain_settings(Settings(**flags))
    flags |= {name: value for name, value in settings.items() if value != reproduced[name]}
    env_id = flags.pop("env_id")
    return command("train", env_id, "--preset", "none", *as_words(flags))


def _lifetimes(run: Path) -> dict[str, list[Bar]]:
    """Return the bars of the processes of each actor, with seconds since the first begin, from the actors' logs."""
    times_of_rows = [path.stat().st_mtime for path in run.glob("metrics.jsonl")]
    still_running_until = max(times_of_rows, default=0.0)
    logs = sorted(run.glob("logs/actor-*.log"))
    logs.sort(key=lambda path: len(path.name))
    lifetimes = dict[str, list[Bar]]()
    for path in logs[:MAX_FILES]:
        bars = list[Bar]()
        lifetimes[path.stem] = bars
        with suppress(OSError, OverflowError, ValueError):
            text = read_run_file(path).decode("utf8", "replace")
            for when, event in PROCESS.findall(text):
                at = still_running_until
                if when:
                    at = time.mktime(time.strptime(when, TIME_FORMAT))
                if "began" in event:
                    bars.append(Bar(at, max(at, still_running_until), f"{event} {when}"))
                elif bars:
                    bar = bars.pop()
                    end = max(bar.begin, at)
                    bars.append(bar._replace(end=end, text=f"{bar.text}, {event} {when}"))
    begins = [bar.begin for bars in lifetimes.values() for bar in bars]
    first = min(begins, default=0.0)
    return {
        name: [Bar(bar.begin - first, bar.end - first, bar.text) for bar in bars[-MAX_FILES:]]
        for name, bars in lifetimes.items()
        if bars
    }
