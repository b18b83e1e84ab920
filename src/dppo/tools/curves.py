"""Learning curves of single runs and of groups of runs, and confidence intervals of their results."""

import difflib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from dppo.config.aliases import METRICS
from dppo.config.effects import ineffective
from dppo.config.parts import about, settings_by_name
from dppo.config.plain import as_typed, plain, plain_defaults
from dppo.config.settings import Settings
from dppo.errors import DppoError, counted, printable
from dppo.records.closing_lines import WITHOUT_WIDE
from dppo.records.files.run_files import CONFIG
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.metrics.reading import Rows, sampled_metrics

RETURN = "charts/episodic_return"
EVALUATED_RETURN = "eval/episodic_return"
# Settings that may differ between repetitions of one experiment.
NOT_COMPARED = ("seed", "run_dir", "progress")
MAX_NAMED = 5  # settings in a label, also those that follow from others
IN_TRAINING = "training, with noise"
MAX_DEPTH = 3  # of a run inside a folder: runs/COMPARISON/runs/RUN
MAX_POINTS = 4000  # points of a drawn line; longer lines are thinned out
RESAMPLES = 2000  # bootstrap samples of an interval
ROUNDING_STEPS = 0.5  # smaller differences between computed step counts are rounding errors


class Curve(NamedTuple):
    """A metric of a run in the iterations in which it is finite: arrays of the same length."""

    seconds: np.ndarray
    """Seconds of training."""
    steps: np.ndarray
    """Env steps."""
    values: np.ndarray
    settings: Mapping[str, Any] = {}
    baseline: float | None = None
    """Mean return of the user's controller on the evaluations' episodes; None without one."""
    evaluations: "Curve | None" = None
    """Mean returns of the policy in evaluations, perhaps empty; None unless the metric is RETURN."""

    @property
    def training_name(self) -> str:
        """The name of the returns of training in a legend, with the episodes that they leave out."""
        return IN_TRAINING + (WITHOUT_WIDE if self.settings.get("noise") == "wide" else "")

    @property
    def evaluations_name(self) -> str:
        """The name of the evaluations in a legend."""
        noise = "with" if self.settings.get("eval_stochastic") else "without"
        return f"evaluations, {noise} noise"

    def time_to(self, target: float | None) -> float | None:
        """Return the seconds of training until the value reached `target`; None if it never did."""
        if target is None:
            return None
        reached = self.seconds[self.values >= target]
        if len(reached):
            return float(reached[0])
        return None


class DrawnBaseline(NamedTuple):
    """The user's controller, which some groups of runs were compared with."""

    name: str
    mean_return: float
    group: int | None
    """Index of the group that was compared with it; None if all were, with the same return."""


TASK_SETTINGS = ("env_id", "env_kwargs", "eval_env_kwargs", "wrappers", "action_repeat")
"""Settings on which the return of a controller depends."""


class CurveGroup(NamedTuple):
    """Runs that usually differ in their seeds only."""

    label: str
    """The settings in which it differs from other groups, such as "8 actors"."""
    runs: Sequence[Curve]
    noise: bool = False
    """True if the group's speed-up is measurement noise and must not be shown as a result."""
    kind: str = ""
    """The kind of its returns, such as ", training, with noise"."""

    @property
    def evaluations(self) -> list[Curve]:
        """The evaluations of the runs that have any."""
        curves = [run.evaluations for run in self.runs]
        return [curve for curve in curves if curve is not None and len(curve.values)]

    def __str__(self) -> str:
        seeds = {run.settings.get("seed") for run in self.runs}
        noun = "seed" if len(seeds) == len(self.runs) else "run"
        return f"{self.label} ({counted(len(self.runs), noun)}){self.kind}"


class Band(NamedTuple):
    """A group at the same steps: mean time, and mean, lowest and highest value over its runs."""

    seconds: np.ndarray
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def run_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield `paths`; in place of a folder of runs, of seeds or of comparisons, yield each run folder inside it once."""
    for path in paths:
        runs: dict[str, Path] = {}  # by real path: a link may lead to a folder that is listed, too
        for run in _runs_inside(path, MAX_DEPTH):
            runs.setdefault(os.path.realpath(run), run)
        yield from runs.values() or [path]


def _runs_inside(folder: Path, depth: int) -> list[Path]:
    if os.path.exists(folder / CONFIG):
        return [folder]
    if depth == 0 or not os.path.isdir(folder):
        return []
    return [run for inner in sorted(folder.glob("*")) for run in _runs_inside(inner, depth - 1)]


def curve_of(rows: Rows, metric: str, settings: Mapping[str, Any] | None = None) -> Curve:
    """Return the curve of a metric from rows of metrics.jsonl; its seconds include the time before each resume."""
    seconds = training_times(rows)
    steps = _column(rows, "global_step")
    if rows and metric.startswith("eval/"):
        # A row reports the evaluation of an earlier policy: its point belongs to the step of that policy.
        steps_of_rows = steps
        steps = _column(rows, "eval/global_step")
        seconds = np.interp(steps, steps_of_rows, seconds)
    values = _column(rows, metric)
    is_finite = np.isfinite(values) & np.isfinite(seconds)
    return Curve(
        seconds[is_finite],
        steps[is_finite],
        values[is_finite],
        settings or {},
        baseline_return(rows),
        curve_of(rows, EVALUATED_RETURN, settings) if metric == RETURN else None,
    )


def baseline_return(rows: Rows) -> float | None:
    """Return the mean return of the user's controller from the last evaluation; None without a baseline."""
    for row in reversed(rows):
        value = row.get("eval/baseline_return", math.nan)
        if math.isfinite(value):
            return value
    return None


def _column(rows: Rows, name: str, missing: float = math.nan) -> np.ndarray:
    return np.array([row.get(name, missing) for row in rows])


def read_curve(run: Path, metric: str) -> Curve:
    """Return a metric of a run, perhaps empty; raise a DppoError if `run` is not a run."""
    return curve_of(sampled_metrics(run), metric, settings_to_resume(run, read_only=True))


def missing_metric(metric: str, runs: Collection[Path]) -> DppoError:
    """Return the error for a metric that none of `runs` has."""
    rows = chain.from_iterable(map(sampled_metrics, runs))
    keys = sorted(set().union(*rows))
    where = counted(len(runs), "run")
    if not keys or metric == RETURN:
        return DppoError(f"metric={metric}: no row of {where} has it yet.")
    alike = [key for key in keys if metric.lower() in key.lower() or key == METRICS.get(metric)]
    alike = alike or difflib.get_close_matches(metric, keys, n=1)
    if alike:
        names = " or ".join(alike[:3])
        return DppoError(f"metric={metric}: no row of {where} has it. Did you mean {names}?")
    return DppoError(f"metric={metric}: no row of {where} has it. They have {', '.join(keys)}.")


def training_times(rows: Rows) -> np.ndarray:
    """Return the seconds of training at each row of a run, summed over resumes.

    `time/training_s` in the rows starts at zero again at each resume.
    """
    times = np.nan_to_num(_column(rows, "time/training_s", 0.0))
    times_before = np.concatenate([[0.0], times])[:-1]
    before_resume = np.where(resumed(rows), times_before, 0.0)
    return np.asarray(times + np.cumsum(before_resume))


def resumed(rows: Rows) -> np.ndarray:
    """Return for each row whether it is the first one after a resume.

    It is if its training time is less than in the row before, or if its call of `train` began at a later step.
    """
    times = _column(rows, "time/training_s", 0.0)
    with np.errstate(over="ignore", invalid="ignore"):  # a stranger's rows may hold any number
        # the step at which the call of each row began: SPS counts from there
        first_steps = _column(rows, "global_step", 0.0) - _column(rows, "charts/SPS") * times
        moved_on = np.diff(first_steps, prepend=first_steps[:1])
    time_fell = np.diff(times, prepend=0.0) < 0
    return np.asarray(time_fell | (moved_on > ROUNDING_STEPS))


def thinned(count: int) -> np.ndarray:
    """Return at most MAX_POINTS of `count` indices, evenly spaced, with the first and the last."""
    places = np.linspace(0, count - 1, min(count, MAX_POINTS))
    return places.round().astype(np.int64)


def grouped_by_settings(runs: Sequence[Curve]) -> list[CurveGroup]:
    """Group runs whose settings are equal except for NOT_COMPARED; label each group with the settings that differ.

    Labels leave out settings that change no result, such as `track`, if the groups differ without them.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_COMPARED)
    values = []
    for run in runs:
        settings_of_run = {**plain_defaults(run.settings), **run.settings}
        left_out = _ineffective(settings_of_run)
        effects = (name for name in names if name not in left_out)
        values.append({name: plain(settings_of_run.get(name)) for name in effects})
    differing = [name for name in names if _differs(name, values)]
    effective = [name for name in differing if _may_change_results(name)]
    groups: dict[tuple[str, str], list[Curve]] = {}
    for run, settings in zip(runs, values, strict=True):
        labels = (_label(effective, settings), _label(differing, settings))
        groups.setdefault(labels, []).append(run)
    short_labels = [short_label for short_label, _ in groups]
    are_unique = len(set(short_labels)) == len(short_labels)
    labelled = []
    for (short_label, full_label), members in groups.items():
        label = short_label if are_unique else full_label
        if not label:  # no setting differs
            label = str(members[0].settings.get("env_id"))
        labelled.append(CurveGroup(printable(label), members))
    return labelled


def _differs(name: str, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a setting differs between runs in which it has an effect, and does not only follow from others."""
    affected = [settings for settings in runs if name in settings]
    return any(settings[name] != affected[0][name] for settings in affected) and any(
        _is_chosen(name, settings) for settings in affected
    )


def _ineffective(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of settings without effect, such as settings of the other algorithm; none for invalid ones."""
    with suppress(DppoError, TypeError, ValueError):
        return ineffective(Settings(**_known(settings)))
    return set()


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in settings if name in settings_by_name()}


def _is_chosen(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting of a run has another value than follows from its other settings."""
    value = settings[name]
    if name not in settings_by_name():  # of another version
        return True
    if value == plain_defaults(settings)[name]:
        return False
    if name != "minibatch_size":
        return True
    with suppress(DppoError, TypeError, ValueError):  # a stranger's settings may be invalid
        return bool(value != Settings(**_known(settings) | {name: None}).sizes.minibatch_rows)
    return True


def _may_change_results(setting: str) -> bool:
    return setting not in settings_by_name() or about(setting).resume == "fixed"


def _label(names: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return names and values of settings, for example `gamma=0.9, env_kwargs={"g": 1}`; of many, the chosen ones."""
    listed = [name for name in names if name in settings]
    if len(listed) > MAX_NAMED:
        listed = [name for name in listed if _is_chosen(name, settings)]
    return ", ".join(f"{name}={as_typed(settings[name])}" for name in listed)


def baselines_of(groups: Sequence[CurveGroup]) -> list[DrawnBaseline]:
    """Return the controller that each group was compared with; a single one if all have one task, and it is equal."""
    compared = {}
    for index, group in enumerate(groups):
        returns = [run.baseline for run in group.runs if run.baseline is not None]
        if returns:
            name = printable(str(group.runs[0].settings.get("baseline")))
            compared[index] = (name, fmean(returns))
    tasks = {
        str([run.settings.get(name) for name in TASK_SETTINGS])
        for group in groups
        for run in group.runs
    }
    if len(tasks) == len(set(compared.values())) == 1:
        return [DrawnBaseline(*next(iter(compared.values())), None)]
    return [
        DrawnBaseline(f"{name} of {groups[index].label}", mean_return, index)
        for index, (name, mean_return) in compared.items()
    ]


def over_seeds(runs: Sequence[Curve]) -> Band:
    """Return mean, lowest and highest value of the runs at the same steps, interpolated between the points of a run.

    The steps of all runs are used, within the range that every run covers.
    """
    if not all(len(run.steps) for run in runs):
        return Band(*np.empty((5, 0)))
    steps = np.concatenate([run.steps for run in runs])
    steps = np.unique(steps)
    first = max(run.steps[0] for run in runs)
    last = min(run.steps[-1] for run in runs)
    steps = steps[(steps >= first) & (steps <= last)]
    steps = steps[thinned(len(steps))]
    values = [np.interp(steps, run.steps, run.values) for run in runs]
    seconds = [np.interp(steps, run.steps, run.seconds) for run in runs]
    return Band(
        np.mean(seconds, axis=0),
        steps,
        np.mean(values, axis=0),
        np.min(values, axis=0),
        np.max(values, axis=0),
    )


def interval(tasks: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean of the runs of a task, or the interquartile mean of several tasks, and its 95 % interval.

    The interval lies between percentiles of a bootstrap, which resamples the runs of each task separately.

    Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", section 4
    (rliable).
    """
    generator = np.random.default_rng(0)
    resamples = np.concatenate(
        [generator.choice(task, (RESAMPLES, len(task))) for task in tasks], axis=1
    )
    count = resamples.shape[1]
    # the interquartile mean leaves out the lowest and the highest quarter
    num_trimmed = 0 if len(tasks) == 1 else count // 4
    ordered = np.sort([np.concatenate(tasks), *resamples], axis=1)
    trimmed = ordered[:, num_trimmed : count - num_trimmed]
    mean, *means_of_resamples = trimmed.mean(axis=1).tolist()
    low, high = np.percentile(means_of_resamples, [2.5, 97.5]).tolist()
    return mean, low, high
