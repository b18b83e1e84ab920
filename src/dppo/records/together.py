"""Several runs together: mean and spread over the seeds that share settings, their picture, and intervals."""

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo.config.files import plain
from dppo.config.parts import default_of
from dppo.errors import DppoError, counted, printable
from dppo.records.files.run_folder import CONFIG, settings_to_resume
from dppo.records.metrics.reading import sampled_metrics
from dppo.records.plots import COLOURS, DPI, INK, joined_times, save, style, time_unit

NOT_COMPARED = ("seed", "run_dir", "progress")  # settings that make no other experiment
POINTS, RESAMPLES = 400, 2000
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


class Curve(NamedTuple):
    """Values of a metric in one run; NaN is left out."""

    settings: Mapping[str, Any]
    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


class Group(NamedTuple):
    """Runs that differ in their seeds only."""

    label: str
    """The settings in which it differs from other groups."""
    curves: Sequence[Curve]

    @property
    def last(self) -> np.ndarray:
        """The last value of each run."""
        return np.array([curve.values[-1] for curve in self.curves])


def run_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the run folders among `paths`, and those in folders of several runs."""
    for path in paths:
        inner = sorted(
            (one.parent for depth in ("*", "runs/*") for one in path.glob(f"{depth}/{CONFIG}")), key=_natural
        )
        yield from [path] if (path / CONFIG).exists() or not inner else inner


def _natural(path: Path) -> tuple[str, int, str]:
    stem = path.name.rstrip("0123456789")
    return stem, int(path.name[len(stem) :][:9] or 0), str(path)


def read_curve(run: Path, metric: str) -> Curve:
    """Return a metric of a run; without values if it has no finite one. Raise a DppoError if it is no run."""
    settings, rows = settings_to_resume(run), sampled_metrics(run)
    seconds = joined_times([row.get("time/training_s", 0.0) for row in rows])
    steps, values = (np.array([row.get(key, math.nan) for row in rows]) for key in ("global_step", metric))
    known = np.isfinite(values) & np.isfinite(seconds)
    if rows and not known.any() and not any(metric in row for row in rows):
        raise DppoError(f"metric={metric}: is not in {run}. It has {', '.join(sorted(rows[-1]))}.")
    return Curve(settings, steps[known], seconds[known], values[known])


def grouped_by_settings(curves: Sequence[Curve]) -> list[Group]:
    """Return the curves in groups with equal settings but for their seeds, labeled by what differs."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        settings = {name: value for name, value in curve.settings.items() if name not in NOT_COMPARED}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(curve)
    firsts = [group[0].settings for group in groups.values()]
    names = [name for name in dict.fromkeys(name for one in firsts for name in one) if name not in NOT_COMPARED]
    differing = [name for name in names if len({json.dumps(_value(one, name), default=str) for one in firsts}) > 1]
    labels = [", ".join(f"{name}={_value(one, name)}" for name in differing) for one in firsts]
    return [
        Group(printable(label or str(group[0].settings.get("env_id"))), group)
        for label, group in zip(labels, groups.values(), strict=True)
    ]


def _value(settings: Mapping[str, Any], name: str) -> Any:
    return plain(settings.get(name, default_of(name)))


def mean_and_spread(group: Group, *, over_time: bool) -> np.ndarray:
    """Return [4, n]: x, mean, lowest and highest value over the runs of a group, where all of them have values."""
    along = [(curve.seconds if over_time else curve.steps, curve.values) for curve in group.curves]
    first, last = max(x[0] for x, _ in along), min(x[-1] for x, _ in along)
    if last < first:
        return np.zeros((4, 0))
    x = np.linspace(first, last, POINTS if last > first else 1)
    values = np.array([np.interp(x, own, y) for own, y in along])
    return np.array([x, values.mean(axis=0), values.min(axis=0), values.max(axis=0)])


def draw_together(groups: Sequence[Group], path: Path, title: str, metric: str, *, over_time: bool) -> None:
    """Draw the groups into the PNG or SVG `path`: means, each in the band from the lowest to the highest run."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bands = [mean_and_spread(group, over_time=over_time) for group in groups]
    scale, unit = time_unit(np.concatenate([band[0] for band in bands])) if over_time else (1.0, "")
    labels = ["\n".join(textwrap.wrap(f"{one.label} ({counted(len(one.curves), 'seed')})", 96)) for one in groups]
    lines = sum(label.count("\n") + 1.3 for label in labels)
    with mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "dppo"}):
        figure = Figure(figsize=(8, 4 + 0.18 * lines), dpi=DPI, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.add_subplot()
        style(axis, labelsize=9)
        for index, (band, label) in enumerate(zip(bands, labels, strict=True)):
            color, dashes = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
            x, mean, low, high = band[0] / scale, *band[1:]
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(x, mean, color=color, linestyle=dashes, marker="o" if len(x) == 1 else None, label=label)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axis.set_xlabel(f"training time ({unit})" if over_time else "env steps", color=INK, fontsize=9)
        axis.set_ylabel(metric, color=INK, fontsize=9)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, labelcolor=INK, borderaxespad=0.6)
        save(figure, path)


class Interval(NamedTuple):
    """A statistic of runs, and its 95 % interval; equal to it for a single run."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g}, 95 % interval {self.low:.4g} to {self.high:.4g}"


def interval(tasks: Sequence[np.ndarray]) -> Interval:
    """Return the mean of the runs of one task, or the interquartile mean over those of several, with an interval.

    Percentiles of a bootstrap that draws the runs of each task apart. Source: Agarwal et al. 2021, "Deep Reinforcement
    Learning at the Edge of the Statistical Precipice", sections 4.1 and 4.3 (rliable).
    """
    draw, trim = np.random.default_rng(0), 0 if len(tasks) == 1 else 0.25
    count = sum(map(len, tasks))

    def statistic(scores: np.ndarray) -> np.ndarray:
        cut = int(trim * count)
        return np.asarray(np.sort(scores, axis=-1)[..., cut : count - cut].mean(axis=-1))

    drawn = np.concatenate([draw.choice(task, (RESAMPLES, len(task))) for task in tasks], axis=1)
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return Interval(float(statistic(np.concatenate(tasks))), float(low), float(high))
