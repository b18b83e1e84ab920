"""Several runs together: mean and spread over the seeds that share settings, their picture, and intervals."""

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo.config.files import plain
from dppo.config.parts import default_of, settings_by_name
from dppo.errors import DppoError, counted, printable
from dppo.records.files.run_folder import CONFIG, settings_to_resume
from dppo.records.metrics.reading import sampled_metrics
from dppo.records.plots import COLOURS, DPI, INK, joined_times, save, style, time_unit

NOT_COMPARED = ("seed", "run_dir", "progress")  # settings that make no other experiment
POINTS, RESAMPLES = 400, 2000
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


class One(NamedTuple):
    """A metric of a run, where it is finite."""

    settings: Mapping[str, Any]
    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


class Group(NamedTuple):
    """Runs that differ in their seeds only, as a rule."""

    label: str
    """The settings in which they differ from other groups."""
    runs: Sequence[One]

    def __str__(self) -> str:
        seeds = {run.settings.get("seed") for run in self.runs}
        return f"{self.label} ({counted(len(self.runs), 'seed' if len(seeds) == len(self.runs) else 'run')})"

    def last(self) -> np.ndarray:
        """Return the last value of each run."""
        return np.array([run.values[-1] for run in self.runs])


def run_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the run folders among `paths`, and those in folders of several runs."""
    for path in paths:
        inner = sorted(one.parent for depth in ("*", "runs/*") for one in path.glob(f"{depth}/{CONFIG}"))
        yield from [path] if (path / CONFIG).exists() or not inner else inner


def read_one(run: Path, metric: str) -> One:
    """Return a metric of a run, perhaps without a value; raise a DppoError if it is no run, or has no such key."""
    settings, rows = settings_to_resume(run), sampled_metrics(run)
    seconds = joined_times([row.get("time/training_s", 0.0) for row in rows])
    steps, values = (np.array([row.get(key, math.nan) for row in rows]) for key in ("global_step", metric))
    known = np.isfinite(values) & np.isfinite(seconds)
    if rows and "episod" not in metric and not any(metric in row for row in rows):
        raise DppoError(f"metric={metric}: is not in {run}. It has {', '.join(sorted(rows[-1]))}.")
    return One(settings, steps[known], seconds[known], values[known])


def grouped_by_settings(runs: Sequence[One]) -> list[Group]:
    """Return runs in groups with equal settings but for their seeds, labeled by what differs between groups."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_COMPARED)
    defaults = {name: default_of(name) for name in names if name in settings_by_name()}
    values = [{name: plain(run.settings.get(name, defaults.get(name))) for name in names} for run in runs]
    differing = [name for name in names if any(one[name] != values[0][name] for one in values)]
    groups: dict[str, list[One]] = {}
    for run, own in zip(runs, values, strict=True):
        shown = (own[name] if isinstance(own[name], str) else json.dumps(own[name]) for name in differing)
        label = ", ".join(f"{name}={value}" for name, value in zip(differing, shown, strict=True))
        groups.setdefault(printable(label or str(run.settings.get("env_id"))), []).append(run)
    return [Group(label, same) for label, same in groups.items()]


def mean_and_spread(group: Group, *, over_time: bool) -> np.ndarray:
    """Return [4, n]: x, mean, lowest and highest value over the runs of a group, where all of them have values."""
    along = [(run.seconds if over_time else run.steps, run.values) for run in group.runs]
    first, last = max(x[0] for x, _ in along), min(x[-1] for x, _ in along)
    x = np.linspace(first, last, POINTS)[: 0 if last < first else 1 if last == first else POINTS]
    values = np.array([np.interp(x, own, y) for own, y in along])
    return np.array([x, values.mean(axis=0), values.min(axis=0), values.max(axis=0)])


def draw_together(groups: Sequence[Group], path: Path, title: str, metric: str, *, over_time: bool) -> None:
    """Draw the groups into the PNG or SVG `path`: means, each in the band from the lowest to the highest run."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bands = [mean_and_spread(group, over_time=over_time) for group in groups]
    scale, unit = time_unit(np.concatenate([band[0] for band in bands])) if over_time else (1.0, "")
    labels = ["\n".join(textwrap.wrap(str(group), 96)) for group in groups]
    with mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "dppo"}):
        height = 4 + 0.18 * sum(label.count("\n") + 1.3 for label in labels)
        figure = Figure(figsize=(8, height), dpi=DPI, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.add_subplot()
        style(axis, labelsize=9)
        for index, ((x, mean, low, high), label) in enumerate(zip(bands, labels, strict=True)):
            color, dashes = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
            marker = "o" if len(x) == 1 else None
            axis.fill_between(x / scale, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(x / scale, mean, color=color, linestyle=dashes, marker=marker, label=label)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axis.set_xlabel(f"training time ({unit})" if over_time else "env steps", color=INK, fontsize=9)
        axis.set_ylabel(metric, color=INK, fontsize=9)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, labelcolor=INK)
        save(figure, path)


def interval(tasks: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean of the runs of a task, or the interquartile mean of several tasks, and its 95 % interval.

    Percentiles of a bootstrap that draws the runs of each task apart. Source: Agarwal et al. 2021, "Deep Reinforcement
    Learning at the Edge of the Statistical Precipice", section 4 (rliable).
    """
    draw = np.random.default_rng(0)
    drawn = np.concatenate([draw.choice(task, (RESAMPLES, len(task))) for task in tasks], axis=1)
    count, cut = drawn.shape[1], 0 if len(tasks) == 1 else drawn.shape[1] // 4
    found, *means = np.sort([np.concatenate(tasks), *drawn], axis=1)[:, cut : count - cut].mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return found, low, high
