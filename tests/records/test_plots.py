"""Pictures show the data; numbers that pixels cannot show are checked before they are drawn."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dppo.tools.curves import (
    MAX_POINTS,
    RETURN,
    Curve,
    CurveGroup,
    curve_of,
    over_seeds,
    resumed,
    thinned,
    training_times,
)
from dppo.tools.pictures import comparison
from dppo.tools.pictures.comparison import compare_figure
from dppo.tools.pictures.learning_curve import learning_curve, smoothed
from dppo.tools.pictures.style import COLOURS, GREY


def rows(count: int, first_episode: int = 3) -> list[dict[str, float]]:
    metrics: list[dict[str, float]] = []
    for i in range(1, count + 1):
        row = {"iteration": i, "global_step": 256 * i, "time/training_s": 0.1 * i}
        if i >= first_episode:
            row["charts/episodic_return"] = 100 * math.tanh(i / 50) + i % 3
        metrics.append(row)
    return metrics


def curve(seed: int, speed: float) -> Curve:
    iteration = np.arange(100)
    step = (iteration + 1) * 256
    value = 100 * np.tanh(iteration / (30 + 5 * seed))
    seconds = step / speed * (1 + 0.01 * seed)
    return Curve(seconds, step, value)


def groups(*speeds: float) -> list[CurveGroup]:
    return [
        CurveGroup(f"{n} actors", tuple(curve(s, v) for s in range(3)))
        for n, v in enumerate(speeds, 1)
    ]


def pixels(path: Path) -> np.ndarray:
    """Return an image as [height, width, 3] in 0 .. 255."""
    from matplotlib.image import imread

    return (imread(path)[:, :, :3] * 255).round()


def count(picture: np.ndarray, colour: str, alpha: float = 1.0) -> int:
    """Count the pixels of `colour` on white."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    shown = alpha * rgb + (1 - alpha) * 255
    difference = np.abs(picture - shown).max(axis=2)
    return int((difference <= 3).sum())


@pytest.mark.parametrize(("length", "blue"), [(3, 25), (50_000, 1000)])
def test_a_learning_curve_of_any_length_is_drawn_over_steps_and_time(
    length: int, blue: int, tmp_path: Path
) -> None:
    path = tmp_path / "learning_curve.png"
    learning_curve(curve_of(rows(length), RETURN), path, "CartPole-v1, seed 1")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"

    size = struct.unpack(">II", data[16:24])
    assert size == (1800, 800)

    picture = pixels(path)
    red = picture[:, :, 0]
    is_blue = picture[:, :, 2] > red + 40
    over_steps = is_blue[:, :900]
    over_time = is_blue[:, 900:]
    assert over_steps.sum() > blue
    assert over_time.sum() > blue


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the figures that are drawn, which are not saved."""
    monkeypatch.chdir(tmp_path)  # for a picture that is saved all the same
    drawn: list[Any] = []
    for module in ("learning_curve", "comparison"):
        monkeypatch.setattr(
            f"dppo.tools.pictures.{module}.save", lambda figure, _: drawn.append(figure)
        )
    return drawn


def test_a_learning_curve_has_a_line_for_the_controller_of_the_user(figures: list[Any]) -> None:
    lines = rows(3)
    lines[-1] |= {"eval/baseline_return": -26.7}
    learning_curve(curve_of(lines, RETURN), Path("a.png"), "tanks:make, seed 1")
    [figure] = figures
    for axis in figure.axes:
        line = next(line for line in axis.lines if "baseline" in str(line.get_label()))
        assert line.get_label() == "baseline, on the evaluations' episodes: -26.7"
        assert list(line.get_ydata()) == [-26.7, -26.7]


@pytest.mark.parametrize(
    ("settings", "evaluations", "training"),
    [
        ({}, "evaluations, without noise", "training, with noise"),
        (
            {"eval_stochastic": True, "noise": "wide"},
            "evaluations, with noise",
            "training, with noise, without episodes of wide exploration",
        ),
    ],
)
def test_a_learning_curve_names_the_returns_that_it_shows(
    settings: dict[str, Any], evaluations: str, training: str, figures: list[Any]
) -> None:
    lines = rows(3)
    lines[-1] |= {"eval/episodic_return": 20.0, "eval/global_step": 512}
    curve = curve_of(lines, RETURN, settings)
    learning_curve(curve, Path("a.png"), "E-v0, seed 1")
    [figure] = figures
    over_steps, over_time = figure.axes
    assert "mean return" in over_steps.get_ylabel()
    names = [text.get_text() for text in over_time.get_legend().get_texts()]
    assert names == [evaluations, training, "smoothed"]
    points = [line for axis in figure.axes for line in axis.lines if line.get_marker() == "o"]
    assert len(points) == 4
    assert not any(line.get_clip_on() for line in points), "points at 0 are not cut in half"


def test_a_comparison_of_single_points_draws_them_as_a_whole(figures: list[Any]) -> None:
    curve = curve_of(rows(3)[-1:], RETURN)
    groups = [CurveGroup("1 actor", [curve]), CurveGroup("2 actors", [curve])]
    compare_figure(groups, Path("a.png"), "", None)
    points = [line for axis in figures[0].axes for line in axis.lines if line.get_marker() == "o"]
    assert len(points) == 6
    assert not any(line.get_clip_on() for line in points)


@pytest.mark.parametrize(
    "empty", [[], rows(2), [{**rows(1)[0], "charts/episodic_return": math.nan}]]
)
def test_the_picture_without_a_finished_episode_has_a_sentence(
    tmp_path: Path, empty: list[dict[str, float]]
) -> None:
    learning_curve(curve_of(empty, RETURN), tmp_path / "a.png", "Slow-v0, seed 1")
    picture = pixels(tmp_path / "a.png")
    assert count(picture, COLOURS[1]) == 0
    middle = picture[350:450, 250:700]
    assert count(middle, GREY) > 100, "the sentence in the middle"


def test_a_comparison_shows_every_group_in_both_panels_where_they_are_equal(tmp_path: Path) -> None:
    # without an episode
    nothing = CurveGroup("0 actors", (Curve(np.zeros(0), np.zeros(0), np.zeros(0)),))
    compare_figure([*groups(100, 200, 400), nothing], tmp_path / "a.png", "Equal batch.", 90.0)
    picture = pixels(tmp_path / "a.png")
    left = picture[180:620, :900]
    right = picture[180:620, 900:]
    for colour in COLOURS[:3]:
        assert count(left, colour) > 300
        assert count(right, colour) > 300


def test_a_line_that_others_cover_is_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(comparison, "save", lambda figure, _: drawn.append(figure))
    for over_time in (False, True):
        curve_groups = groups(100, 200, 400)
        comparison.draw_together(
            curve_groups, Path("a.png"), "E-v0", "return", over_time=over_time, baselines=[]
        )
    widths = [[line.get_linewidth() for line in figure.axes[0].lines] for figure in drawn]
    assert widths == [[7.5, 4.5, 1.5], [1.5, 1.5, 1.5]]


def test_drawing_needs_no_display_and_imports_matplotlib_only_when_needed(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from dppo.tools.curves import RETURN, curve_of
        from dppo.tools.pictures.learning_curve import learning_curve
        assert "matplotlib" not in sys.modules, "the import takes a second"
        learning_curve(curve_of([], RETURN), Path({str(tmp_path / "a.png")!r}), "title")
        assert "matplotlib.pyplot" not in sys.modules
        assert "torch" not in sys.modules and "ray" not in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )


def test_smoothing_is_a_moving_mean() -> None:
    values = np.random.default_rng(1).normal(size=200)
    slow = []
    for i in range(200):
        half = min(5, i, 199 - i)
        around = values[i - half : i + half + 1]
        slow.append(around.mean())
    np.testing.assert_allclose(smoothed(values), slow, atol=1e-12)
    np.testing.assert_allclose(smoothed(np.array([3.0])), [3.0])
    assert len(smoothed(np.zeros(0))) == 0


def test_times_of_a_resumed_run_are_joined() -> None:
    rows = [{"time/training_s": seconds} for seconds in (1, 2, 3, 0.5, 1, 0.25)]
    np.testing.assert_allclose(training_times(rows), [1, 2, 3, 3.5, 4, 4.25])
    assert len(training_times([])) == 0
    assert len(resumed([])) == 0


def test_a_resume_is_found_also_where_its_first_iteration_took_longer_than_all_before() -> None:
    """It makes the environments again, and replays their episodes."""

    def row(seconds: float, steps: int, steps_of_call: int) -> dict[str, float]:
        return {
            "time/training_s": seconds,
            "global_step": steps,
            "charts/SPS": steps_of_call / seconds,
        }

    rows = [row(1, 64, 64), row(3, 128, 64), row(5, 192, 128), row(7, 256, 64)]
    assert resumed(rows).tolist() == [False, True, False, True]
    np.testing.assert_allclose(training_times(rows), [1, 4, 6, 13])


def time_to(target: float | None, *runs: Curve) -> float | None:
    return comparison.mean_time_to(CurveGroup("", runs), over_seeds(runs), target)


def test_the_time_to_a_target_is_the_mean_over_seeds_and_none_if_one_fails() -> None:
    slow, fast = (group.runs for group in groups(100, 200))
    for runs in (slow, fast):
        reached = []
        for run in runs:
            first = np.argmax(run.values >= 90)
            reached.append(run.seconds[first])
        assert time_to(90.0, *runs) == pytest.approx(np.mean(reached))
        assert time_to(101.0, *runs) is None
        ends = [run.seconds[-1] for run in runs]
        assert time_to(None, *runs) == pytest.approx(np.mean(ends))
    fast_steps = time_to(90.0, *fast)
    assert fast_steps is not None
    assert time_to(90.0, *slow) == pytest.approx(2 * fast_steps)

    failing = Curve(np.ones(1), np.full(1, 256), np.zeros(1))
    assert time_to(90.0, *slow, failing) is None


@pytest.mark.parametrize(
    ("seconds", "first", "target", "noise", "words"),
    [
        (8.04, 8.04, None, False, ": 8.0 s"),
        (58.4, 116.8, 475.0, False, ": 475 after 58 s (2.0×)"),
        (58.4, 116.8, None, True, ": 58 s (noise)"),
        (58.4, 58.4, None, True, ": 58 s"),
        (59.9, None, None, False, ": 60 s"),
        (125.0, 100.0, None, False, ": 2 min 05 s (0.8×)"),
        (None, 1.0, 475.0, False, ": 475 not reached"),
        (None, None, None, False, ""),
    ],
)
def test_times_are_written_in_minutes_and_seconds(
    seconds: float | None, first: float | None, target: float | None, noise: bool, words: str
) -> None:
    assert comparison.legend_time(seconds, first, target, noise=noise) == words


def test_groups_are_equal_only_if_all_returns_are() -> None:
    band, other = (over_seeds(group.runs) for group in groups(100, 200))
    assert comparison.all_equal([band, other])
    moved = other._replace(mean=other.mean + 1e-12)
    assert not comparison.all_equal([band, moved])


def test_thinning_keeps_both_ends() -> None:
    for length in (1, 2, 3999, 4000, 4001, 100_000):
        indices = thinned(length)
        assert indices[0] == 0
        assert indices[-1] == length - 1
        assert len(np.unique(indices)) == min(length, MAX_POINTS)
