"""learning_curve.png: the mean return of one run, over env steps and over training time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo.config import plain_settings
from dppo.log import logger
from dppo.records.files.disk import cause, remedy
from dppo.records.metrics.reading import read_metrics
from dppo.records.observer import Result
from dppo.records.outside import FileWriter
from dppo.tools.curves import RETURN, Curve, curve_of, thinned
from dppo.tools.pictures.style import (
    COLOURS,
    GREY,
    INK,
    LEFT,
    LEGEND,
    MEAN_OF_EPISODE,
    STEPS,
    draw_baseline,
    save,
    time_axis,
    two_panels,
)

FEW_VALUES = 20  # fewer values are drawn as points, too
# points on an axis are drawn as a whole
POINTS: dict[str, Any] = {"marker": "o", "markersize": 4, "clip_on": False}
SMOOTHING = 0.05  # window of the smoothed line, as a share of the run


@dataclass(eq=False)
class LearningCurve(FileWriter):
    """Draws learning_curve.png when a run has finished or was stopped."""

    title: str

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Draw the picture; log an error of the disk."""
        if result is None or error is not None or not result.iterations:
            return
        try:
            settings = {} if result.config is None else plain_settings(result.config)
            curve = curve_of(read_metrics(result.run_dir), RETURN, settings)
            learning_curve(curve, result.picture, self.title)
        except OSError as problem:
            logger.warning(
                "%s: cannot be written: %s %s", result.picture, cause(problem), remedy(problem)
            )
        except Exception as problem:  # perhaps caused by a line that another program has written
            logger.warning("%s: cannot be written (%s)", result.picture, problem)


def learning_curve(training: Curve, path: Path, title: str) -> None:
    """Draw the mean return of a run into the PNG `path`, over env steps and over training time."""
    evaluations = training.evaluations
    assert evaluations is not None
    scale, time_label = time_axis(training.seconds)
    figure, (over_steps, over_time) = two_panels(
        STEPS, time_label, top=0.83, bottom=0.15, y_label=MEAN_OF_EPISODE
    )
    figure.text(LEFT, 0.94, title, fontsize=12, fontweight="bold", color=INK)
    for axis, x, unit in ((over_steps, "steps", 1.0), (over_time, "seconds", scale)):
        evaluated_at = getattr(evaluations, x) / unit
        _draw_evaluations(axis, evaluated_at, evaluations.values, training.evaluations_name)
        _draw_training(axis, getattr(training, x) / unit, training)
        axis.set_xlim(left=0)
        if training.baseline is not None:
            draw_baseline(axis, training.baseline)
    if len(training.values) or len(evaluations.values):
        over_time.legend(
            **LEGEND | {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "ncols": 2}
        )
    save(figure, path)


def _draw_evaluations(axis: Any, x: np.ndarray, returns: np.ndarray, name: str) -> None:
    if len(returns):
        axis.plot(x, returns, color=COLOURS[0], linewidth=1.5, label=name, **POINTS)


def _draw_training(axis: Any, x: np.ndarray, training: Curve) -> None:
    returns = training.values
    if not len(returns):
        axis.text(
            0.5,
            0.5,
            "No episode has finished yet.",
            transform=axis.transAxes,
            ha="center",
            color=GREY,
        )
        axis.set(xticks=[], yticks=[])
        return
    at = thinned(len(returns))
    blue = COLOURS[1]
    points = POINTS if len(returns) < FEW_VALUES else {}
    pale = {"alpha": 0.3, "linewidth": 1, "label": training.training_name}
    axis.plot(x[at], returns[at], color=blue, **pale, **points)
    axis.plot(x[at], smoothed(returns)[at], color=blue, linewidth=2, label="smoothed")


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the moving mean over a twentieth of the series; at the ends, the window shrinks to a single value."""
    at = np.arange(len(values))
    to_nearest_end = np.minimum(at, at[::-1])
    largest_half = max(1, round(len(values) * SMOOTHING / 2))
    half = np.minimum(largest_half, to_nearest_end)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = at - half
    end = at + half + 1
    return np.asarray((sums[end] - sums[first]) / (end - first))
