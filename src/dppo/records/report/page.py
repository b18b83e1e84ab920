"""A run as one HTML page that needs no network: what `dppo report` has read, in sections."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo.config import Config
from dppo.config.files import plain
from dppo.config.parts import default_of, settings_by_name
from dppo.errors import counted
from dppo.records.plots import joined_times, time_unit
from dppo.records.report.charts import Mark, Series, chart, lanes, stacked, text
from dppo.records.terminal.view import PHASES, duration, number

Row = Mapping[str, float]
MOST_CHARTS, MOST_LANES = 40, 64
NAMES = ("environments", "policy", "waiting", "sync", "update", "other")
RETURN = "charts/episodic_return"
LOSSES = ("policy_loss", "value_loss", "approx_kl", "clipfrac", "entropy", "explained_variance", "grad_norm")
STEPS = "env steps"
OTHERS = {
    "length of an episode": "charts/episodic_length",
    "success rate": "charts/success_rate",
    "learning rate": "charts/learning_rate",
}
SPEED = {"seconds of an iteration": "perf/iteration_s", "env steps / s": "charts/SPS_iteration"}
OF_ACTORS = {"actors alive": "actors/alive", "memory of the largest actor, GB": "actors/memory_gb"}
KINDS = {
    "actor": "actor lost or replaced",
    "env": "fault of an environment",
    "resume": "resumed",
    "other": "other incident",
}


@dataclass(frozen=True)
class Facts:
    """All that a page shows of a run."""

    run: Path
    config: Config
    rows: Sequence[Row]
    """Of metrics.jsonl, perhaps a sample."""
    state: str
    """Such as "finished" or "running"."""
    findings: Sequence[tuple[str, str]]
    """Severity and text, by `dppo doctor RUN`."""
    incidents: Sequence[Mapping[str, Any]]
    actors: Mapping[str, Sequence[tuple[float, float, str]]]
    """Lifetimes of processes by actor: begin and end in seconds since the first, and how it ended."""
    versions: Mapping[str, Any]
    command: str


def page(facts: Facts) -> str:
    """Return the page. All text in it is escaped, and its policy allows nothing but its own style sheet."""
    css = Path(__file__).with_name("report.css").read_text(encoding="utf8")
    allowed = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    title = f"{facts.config.env_name}, seed {facts.config.seed}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><meta name="referrer" content="no-referrer"><title>{text(title)}</title>'
        f"<style>{css}</style></head>\n<body><h1>{text(title)}</h1>\n{''.join(_sections(facts))}</body></html>\n"
    )


def _sections(facts: Facts) -> Iterator[str]:
    yield _summary(facts)
    if facts.rows:
        yield from _charts(facts)
    else:
        yield "<p>No iteration has finished yet: there is nothing to draw.</p>"
    if facts.findings:
        found = "".join(f'<li class="{text(kind)}">{text(said)}</li>' for kind, said in facts.findings)
        yield f"<h2>Diagnosis</h2><ul>{found}</ul>"
    yield from _incidents(facts)
    yield from _settings(facts)
    yield f"<h2>Reproduce it</h2><pre>{text(facts.command)}</pre>{_table(facts.versions.items())}"


def _summary(facts: Facts) -> str:
    row, of = facts.rows[-1] if facts.rows else {}, facts.config
    total, steps = of.iterations * of.batch_size, row.get("global_step", 0)
    best = max((one[RETURN] for one in facts.rows if math.isfinite(one.get(RETURN, math.nan))), default=math.nan)
    times = joined_times([one.get("time/training_s", 0.0) for one in facts.rows])
    tiles = {
        "state": facts.state,
        "env steps": f"{steps:,.0f} of {total:,}",
        "episodes": number(row.get("charts/episodes"), 0),
        "return, last 100": number(row.get(RETURN)),
        "best return": number(best),
        "training": duration(float(times[-1]) if len(times) else math.nan),
        "env steps / s": number(row.get("charts/SPS"), 0 if row.get("charts/SPS", 0) >= 10 else None),
        "actors": number(row.get("actors/alive"), 0) if of.num_actors else "in process",
        "incidents": f"{sum(value for key, value in row.items() if key.startswith('incidents/')):,.0f}",
    }
    return (
        f"<dl>{''.join(f'<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>' for key, value in tiles.items())}</dl>"
    )


def _charts(facts: Facts) -> Iterator[str]:
    rows = facts.rows
    of = {key: np.array([row.get(key, math.nan) for row in rows]) for key in _keys(rows)}
    steps, seconds = of["global_step"], joined_times(np.nan_to_num(of.get("time/training_s", np.zeros(len(rows)))))
    scale, unit = time_unit(seconds)

    def small(named: Mapping[str, str]) -> list[str]:
        return [chart(name, steps, _with_spread(of, key), STEPS) for name, key in named.items() if key in of]

    axes, last = ((steps, STEPS), (seconds / scale, f"training time ({unit})")), "mean of the last 100"
    returns = _with_spread(of, RETURN)
    both = [chart("Episode return", x, returns, label, name=last, marks=marks(rows, x)) for x, label in axes]
    seen = [kind for kind in KINDS if any(f'"mark {kind}"' in one for one in both)]
    legend = "".join(f'<span class="{kind}">{KINDS[kind]}</span>' for kind in seen)
    yield _group("Learning", both, legend) if any(both) else "<p>No episode has finished yet.</p>"
    for title, prefix in (("Evaluation", "eval/"), ("Reported by the environment", "info/")):
        keys = [key for key in of if key.startswith(prefix) and not key.endswith(("_std", "_min", "_max"))]
        yield _group(title, small({key.removeprefix(prefix): key for key in keys[:MOST_CHARTS]}))
    yield _group("Losses and policy", small({name: f"losses/{name}" for name in LOSSES} | OTHERS))
    parts = {name: of[f"perf/{key}_frac"] for name, key in zip(NAMES, PHASES, strict=True) if f"perf/{key}_frac" in of}
    spent = small(SPEED | (OF_ACTORS if facts.config.num_actors else {}))
    yield _group("Where the time goes", [stacked("share of each iteration", steps, parts, STEPS), *spent])
    if facts.actors:
        shown = dict(list(facts.actors.items())[:MOST_LANES])
        scale, unit = time_unit(np.array([bar[1] for bars in shown.values() for bar in bars]))
        more = f", the first {MOST_LANES} of {len(facts.actors)}" if len(facts.actors) > MOST_LANES else ""
        since = f"time since the first began ({unit})"
        yield _group("Actors", [lanes(f"processes of each actor{more}", shown, scale, since)])


def _keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys of all rows, in the order of their first appearance; not all of a million."""
    return list(dict.fromkeys(key for row in rows for key in list(row)[:300]))[:1000]


def _with_spread(of: Mapping[str, np.ndarray], key: str) -> Series:
    """Return a mean with its deviation, or its lowest and highest value, if there are such keys beside it."""
    y, stem = of.get(key, np.zeros(0)), key.removesuffix("_mean")
    if f"{stem}_std" in of:
        return Series(y, y - of[f"{stem}_std"], y + of[f"{stem}_std"])
    low, high = of.get(f"{stem}_min"), of.get(f"{stem}_max")
    return Series(y) if low is None or high is None else Series(y, low, high)


def marks(rows: Sequence[Row], x: np.ndarray) -> list[Mark]:
    """Return where the run was resumed, and where each kind of incident was counted."""
    found = []
    for before, row, at in zip(rows[:-1], rows[1:], x[1:].tolist(), strict=True):
        if row.get("time/training_s", 0) < before.get("time/training_s", 0):
            found.append(Mark(at, "resume", f"resumed before step {row['global_step']:,.0f}"))
        for key in row:
            if key.startswith("incidents/") and (new := row[key] - before.get(key, 0)) > 0:
                name = key.removeprefix("incidents/")
                kind = next(
                    (one for one in ("actor", "env") if name.startswith(one) or (one, name) == ("env", "bad_step")),
                    "other",
                )
                found.append(Mark(at, kind, f"{new:g} x {name}, at step {row['global_step']:,.0f}"))
    return found


def _group(title: str, figures: Sequence[str], legend: str = "") -> str:
    shown = "".join(figures)
    keys = f'<p class="legend">{legend}</p>' if legend else ""
    return f"<h2>{title}</h2>{keys}<section>{shown}</section>\n" if shown else ""


def _table(rows: Any, names: Sequence[str] = ()) -> str:
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>" if names else ""
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>' if body else ""


def _incidents(facts: Facts) -> Iterator[str]:
    row = facts.rows[-1] if facts.rows else {}
    counts = [
        (key.partition("/")[2], f"{value:g}") for key, value in row.items() if key.startswith(("incidents/", "faults/"))
    ]
    if counts or facts.incidents:
        yield f"<h2>Incidents</h2>{_table(counts[:100])}"
        keys = ("number", "time", "kind", "message")
        yield _table([[one.get(key, "") for key in keys] for one in facts.incidents], keys)


def _settings(facts: Facts) -> Iterator[str]:
    values = {name: plain(getattr(facts.config, name)) for name in settings_by_name()}
    own = {name: value for name, value in values.items() if value != plain(default_of(name)) or name == "env_id"}
    rows = [(name, value, "" if name == "env_id" else plain(default_of(name))) for name, value in own.items()]
    yield f"<h2>Settings</h2>{_table(rows, ('setting', 'value', 'default'))}"
    rest = [(name, value) for name, value in values.items() if name not in own]
    yield f"<details><summary>{counted(len(rest), 'setting')} with their defaults</summary>{_table(rest)}</details>"
