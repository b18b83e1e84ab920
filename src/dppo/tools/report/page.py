"""A run as one HTML page that needs no network: what `dppo report` has read, in sections.

Its charts are inline SVG: no script, no style attribute, and text that keeps its size on a narrow screen. Places are
shares of a chart, in percent, so that it is as wide as the page; only its lines are stretched.
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from dppo.config import Config
from dppo.config.parts import default_of, settings_by_name
from dppo.config.plain import plain
from dppo.errors import counted, printable
from dppo.records.terminal.view import PHASES, duration, number
from dppo.tools.curves import RETURN, resumed, training_times
from dppo.tools.pictures.style import STEPS, short, time_axis

Row = Mapping[str, float]
Mark = tuple[float, str, str]
"""A vertical line: place, kind as in the style sheet, text."""
LINE, AREA, FEW = 240, 80, 20  # points, each the mean of neighboring rows; fewer are drawn as dots, too
MOST_MARKS, LARGEST = 60, 1e30
MOST, MOST_LANES = 40, 64  # charts of one kind; actors
NOT_DRAWN = ("_std", "_min", "_max", "eval/iteration", "eval/global_step")  # ends of keys that belong to another
MEMORY = "actors/memory_gb"
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
    times = training_times(facts.rows)
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
    _join_memory_of_actors(of)
    steps, seconds = of["global_step"], training_times(facts.rows)
    scale, name_of_time = time_axis(seconds)
    both = []
    for x, label in ((steps, STEPS), (seconds / scale, name_of_time)) if RETURN in of else ():
        spread, where = _with_spread(of, RETURN), marks(facts.rows, x)
        both.append(chart("Episode return", x, spread, label, name="mean of the last 100", marks=where))
    seen = "".join(f'<span class="{kind}">{KINDS[kind]}</span>' for kind in KINDS if f'"mark {kind}"' in "".join(both))
    yield _group("Learning", both, seen) if any(both) else "<p>No episode has finished yet.</p>"
    parts = {TIMES[name]: of[f"perf/{name}_frac"] for name in PHASES if f"perf/{name}_frac" in of}
    for title, prefixes in SECTIONS.items():
        drawn = [key for key in of if not key.endswith(NOT_DRAWN) or f"{key}_min" in of]  # with ends of its own
        keys = [key for prefix in prefixes for key in drawn if key.startswith(prefix)]
        x = of.get("eval/global_step", steps) if title == "Evaluation" else steps
        shares = [stacked("share of each iteration", steps, parts, STEPS)] if title.startswith("Where") else []
        yield _group(title, shares + [chart(key, x, _with_spread(of, key), STEPS) for key in keys[:MOST]])
    if facts.actors:
        shown = dict(list(facts.actors.items())[:MOST_LANES])
        of_actors = f"processes of {len(shown)} of {counted(len(facts.actors), 'actor')}"
        yield _group("Actors", [lanes(of_actors, shown, "seconds since the first began")])


def _join_memory_of_actors(of: dict[str, np.ndarray]) -> None:
    """Replace the memory of each actor by the least of all, the lower end of the chart of the largest."""
    of_actors = [of.pop(key) for key in list(of) if key.startswith(f"{MEMORY}/")]
    if of_actors and MEMORY in of:
        memory = np.array(of_actors)
        lowest = np.where(np.isfinite(memory), memory, np.inf).min(axis=0)
        of[f"{MEMORY}_min"] = np.where(np.isfinite(lowest), lowest, math.nan)


def _with_spread(of: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Return [3, n]: a mean, and its ends: less and plus its deviation, or lowest and highest, where these exist."""
    y, stem = of[key], key.removesuffix("_mean").replace("eval/episodic_", "eval/")
    if key.startswith("info/"):  # the extremes of single steps would squeeze the mean into a flat line
        return np.array([y, y, y])
    deviation = of.get(f"{stem}_std", 0 * y)
    ends = of.get(f"{stem}_min", y - deviation), of.get(f"{stem}_max", y + deviation)
    return np.array([y, *(np.where(np.isfinite(end), end, y) for end in ends)])


def marks(rows: Sequence[Row], x: np.ndarray) -> list[Mark]:
    """Return where the run was resumed, and where each kind of incident was counted: place, kind and text."""
    found = []
    for before, row, first, at in zip(rows[:-1], rows[1:], resumed(rows)[1:], x[1:].tolist(), strict=True):
        if first:
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


class Axis(NamedTuple):
    """The range of an axis."""

    low: float
    high: float
    label: str = ""

    def percent(self, values: float | np.ndarray) -> np.ndarray:
        """Return places along the axis."""
        return np.asarray(100 * (values - self.low) / (self.high - self.low))

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield place and label of some round numbers."""
        span = self.high - self.low
        step = 10.0 ** math.ceil(math.log10(span / 2))
        step *= next(part for part in (0.1, 0.2, 0.25, 0.5, 1) if span / (part * step) < 6)
        for count in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1):
            yield float(self.percent(count * step)), short(float(f"{count * step:.6g}"), 0)


def text(value: object) -> str:
    """Return text for a page: markup and control characters escaped, long parts left out."""
    return escape(printable(str(value)))


def chart(
    title: str, x: np.ndarray, y: np.ndarray, label: str, *, name: str = "last", marks: Sequence[Mark] = ()
) -> str:
    """Return a figure of a line with its spread and its last value; "" if none is finite.

    `y` is [3, n]: values, and the ends of the spread around them.
    """
    px, mean, low, high = _binned(np.array([x, *y]), LINE)
    if not len(px):
        return ""
    across, up, dots = _axis(px, 0.0, label), _axis(np.concatenate([low, high]), 0.05), len(px) < FEW
    at, (line, bottom, top) = across.percent(px), 100 - up.percent(np.array([mean, low, high]))
    inside = "".join(
        f'<path class="mark {kind}" d="M{across.percent(place):.2f} 0V100"><title>{text(said)}</title></path>'
        for place, kind, said in marks[:MOST_MARKS]
    )
    inside += f'<path class="band f0" d="{_area(at, bottom, top)}"/>'
    inside += f'<path class="line{" few" * dots}" d="{_line(at, line, dots=dots)}"/>'
    return _figure(title, {name: f"{mean[-1]:.4g}"}, inside, across, up.ticks())


def stacked(title: str, x: np.ndarray, parts: Mapping[str, np.ndarray], label: str) -> str:
    """Return a figure of parts that add up to 1, on top of each other; "" without any."""
    px, *heights = _binned(np.nan_to_num(np.array([x, *parts.values()])), AREA, spread=False)
    if not len(px) or not heights:
        return ""
    across, edges = _axis(px, 0.0, label), 100 * (1 - np.clip(np.cumsum([0 * px, *heights], axis=0), 0, 1))
    at, shares = across.percent(px), {name: f"{np.nan_to_num(part).mean():.0%}" for name, part in parts.items()}
    areas = (f'<path class="f{one}" d="{_area(at, *edges[one : one + 2])}"/>' for one in range(len(heights)))
    return _figure(title, shares, "".join(areas), across, Axis(0, 1).ticks())


def lanes(title: str, rows: Mapping[str, Sequence[tuple[float, float, str]]], label: str) -> str:
    """Return a figure with a lane for each of `rows`, which holds bars: begin, end, and a text about each."""
    ends, height = [bar[1] for bars in rows.values() for bar in bars], 100 / len(rows)
    across = _axis(np.array([0.0, *ends]), 0.0, label)
    inside = "".join(
        f'<rect class="f{turn % 2}" x="{across.percent(begin):.2f}" y="{(lane + 0.2) * height:.3f}" '
        f'width="{max(0.4, across.percent(end) - across.percent(begin) - 0.1):.2f}" height="{0.6 * height:.3f}">'
        f"<title>{text(said)}</title></rect>"
        for lane, bars in enumerate(rows.values())
        for turn, (begin, end, said) in enumerate(bars)
    )
    names = [(100 - (lane + 0.5) * height, name) for lane, name in enumerate(rows)]
    return _figure(title, {}, inside, across, names, 22 * len(rows))


def _figure(
    title: str, keys: Mapping[str, str], inside: str, across: Axis, up: Iterable[tuple[float, str]], size: int = 0
) -> str:
    legend = "".join(f'<span class="k{one}">{text(key)} <b>{keys[key]}</b></span>' for one, key in enumerate(keys))
    grid = ""
    for at, said in across.ticks():
        grid += f'<line x1="{at:.2f}%" x2="{at:.2f}%" y2="100%"/>'
        grid += f'<text x="{at:.2f}%" y="100%" dy="1.3em">{text(said)}</text>'
    for at, said in up:
        grid += f'<line x2="100%" y1="{100 - at:.2f}%" y2="{100 - at:.2f}%"/>' if not size else ""
        grid += f'<text class="end" x="-0.5em" y="{100 - at:.2f}%" dy="0.35em">{text(said)}</text>'
    kind, height = (" class=lanes", f' height="{size}"') if size else ("", "")
    return (
        f'<figure{kind}><figcaption>{text(title)}</figcaption><p class="legend">{legend}</p><svg class="plot"{height} '
        f'role="img" aria-label="{text(title)}"><g>{grid}</g><svg viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'{inside}</svg></svg><p class="unit">{text(across.label)}</p></figure>'
    )


def _binned(rows: np.ndarray, most: int, *, spread: bool = True) -> np.ndarray:
    """Return [k, n <= most] of [k, m]: means of neighboring finite columns; of `spread`, the lowest and highest."""
    rows = np.clip(rows[:, np.isfinite(rows).all(axis=0)], -LARGEST, LARGEST)
    count = rows.shape[1]
    if not count:
        return rows
    starts = np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))
    means = np.add.reduceat(rows, starts, axis=1) / np.diff(starts, append=count)
    if spread:
        means[2:] = np.minimum.reduceat(rows[2], starts), np.maximum.reduceat(rows[3], starts)
    return np.asarray(means)


def _axis(values: np.ndarray, margin: float, label: str = "") -> Axis:
    """Return a range that contains `values`; and zero, if they are not far from it, or all equal."""
    low, high = float(values.min()), float(values.max())
    if 0 <= low < high / 2 or high - low <= 1e-9 * abs(high):
        low, high = min(0.0, low), max(0.0, high)
    more = max(margin * (high - low), 1e-12)
    return Axis(low - more * (low != 0), high + more, label)


def _line(x: np.ndarray, y: np.ndarray, *, dots: bool = False) -> str:
    """Return a path; with `dots`, its points too, as lines without a length, which have round ends."""
    points = [f"{a:.2f} {b:.2f}" for a, b in zip(x, y, strict=True)]
    return f"M{'L'.join(points)}{''.join(f'M{one}h0' for one in points) if dots else ''}"


def _area(x: np.ndarray, bottom: np.ndarray, top: np.ndarray) -> str:
    return f"{_line(x, bottom)}L{_line(x[::-1], top[::-1])[1:]}Z"
