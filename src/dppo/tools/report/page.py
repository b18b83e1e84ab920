"""A run as one HTML page that needs no network: what `dppo report` has read, in sections."""

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from dppo.config import Config
from dppo.config.plain import as_typed, plain, plain_defaults, plain_settings
from dppo.config.resolve import DEFAULTS
from dppo.errors import counted
from dppo.records.differences import Difference
from dppo.records.metrics.reading import Rows
from dppo.records.metrics.registry import SCALED, SHARE, metrics
from dppo.records.terminal.figures import number
from dppo.records.terminal.view import PHASES
from dppo.tools.curves import (
    EVALUATED_RETURN,
    RETURN,
    baseline_return,
    curve_of,
    resumed,
    training_times,
)
from dppo.tools.pictures.style import MEAN_OF_EPISODE, ON_EVALUATIONS, STEPS, time_axis
from dppo.tools.report.cards import cards
from dppo.tools.report.charts import (
    MAX_VALUE,
    Level,
    Line,
    Mark,
    Overlay,
    Points,
    chart,
    lanes,
    stacked,
    text,
)
from dppo.tools.report.facts import Facts

Columns = dict[str, np.ndarray]
"""The rows of a run by key, each [n]; NaN where a row has no such key."""
MAX_CHARTS = 40  # charts of a section
MAX_LANES = 64  # actors
MAX_KEYS_OF_ROW = 300
MAX_KEYS = 1000
MAX_COUNTS = 100
# keys that belong to another chart
ENDS_OF_OTHERS = (
    "_std",
    "_min",
    "_max",
    "_low",
    "_high",
    "eval/iteration",
    "eval/global_step",
    "eval/baseline_return",
    "eval/baseline_pairs",
)
BANDS = (("low", "high", "95 % interval"), ("min", "max", "lowest to highest"))
"""Ends of the keys of a band, and its name."""
WITHOUT_UNIT = ("count", SHARE, "at most 1")
MEMORY = "actors/memory_gb"
SECTIONS = {  # keys, and prefixes of other keys, in the order in which they are drawn
    "Evaluation": (
        "eval/episodic_return",
        "eval/baseline_difference",
        "eval/success_rate",
        "eval/episodic_length",
        "eval/info/",
        "eval/",
        "eval/episodes",
        "eval/s",
    ),
    "Reported by the environment": ("info/",),
    "Losses and policy": (
        "losses/policy_loss",
        "losses/value_loss",
        "losses/approx_kl",
        "losses/clipfrac",
        "losses/entropy",
        "losses/critic_loss",
        "losses/q_mean",
        "losses/temperature",
        "losses/action_std",
        "losses/explained_variance",
        "losses/grad_norm",
        "charts/learning_rate",
        "charts/episodic_length",
        "charts/success_rate",
    ),
    "Where the time goes": ("perf/iteration_s", "charts/SPS_iteration", "actors/"),
}
KINDS = {
    "actor": "actor lost or replaced",
    "env": "fault of an environment",
    "resume": "resumed",
    "other": "other incident",
}
LONG = ("settings", "files", "versions")
"""Parts of a certificate that the page shows elsewhere, or that are hashes to compare by a program."""
INCIDENT_COLUMNS = ("number", "time", "kind", "message")


def page(facts: Facts) -> str:
    """Return the page. All text in it is escaped, and its policy allows nothing but its own style sheet."""
    folder = Path(__file__).parent
    css = (folder / "page.css").read_text(encoding="utf8")
    css_sha256 = hashlib.sha256(css.encode()).digest()
    template = Template((folder / "page.html").read_text(encoding="utf8"))
    return template.substitute(
        title=text(f"{facts.config.env_name}, seed {facts.config.seed}"),
        css=css,
        allowed=base64.b64encode(css_sha256).decode(),
        body="\n".join(_sections(facts)),
    )


def _sections(facts: Facts) -> Iterator[str]:
    tiles = "".join(
        f"<div><dt>{key}</dt><dd>{text(value)}</dd></div>" for key, value in cards(facts).items()
    )
    yield f"<dl>{tiles}</dl>"
    if facts.rows:
        yield from _charts(facts)
    else:
        yield "<p>No iteration has finished yet: there is nothing to draw.</p>"
    findings = "".join(
        f'<li class="{text(severity)}">{text(words)}</li>' for severity, words in facts.findings
    )
    if findings:
        yield f"<h2>Diagnosis</h2><ul>{findings}</ul>"
    yield _incidents(facts)
    yield from _settings(facts.config)
    if facts.certificate:
        yield _verification(facts.certificate)
    yield f"<h2>Reproduce it</h2><pre>{text(facts.command)}</pre>{_table(facts.versions.items())}"


def _verification(certificate: Mapping[str, Any]) -> str:
    rows = []
    for name in certificate:
        value = certificate[name]
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        if name not in LONG:
            rows.append((name, value))
    return f"<h2>Verification</h2>{_table(rows[:MAX_COUNTS])}"


def _incidents(facts: Facts) -> str:
    counts = []
    for key, count in facts.last_row.items():
        if key.startswith(("incidents/", "faults/")):
            name = key.partition("/")[2]
            counts.append((name, f"{count:g}"))
    if not counts and not facts.incidents:
        return ""
    folders = [
        [incident.get(column, "") for column in INCIDENT_COLUMNS] for incident in facts.incidents
    ]
    return f"<h2>Incidents</h2>{_table(counts[:MAX_COUNTS])}{_table(folders, INCIDENT_COLUMNS)}"


def _settings(config: Config) -> Iterator[str]:
    changed = []
    unchanged = []
    task_settings = {default.setting for default in DEFAULTS[config.algo]}
    for name, default in plain_defaults(plain_settings(config)).items():
        value = plain(getattr(config, name))
        if name == "env_id":
            continue
        if value == default:
            unchanged.append((name, as_typed(value)))
        elif name in task_settings:
            changed.append((name, as_typed(value), "depends on the task"))
        else:
            changed.append((name, as_typed(value), as_typed(default)))
    yield f"<h2>Settings</h2>{_table(changed, ('setting', 'value', 'default'))}"
    summary = f"{counted(len(unchanged), 'setting')} with their defaults"
    yield f"<details><summary>{summary}</summary>{_table(unchanged)}</details>"


def _charts(facts: Facts) -> Iterator[str]:
    columns = _columns(facts.rows)
    _join_memory_of_actors(columns)
    steps = columns["global_step"]
    controller = baseline_level(facts.rows)
    levels = {"eval/baseline_difference": Level("no difference", 0.0)}
    if controller is not None:
        levels["eval/episodic_return"] = controller
    yield _learning(facts, columns, controller)
    times = {
        phase: columns[f"perf/{phase}_frac"] * columns["perf/iteration_s"]
        for phase in PHASES
        if columns.keys() >= {f"perf/{phase}_frac", "perf/iteration_s"}
    }
    for title, prefixes in SECTIONS.items():
        x = steps
        if title == "Evaluation":
            x = columns.get("eval/global_step", steps)
        figures = []
        if title == "Where the time goes":
            figures.append(stacked("share of the time", steps, times, STEPS))
        for key in _drawn_keys(columns, prefixes)[:MAX_CHARTS]:
            line = _with_spread(columns, key, x)
            unit = _unit(key, facts.config)
            overlay = Overlay(level=levels.get(key))
            figures.append(chart(key, line, STEPS, unit=unit, overlay=overlay))
        yield _group(title, figures)
    if facts.actors:
        actors = dict(list(facts.actors.items())[:MAX_LANES])
        title = f"processes of {len(actors)} of {counted(len(facts.actors), 'actor')}"
        yield _group("Actors", [lanes(title, actors, "seconds since the first began")])


def _unit(key: str, config: Config) -> str:
    """Return the unit of a metric; "" for a count, a share, and what the environment reports."""
    unit = next(
        (metric.unit for group in metrics().values() for metric in group if metric.key == key), ""
    )
    if unit in WITHOUT_UNIT:
        return ""
    return unit if config.scales_rewards else unit.replace(SCALED, "reward")


def _columns(rows: Rows) -> Columns:
    """Return the values of each key; of some keys only, if a stranger's file has a million."""
    keys = dict.fromkeys(key for row in rows for key in list(row)[:MAX_KEYS_OF_ROW])
    names = ["global_step", *list(keys)[:MAX_KEYS]]
    return {key: np.array([row.get(key, math.nan) for row in rows]) for key in names}


def _drawn_keys(columns: Columns, prefixes: Sequence[str]) -> list[str]:
    """Return the keys that have a chart of their own, in the order of their prefixes."""
    has_chart = [
        key
        for key in columns
        if (not key.endswith(ENDS_OF_OTHERS) or f"{key}_min" in columns)
        # an earlier version wrote zeros for the actors of a run without any
        and not (key.startswith("actors/") and not np.nan_to_num(columns[key]).any())
    ]
    places = dict[str, int]()
    for key in has_chart:
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), "")
        if key in prefixes:
            prefix = key
        if prefix:
            places[key] = prefixes.index(prefix)
    return sorted(places, key=places.__getitem__)


def baseline_level(rows: Rows) -> Level | None:
    mean_return = baseline_return(rows)
    if mean_return is None:
        return None
    return Level(f"baseline, {ON_EVALUATIONS}", mean_return)


def comparison_sentence(facts: Facts) -> str:
    """Return the last comparison of the policy with the user's controller in words; "" without one."""
    for row in reversed(facts.rows):
        difference = Difference.from_row(row)
        if difference is not None:
            return (
                f"The baseline {facts.config.baseline_name} has a mean return of "
                f"{number(row['eval/baseline_return'])}. The last evaluation, after {row['eval/global_step']:,.0f} env "
                f"steps, differs by {difference}: the policy is {difference.verdict}."
            )
    return ""


def _learning(facts: Facts, columns: Columns, controller: Level | None) -> str:
    """Return the mean return over env steps and over time, with marks for incidents."""
    seconds = training_times(facts.rows)
    scale, time_label = time_axis(seconds)
    evaluations = curve_of(facts.rows, EVALUATED_RETURN, plain_settings(facts.config))
    name = f"points: {evaluations.evaluations_name}"
    returns = np.clip(evaluations.values, -MAX_VALUE, MAX_VALUE)
    figures = []
    if RETURN in columns:
        for x, evaluated_at, label in (
            (columns["global_step"], evaluations.steps, STEPS),
            (seconds / scale, evaluations.seconds / scale, time_label),
        ):
            line = _with_spread(columns, RETURN, x)
            points = Points(name, evaluated_at, returns)
            drawn = chart(
                MEAN_OF_EPISODE.capitalize(),
                line,
                label,
                name=f"line: {evaluations.training_name}",
                overlay=Overlay(marks(facts.rows, x), controller, points),
            )
            figures.append(drawn)
    if not any(figures):
        return "<p>No episode of the policy has finished yet.</p>"
    kinds = [kind for kind in KINDS if f'"mark {kind}"' in "".join(figures)]
    legend = "".join(f'<span class="{kind}">{KINDS[kind]}</span>' for kind in kinds)
    learning = _group("Learning", figures, legend)
    sentence = comparison_sentence(facts)
    if sentence:
        learning += f"<p>{text(sentence)}</p>"
    return learning


def _join_memory_of_actors(columns: Columns) -> None:
    """Replace the memory of each actor by the least of all, the lower end of the chart of the largest."""
    names = [key for key in columns if key.startswith(f"{MEMORY}/")]
    by_actor = [columns.pop(key) for key in names]
    if by_actor and MEMORY in columns:
        columns[f"{MEMORY}_min"] = np.fmin.reduce(by_actor)  # NaN only where all are


def _with_spread(columns: Columns, key: str, x: np.ndarray) -> Line:
    """Return a mean with its ends: mean -/+ standard deviation, or lowest and highest value, where these exist."""
    mean = columns[key]
    # the extremes of single steps would squeeze the mean into a flat line
    if key.startswith("info/"):
        return Line(x, mean, mean, mean)
    stem = key.removesuffix("_mean").replace("eval/episodic_", "eval/")
    deviation = columns.get(f"{stem}_std", np.zeros_like(mean))
    low = mean - deviation
    high = mean + deviation
    band = "mean +- standard deviation"
    for low_end, high_end, name in BANDS:
        if f"{stem}_{low_end}" in columns:
            low = columns[f"{stem}_{low_end}"]
            high = columns.get(f"{stem}_{high_end}", mean)
            band = name
    low = np.where(np.isfinite(low), low, mean)
    high = np.where(np.isfinite(high), high, mean)
    return Line(x, mean, low, high, band)


def marks(rows: Rows, x: np.ndarray) -> list[Mark]:
    """Return where the run was resumed, and where each kind of incident was counted."""
    events = []
    first_after_resume = resumed(rows)
    for index in range(1, len(rows)):
        row = rows[index]
        place = float(x[index])
        when = f"before step {row['global_step']:,.0f}"
        if first_after_resume[index]:
            events.append(Mark(place, "resume", f"resumed {when}"))
        for key in row:
            if key.startswith("incidents/") and row[key] > rows[index - 1].get(key, 0):
                name = key.removeprefix("incidents/")
                events.append(Mark(place, _kind_of(name), f"{name}, {when}"))
    return events


def _kind_of(incident: str) -> str:
    if incident == "bad_step":
        return "env"
    return next((kind for kind in KINDS if incident.startswith(kind)), "other")


def _group(title: str, figures: Sequence[str], legend: str = "") -> str:
    if not any(figures):
        return ""
    if legend:
        legend = f'<p class="legend">{legend}</p>'
    return f"<h2>{title}</h2>{legend}<section>{''.join(figures)}</section>"


def _table(rows: Iterable[Sequence[object]], names: Sequence[str] = ()) -> str:
    table = ""
    for row in rows:
        table += f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
    if not table:
        return ""
    if names:
        table = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{table}"
    return f'<div class="wide"><table>{table}</table></div>'
