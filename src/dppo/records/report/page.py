"""A run as one HTML page that needs no network: what `dppo report` has read, in sections."""

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from dppo.config import Config
from dppo.config.files import plain
from dppo.config.parts import default_of, settings_by_name
from dppo.errors import counted
from dppo.records.plots import STEPS, time_axis
from dppo.records.report.charts import Mark, chart, lanes, stacked, text
from dppo.records.terminal.view import PHASES, duration, number
from dppo.records.together import RETURN, joined_times

Row = Mapping[str, float]
MOST, MOST_LANES = 40, 64  # charts of one kind; actors
NOT_DRAWN = ("_std", "_min", "_max", "eval/iteration", "eval/global_step")  # ends of keys that belong to another
SECTIONS = {  # keys, and prefixes of keys, in the order in which they are drawn
    "Evaluation": ("eval/",),
    "Reported by the environment": ("info/",),
    "Losses and policy": (
        *(f"losses/{name}" for name in ("policy_loss", "value_loss", "approx_kl", "clipfrac", "entropy")),
        *("losses/explained_variance", "losses/grad_norm", "charts/learning_rate"),
        *("charts/episodic_length", "charts/success_rate"),
    ),
    "Where the time goes": ("perf/iteration_s", "charts/SPS_iteration", "actors/"),
}
TIMES = dict(zip(PHASES, ("environments", "policy", "waiting", "sync", "update", "other"), strict=True))
KINDS = {
    "actor": "actor lost or replaced",
    "env": "fault of an environment",
    "resume": "resumed",
    "other": "other incident",
}


@dataclass(frozen=True)
class Facts:
    """All that a page shows of a run."""

    config: Config
    rows: Sequence[Row]
    """Of metrics.jsonl, perhaps a sample."""
    state: str
    """Such as "finished" or "running"."""
    findings: Sequence[tuple[str, str]]
    """Severity and text, by `dppo doctor RUN`."""
    incidents: Sequence[Mapping[str, Any]]
    actors: Mapping[str, Sequence[tuple[float, float, str]]]
    """Processes of each actor: begin and end in seconds since the first, and how it ended."""
    versions: Mapping[str, Any]
    command: str


def page(facts: Facts) -> str:
    """Return the page. All text in it is escaped, and its policy allows nothing but its own style sheet."""
    css, template = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf8") for kind in ("css", "html"))
    allowed = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    title = text(f"{facts.config.env_name}, seed {facts.config.seed}")
    return Template(template).substitute(title=title, css=css, allowed=allowed, body="\n".join(_sections(facts)))


def _sections(facts: Facts) -> Iterator[str]:
    tiles = "".join(f"<div><dt>{key}</dt><dd>{text(value)}</dd></div>" for key, value in _tiles(facts).items())
    yield f"<dl>{tiles}</dl>"
    yield from _charts(facts) if facts.rows else ["<p>No iteration has finished yet: there is nothing to draw.</p>"]
    found = "".join(f'<li class="{text(kind)}">{text(said)}</li>' for kind, said in facts.findings)
    yield f"<h2>Diagnosis</h2><ul>{found}</ul>" if found else ""
    row, keys = facts.rows[-1] if facts.rows else {}, ("number", "time", "kind", "message")
    counts = [(key.partition("/")[2], f"{row[key]:g}") for key in row if key.startswith(("incidents/", "faults/"))]
    if counts or facts.incidents:
        folders = [[one.get(key, "") for key in keys] for one in facts.incidents]
        yield f"<h2>Incidents</h2>{_table(counts[:100])}{_table(folders, keys)}"
    values = {name: plain(getattr(facts.config, name)) for name in settings_by_name() if name != "env_id"}
    own = [(name, value, plain(default_of(name))) for name, value in values.items() if value != plain(default_of(name))]
    yield f"<h2>Settings</h2>{_table(own, ('setting', 'value', 'default'))}"
    rest = [(name, value) for name, value in values.items() if value == plain(default_of(name))]
    yield f"<details><summary>{counted(len(rest), 'setting')} with their defaults</summary>{_table(rest)}</details>"
    yield f"<h2>Reproduce it</h2><pre>{text(facts.command)}</pre>{_table(facts.versions.items())}"


def _tiles(facts: Facts) -> dict[str, str]:
    row, of = facts.rows[-1] if facts.rows else {}, facts.config
    best = max((one[RETURN] for one in facts.rows if math.isfinite(one.get(RETURN, math.nan))), default=math.nan)
    times = joined_times([one.get("time/training_s", 0.0) for one in facts.rows])
    return {
        "state": facts.state,
        "env steps": f"{row.get('global_step', 0):,.0f} of {of.iterations * of.batch_size:,}",
        "episodes": number(row.get("charts/episodes"), 0),
        "return, last 100": number(row.get(RETURN)),
        "best return": number(best),
        "training": duration(float(times[-1]) if len(times) else math.nan),
        "env steps / s": number(row.get("charts/SPS")),
        "actors": number(row.get("actors/alive"), 0) if of.num_actors else "in process",
        "incidents": f"{sum(row[key] for key in row if key.startswith('incidents/')):,.0f}",
    }


def _charts(facts: Facts) -> Iterator[str]:
    keys = list(dict.fromkeys(key for row in facts.rows for key in list(row)[:300]))[:1000]  # of a million, perhaps
    of = {key: np.array([row.get(key, math.nan) for row in facts.rows]) for key in ("global_step", *keys)}
    steps, seconds = of["global_step"], joined_times(np.nan_to_num(of.get("time/training_s", 0 * of["global_step"])))
    scale, name_of_time = time_axis(seconds)
    both = []
    for x, label in ((steps, STEPS), (seconds / scale, name_of_time)) if RETURN in of else ():
        spread, where = _with_spread(of, RETURN), marks(facts.rows, x)
        both.append(chart("Episode return", x, spread, label, name="mean of the last 100", marks=where))
    seen = "".join(f'<span class="{kind}">{KINDS[kind]}</span>' for kind in KINDS if f'"mark {kind}"' in "".join(both))
    yield _group("Learning", both, seen) if any(both) else "<p>No episode has finished yet.</p>"
    parts = {TIMES[name]: of[f"perf/{name}_frac"] for name in PHASES if f"perf/{name}_frac" in of}
    for title, prefixes in SECTIONS.items():
        keys = [key for prefix in prefixes for key in of if key.startswith(prefix) and not key.endswith(NOT_DRAWN)]
        x = of.get("eval/global_step", steps) if title == "Evaluation" else steps
        shares = [stacked("share of each iteration", steps, parts, STEPS)] if title.startswith("Where") else []
        yield _group(title, shares + [chart(key, x, _with_spread(of, key), STEPS) for key in keys[:MOST]])
    if facts.actors:
        shown = dict(list(facts.actors.items())[:MOST_LANES])
        of_actors = f"processes of {len(shown)} of {counted(len(facts.actors), 'actor')}"
        yield _group("Actors", [lanes(of_actors, shown, "seconds since the first began")])


def _with_spread(of: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Return [3, n]: a mean, and it less and plus its deviation, or its lowest and highest value, where these exist."""
    y, stem = of[key], key.removesuffix("_mean").replace("eval/episodic_", "eval/")
    deviation = of.get(f"{stem}_std", 0 * y)
    ends = of.get(f"{stem}_min", y - deviation), of.get(f"{stem}_max", y + deviation)
    return np.array([y, *(np.where(np.isfinite(end), end, y) for end in ends)])


def marks(rows: Sequence[Row], x: np.ndarray) -> list[Mark]:
    """Return where the run was resumed, and where each kind of incident was counted: place, kind and text."""
    found = []
    for before, row, at in zip(rows[:-1], rows[1:], x[1:].tolist(), strict=True):
        if row.get("time/training_s", 0) < before.get("time/training_s", 0):
            found.append((at, "resume", f"resumed before step {row['global_step']:,.0f}"))
        for key in (key for key in row if key.startswith("incidents/") and row[key] > before.get(key, 0)):
            name = key.removeprefix("incidents/")
            kind = "env" if name == "bad_step" else next((kind for kind in KINDS if name.startswith(kind)), "other")
            found.append((at, kind, f"{name}, before step {row['global_step']:,.0f}"))
    return found


def _group(title: str, figures: Sequence[str], legend: str = "") -> str:
    keys = f'<p class="legend">{legend}</p>' if legend else ""
    return f"<h2>{title}</h2>{keys}<section>{''.join(figures)}</section>" if any(figures) else ""


def _table(rows: Iterable[Sequence[object]], names: Sequence[str] = ()) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>" if names else ""
    return f'<div class="wide"><table>{head}{body}</table></div>' if body else ""
