"""`dppo plot`: groups of runs, their curves, and the lines printed about them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import written_run
from commandline import Typed
from remedies import executes

from dppo.config import Config, plain_settings
from dppo.tools.curves import (
    RETURN,
    Curve,
    CurveGroup,
    DrawnBaseline,
    curve_of,
    grouped_by_settings,
    interval,
    over_seeds,
)
from dppo.tools.pictures import comparison as plots
from dppo.tools.pictures.comparison import draw_together
from dppo.tools.plot import _title


def a_run(folder: str, last: float, count: int = 4, **settings: Any) -> None:
    rows: list[dict[str, float]] = []
    for i in range(1, count + 1):
        row = {
            "iteration": i,
            "global_step": 512 * i,
            "time/training_s": 2.0 * i,
            "charts/episodic_return": last * i / count,
        }
        rows.append(row)
    written_run(Path(folder), rows, **settings)


def curve(seed: int, values: Sequence[float], steps: Sequence[float], **settings: Any) -> Curve:
    stored = {"seed": seed, "env_id": "E-v0", **settings}
    x = np.array(steps)
    return Curve(2 * x, x, np.array(values), stored)


def rising(seed: int = 1, **settings: Any) -> Curve:
    """Return a curve whose settings are all that matters."""
    return curve(seed, (0, 1), (0, 9), **settings)


def names(curves: Sequence[Curve]) -> list[str]:
    return [str(group) for group in grouped_by_settings(curves)]


def test_runs_are_grouped_by_all_settings_but_their_seeds() -> None:
    first: dict[str, Any] = {"gamma": 0.9, "env_kwargs": {"g": 1}}
    second: dict[str, Any] = {"gamma": 0.99, "env_kwargs": {"g": 1}}
    third: dict[str, Any] = {"gamma": 0.9, "env_kwargs": {"g": 2}, "name": "$\\frac{"}
    curves = [
        rising(1, **first),
        rising(1, **second),
        rising(2, **first),
        rising(2, **second),
        rising(1, **third),
    ]
    assert names(curves) == [
        'gamma=0.9, env_kwargs={"g": 1}, name=ppo (2 seeds)',
        'gamma=0.99, env_kwargs={"g": 1}, name=ppo (2 seeds)',
        'gamma=0.9, env_kwargs={"g": 2}, name=$\\frac{ (1 seed)',
    ]
    assert names(curves[:1]) == ["E-v0 (1 seed)"]

    tracked = [rising(gamma=0.9, track=[]), rising(gamma=0.99, track=["wandb"])]
    assert names(tracked) == ["gamma=0.9 (1 seed)", "gamma=0.99 (1 seed)"]
    times = [rising(num_actors=1), rising(num_actors=8)]
    assert names(times) == ["num_actors=1 (1 seed)", "num_actors=8 (1 seed)"]

    other_version = [rising(), rising(), rising(unknown=1)]
    assert names(other_version) == ["unknown=none (2 runs)", "unknown=1 (1 seed)"]


def test_labels_leave_out_what_follows_from_the_algorithm() -> None:
    """Batches differ here, and with them the minibatches."""

    def stored(**settings: Any) -> Curve:
        return rising(**plain_settings(Config(env_id="E-v0", num_samplers=2, **settings)))

    assert names([stored(), stored(algo="sac")]) == ["algo=ppo (1 seed)", "algo=sac (1 seed)"]
    rates = [stored(algo="sac"), stored(algo="sac", learning_rate=1e-3), stored(target_kl=0.0)]
    rate_names = [
        "algo=sac, learning_rate=0.0005 (1 seed)",
        "algo=sac, learning_rate=0.001 (1 seed)",
        "algo=ppo, learning_rate=0.0003 (1 seed)",
    ]
    assert names(rates) == rate_names  # nothing to limit the KL divergence of in SAC
    assert names([*rates, stored()]) == [
        *rate_names[:2],
        "algo=ppo, learning_rate=0.0003, target_kl=0.0 (1 seed)",
        "algo=ppo, learning_rate=0.0003, target_kl=none (1 seed)",
    ]
    sizes = [stored(num_steps=64), stored(num_steps=128)]
    assert names(sizes) == ["num_steps=64 (1 seed)", "num_steps=128 (1 seed)"]

    many = {
        "learning_rate": 0.1,
        "gae_lambda": 0.9,
        "ent_coef": 0.1,
        "vf_coef": 0.1,
        "activation": "relu",
    }
    assert names([stored(**many), stored(gamma=0.9)]) == [
        "learning_rate=0.1, gae_lambda=0.9, ent_coef=0.1, vf_coef=0.1, activation=relu (1 seed)",
        "gamma=0.9 (1 seed)",
    ], "of many settings, the chosen ones"


def test_mean_and_spread_are_those_where_all_runs_have_values() -> None:
    first = curve(1, [0, 10], [0, 10])
    second = curve(2, [4, 8, 8], [2, 6, 20])
    band = over_seeds([first, second])
    np.testing.assert_array_equal(band.steps, [2, 6, 10])
    np.testing.assert_array_equal(band.seconds, [4, 12, 20])
    np.testing.assert_allclose(band.low, [2, 6, 8])
    np.testing.assert_allclose(band.high, [4, 8, 10])
    np.testing.assert_allclose(band.mean, [3, 7, 9])

    later = curve(2, [4, 8], [20, 30])
    for column in over_seeds([first, later]):
        assert len(column) == 0


def test_an_evaluation_belongs_to_the_steps_of_its_policy() -> None:
    rows: list[dict[str, float]] = [
        {"global_step": 100 * i, "time/training_s": 2.0 * i} for i in range(1, 6)
    ]
    rows[2] |= {"eval/global_step": 200, "eval/episodic_return": 7.0}
    rows[4] |= {"eval/global_step": 400, "eval/episodic_return": 9.0}
    evaluated = curve_of(rows, "eval/episodic_return")
    assert evaluated.seconds.tolist() == [4.0, 8.0]
    assert evaluated.steps.tolist() == [200, 400]
    assert evaluated.values.tolist() == [7.0, 9.0]

    nothing = curve_of([], "eval/episodic_return")
    assert len(nothing.seconds) == 0
    assert len(nothing.steps) == 0
    assert len(nothing.values) == 0


@pytest.mark.proves("interval")
def test_an_interval_is_that_of_a_bootstrap_and_several_tasks_give_the_interquartile_mean() -> None:
    scores = np.random.default_rng(1).normal(10.0, 2.0, 40)
    mean, low, high = interval([scores])
    assert mean == pytest.approx(scores.mean())

    half = 1.96 * scores.std() / np.sqrt(40)
    assert mean - low == pytest.approx(half, rel=0.15)
    assert high - mean == pytest.approx(half, rel=0.15)
    assert interval([np.array([3.0])]) == (3.0, 3.0, 3.0)

    one_task = np.array([0.0, 1.0, 2.0, 100.0])
    another_task = np.array([3.0, 4.0, 5.0, -100.0])
    mean, *_ = interval([one_task, another_task])
    in_the_middle = [1, 2, 3, 4]  # half of the runs
    assert mean == pytest.approx(np.mean(in_the_middle))


LONG_LABEL = (
    "env_kwargs={'terrain': '$\\\\frac{x}'}, hidden_sizes=[256, 256, 256], learning_rate=0.0003, gamma=0.99"
    * 2
)


def test_a_picture_of_many_long_labels_is_drawn_with_a_place_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "DPI", 50)

    def keep(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(plots, "save", keep)
    groups = []
    for number in range(14):
        flat = curve(1, [0, number], [0, 9])
        groups.append(CurveGroup(f"{number} {LONG_LABEL}", [flat]))
    path = tmp_path / "a.png"
    draw_together(
        groups,
        path,
        "$title",
        "metric",
        over_time=True,
        baselines=[DrawnBaseline("pi:PI", 0.5, None)],
    )

    [figure] = drawn
    [axis] = figure.axes
    [legend] = figure.legends
    parts = [axis.get_tightbbox()]
    parts += [text.get_window_extent() for text in legend.get_texts()]
    for index, part in enumerate(parts):
        assert not any(part.overlaps(other) for other in parts[index + 1 :])
        assert 0 <= part.x0 < part.x1 <= figure.bbox.width
        assert 0 <= part.y0 < part.y1 <= figure.bbox.height


def test_evaluations_are_points_beside_the_line_of_a_controller(
    desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curve is of other episodes than the controller's line, above which it may be although the policy is worse."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, _: drawn.append(figure))
    for seed in (1, 2):
        a_run(f"run{seed}", 10.0, seed=seed, baseline="pi:PI", eval_every=512)
        metrics = Path(f"run{seed}", "metrics.jsonl")
        lines = metrics.read_text().splitlines()
        evaluation = {"eval/episodic_return": 3.0 + seed, "eval/global_step": 100}
        row = json.loads(lines[-1]) | evaluation | {"eval/baseline_return": 7.0}
        metrics.write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    text = typed("plot run1 run2")
    assert (
        "(2 seeds), training, with noise, after 2,048 steps: 10, 95 % interval 10 to 10\n" in text
    )
    assert (
        "(2 seeds), evaluations, without noise, after 100 steps: 4.5, 95 % interval 4 to 5\n"
        in text
    )
    assert "baseline pi:PI, on the evaluations' episodes: 7\n" in text

    [figure] = drawn
    [axis] = figure.axes
    curve_line, *points, controller = axis.lines
    assert [list(line.get_ydata()) for line in points] == [[4.0], [5.0]]
    assert {line.get_color() for line in points} == {curve_line.get_color()}
    assert list(controller.get_ydata()) == [7.0, 7.0]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        curve_line.get_label(),
        "bands: lowest to highest seed",
        "points: evaluations, without noise",
        "baseline pi:PI, on the evaluations' episodes: 7",
    ]

    typed("plot run1 --metric time/training_s")
    assert len(drawn[1].axes[0].lines) == 1

    a_run("same", 10.0, gamma=0.9)
    assert typed("plot same run1").count("baseline pi:PI, on the evaluations' episodes: 7\n") == 1
    a_run("without", 10.0, env_kwargs={"g": 1})
    of_some = "baseline pi:PI of env_kwargs={}, on the evaluations' episodes: 7"
    assert f"{of_some}\n" in typed("plot without run1")
    _, curve_line, _, controller = drawn[-1].axes[0].lines
    assert controller.get_label() == of_some
    assert controller.get_color() == curve_line.get_color()
    metrics = Path("run2", "metrics.jsonl")
    metrics.write_text(
        metrics.read_text().replace('"eval/baseline_return": 7.0', '"eval/baseline_return": 9.0')
    )
    config = Path("run2", "config.yaml")
    config.write_text(config.read_text().replace("gamma: 0.99", "gamma: 0.98"))
    text = typed("plot run1 run2")
    assert "baseline pi:PI of gamma=0.99, on the evaluations' episodes: 7\n" in text
    assert "baseline pi:PI of gamma=0.98, on the evaluations' episodes: 9\n" in text


def test_evaluations_are_drawn_of_every_run_that_has_them(
    desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The returns of training contain noise, which may hide that a policy is good."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, _: drawn.append(figure))
    a_run("sampled", -1000.0, eval_every=512, eval_stochastic=True)
    a_run("greedy", -1000.0, eval_every=512, seed=2)
    a_run("none", -1000.0, gamma=0.9)
    for run, mean_return in (("sampled", -900.0), ("greedy", -90.0)):
        row = {"iteration": 5, "global_step": 2560, "time/training_s": 11.0}
        evaluation = {"eval/episodic_return": mean_return, "eval/global_step": 2048}
        with Path(run, "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(row | evaluation) + "\n")
    text = typed("plot sampled greedy none")
    assert (
        "eval_stochastic=false (1 seed), training, with noise, after 2,048 steps: -1000\n" in text
    ), text
    assert (
        "eval_stochastic=false (1 seed), evaluations, without noise, after 2,048 steps: -90\n"
        in text
    ), text
    assert (
        "eval_stochastic=true (1 seed), evaluations, with noise, after 2,048 steps: -900\n" in text
    ), text
    [legend] = drawn[0].legends
    points = [text.get_text() for text in legend.get_texts() if "points" in text.get_text()]
    assert points == ["points: evaluations, with noise", "points: evaluations, without noise"]


def test_the_command_draws_folders_of_runs_and_prints_intervals(desk: Path, typed: Typed) -> None:
    for seed in range(1, 4):
        a_run(f"study/seed_{seed}", 10.0 * seed, seed=seed)
    a_run("other", 5.0, gamma=0.9)
    a_run("young", 5.0, count=0)
    text = typed("plot study other young --over time --out a.SVG")
    assert "young: has no charts/episodic_return yet, and is left out" in text
    seeds_line = "(3 seeds), training, with noise, after 2,048 steps: 20, 95 % interval 10 to 30\n"
    assert f"gamma=0.99 {seeds_line}" in text
    assert "gamma=0.9 (1 seed), training, with noise, after 2,048 steps: 5\n" in text
    assert "wall time while training (s)" in Path("a.SVG").read_text()
    assert "mine (3 seeds), training, with noise, after" in typed(
        "plot study other --label mine before"
    )
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    Path("latest").symlink_to("other")
    Path("study/loop").symlink_to("..")
    text = typed("plot . --out a.pdf")
    assert f"gamma=0.99 {seeds_line}" in text, "folders inside"
    assert "gamma=0.9 (1 seed), training" in text, "no run counts twice because of a link"
    assert Path("a.pdf").read_bytes().startswith(b"%PDF")


@executes("tools/plot.py: , no interval: several runs have seed {}. Leave out the copies")
def test_values_are_those_of_the_last_common_step_and_copies_of_a_run_make_no_interval(
    desk: Path, typed: Typed
) -> None:
    a_run("whole", 40.0)
    a_run("half", 30.0, count=2, seed=2)
    a_run("later", 30.0, seed=3)
    text = typed("plot whole half")
    assert (
        "(2 seeds), training, with noise, after 1,024 of 2,048 steps: 25, 95 % interval 20 to 30\n"
        in text
    )
    Path("half/config.yaml").write_text(Path("whole/config.yaml").read_text())
    text = typed("plot whole half later")
    assert (
        ", after 1,024 of 2,048 steps: 21.67, no interval: several runs have seed 1. Leave" in text
    )
    assert ", after 2,048 steps: 35, 95 % interval 30 to 40\n" in typed("plot whole later")
    row = {"iteration": 8, "global_step": 4096, "time/training_s": 9.0, RETURN: 1.0}
    written_run(Path("late"), [row], seed=4)
    assert "(2 seeds), training, with noise, at no common step\n" in typed("plot whole late")


def test_compare_leads_from_folders_of_runs_to_plot(
    desk: Path, typed: Typed, refused: Typed
) -> None:
    for name in ("one", "two"):
        a_run(name, 5.0)
    text = refused("compare one two")
    assert "one, two: not an environment, but the folder of a run" in text
    [command] = re.findall("`dppo (plot .*?)`", text)
    typed(command)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("", "RUN is missing"),
        ("nowhere", "does not exist"),
        ("run --out a.gif", "out=a.gif: must end in .png, .svg or .pdf"),
        (
            "run --out no/a.png",
            "out=no/a.png: cannot be written: No such file or directory. Create its folder first.",
        ),
        (
            "run --metric losses/kl",
            "metric=losses/kl: no row of 1 run has it. They have charts/episodic_return",
        ),
        (
            "run --metric training_s",
            "metric=training_s: no row of 1 run has it. Did you mean time/training_s?",
        ),
        (
            "run --metric episodic_return",
            "metric=episodic_return: no row of 1 run has it. Did you mean charts/episodic_return?",
        ),
        (
            "run --metric rollout/ep_rew_mean",
            "metric=rollout/ep_rew_mean: no row of 1 run has it. Did you mean charts/episodic_return?",
        ),
        (
            "run --label a b",
            "label=a b: pass one name for each line, here 1 line: CartPole-v1 (1 seed)",
        ),
        ("young", "metric=charts/episodic_return: no row of 1 run has it yet."),
        ("run --over epochs", "invalid choice"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    words: str, refusal: str, desk: Path, typed: Typed
) -> None:
    a_run("run", 5.0)
    a_run("young", 5.0, count=0)
    rows_may_have_it_later = refusal.startswith("metric=")
    code = 1 if rows_may_have_it_later else 2
    assert refusal in typed(f"plot {words}", code)


def test_a_metric_of_few_rows_is_suggested(desk: Path, typed: Typed) -> None:
    a_run("run", 5.0)
    metrics = Path("run") / "metrics.jsonl"
    first, *later = metrics.read_text().splitlines()
    evaluated = json.loads(first) | {"eval/episodic_return": 3.0}
    metrics.write_text("\n".join([json.dumps(evaluated), *later, ""]))
    for typo in ("eval/mean_reward", "eval/episodic_retrun"):
        assert "Did you mean eval/episodic_return?" in typed(f"plot run --metric {typo}", 1)


@executes("records/files/disk.py: Create its folder first.")
def test_a_picture_is_written_once_its_folder_exists(desk: Path, typed: Typed) -> None:
    a_run("run", 5.0)
    typed("plot run --out no/a.png", 2)
    Path("no").mkdir()
    typed("plot run --out no/a.png")


def test_titles_and_names_of_controllers_fit_into_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    name = " ".join(["setting=value,"] * 20)
    group = CurveGroup(name, [rising()])
    baselines = [DrawnBaseline(name, 0.5, 0)]
    environments = [f"module:Environment{number}" for number in range(9)]
    assert _title(environments) == "9 environments"
    title = _title(environments[:3])
    assert title == ", ".join(environments[:3])
    draw_together(
        [group], tmp_path / "a.png", title, "return", over_time=False, baselines=baselines
    )
    [figure] = drawn
    figure.draw_without_rendering()
    for artist in (figure.legends[0], figure.axes[0]._left_title):
        box = artist.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
