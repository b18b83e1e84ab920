"""`dppo plot`: which runs belong together, what is drawn of them, and what is said about them."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dppo.__main__ import main
from dppo.config import Config, grouped, plain_settings
from dppo.tools.curves import Curve, Group, curve_of, grouped_by_settings, interval, over_seeds
from dppo.tools.pictures import comparison as plots
from dppo.tools.pictures.comparison import draw_together


def a_run(folder: Path, last: float, count: int = 4, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(grouped(plain_settings(Config(**{"env_id": "E-v0", **settings}))))
    )
    rows = [
        {"iteration": i, "global_step": 512 * i, "time/training_s": 2.0 * i}
        for i in range(1, count + 1)
    ]
    rows = [row | {"charts/episodic_return": last * row["iteration"] / count} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def one(seed: int, values: list[float], steps: list[float], **settings: Any) -> Curve:
    stored = {"seed": seed, "env_id": "E-v0", **settings}
    return Curve(2 * np.array(steps), np.array(steps), np.array(values), stored)


def test_runs_are_grouped_by_all_settings_but_their_seeds() -> None:
    made = [
        one(seed, [0, 1], [0, 9], gamma=gamma, env_kwargs={"g": 1})
        for seed, gamma in product((1, 2), (0.9, 0.99))
    ]
    made += [one(1, [0, 1], [0, 9], gamma=0.9, env_kwargs={"g": 2}, name="$\\frac{")]
    groups = grouped_by_settings(made)
    assert [str(group) for group in groups] == [
        'gamma=0.9, env_kwargs={"g": 1}, name=ppo (2 seeds)',
        'gamma=0.99, env_kwargs={"g": 1}, name=ppo (2 seeds)',
        'gamma=0.9, env_kwargs={"g": 2}, name=$\\frac{ (1 seed)',
    ]
    assert [str(group) for group in grouped_by_settings(made[:1])] == ["E-v0 (1 seed)"]
    tracked = [
        one(1, [0, 1], [0, 9], gamma=gamma, track=track)
        for gamma, track in ((0.9, []), (0.99, ["wandb"]))
    ]
    assert [str(group) for group in grouped_by_settings(tracked)] == [
        "gamma=0.9 (1 seed)",
        "gamma=0.99 (1 seed)",
    ]
    times = [one(1, [0, 1], [0, 9], num_actors=actors) for actors in (1, 8)]
    assert [str(group) for group in grouped_by_settings(times)] == [
        "num_actors=1 (1 seed)",
        "num_actors=8 (1 seed)",
    ]
    of_another_version = [
        one(1, [0, 1], [0, 9]),
        one(1, [0, 1], [0, 9]),
        one(1, [0, 1], [0, 9], unknown=1),
    ]
    assert [str(group) for group in grouped_by_settings(of_another_version)] == [
        "unknown=null (2 runs)",
        "unknown=1 (1 seed)",
    ]


def test_mean_and_spread_are_those_where_all_runs_have_values() -> None:
    group = Group("", [one(1, [0, 10], [0, 10]), one(2, [4, 8, 8], [2, 6, 20])])
    seconds, x, mean, low, high = over_seeds(group.runs)
    np.testing.assert_array_equal(x, [2, 6, 10])
    np.testing.assert_array_equal(seconds, 2 * x)
    np.testing.assert_allclose(low, np.minimum(x, np.minimum(x + 2, 8)))
    np.testing.assert_allclose(high, np.maximum(x, np.minimum(x + 2, 8)))
    np.testing.assert_allclose(mean, (low + high) / 2)
    apart = Group("", [one(1, [0, 10], [0, 10]), one(2, [4, 8], [20, 30])])
    assert [len(column) for column in over_seeds(apart.runs)] == [0] * 5


def test_an_evaluation_belongs_to_the_steps_of_its_policy() -> None:
    rows: list[dict[str, float]] = [
        {"global_step": 100 * i, "time/training_s": 2.0 * i} for i in range(1, 6)
    ]
    rows[2] |= {"eval/global_step": 200, "eval/episodic_return": 7.0}
    rows[4] |= {"eval/global_step": 400, "eval/episodic_return": 9.0}
    curve = curve_of(rows, "eval/episodic_return")
    assert [column.tolist() for column in curve[:3]] == [[4.0, 8.0], [200, 400], [7.0, 9.0]]
    assert [len(column) for column in curve_of([], "eval/episodic_return")[:3]] == [0, 0, 0]


@pytest.mark.proves("interval")
def test_an_interval_is_that_of_a_bootstrap_and_several_tasks_give_the_interquartile_mean() -> None:
    scores = np.random.default_rng(1).normal(10.0, 2.0, 40)
    mean, low, high = interval([scores])
    assert mean == pytest.approx(scores.mean())
    error = scores.std() / np.sqrt(40)
    np.testing.assert_allclose([mean - low, high - mean], 1.96 * error, rtol=0.15)
    assert interval([np.array([3.0])]) == (3.0, 3.0, 3.0)
    tasks = [np.array([0.0, 1.0, 2.0, 100.0]), np.array([3.0, 4.0, 5.0, -100.0])]
    assert interval(tasks)[0] == pytest.approx(np.mean([1, 2, 3, 4])), (
        "half of the runs, those in the middle"
    )


def test_a_picture_of_many_long_labels_is_drawn_with_a_place_for_each(
    tmp_path: Path, monkeypatch: Any
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "DPI", 50)

    def keep(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(plots, "save", keep)
    long = (
        "env_kwargs={'terrain': '$\\\\frac{x}'}, hidden_sizes=[256, 256, 256], learning_rate=0.0003, gamma=0.99"
        * 2
    )
    groups = [Group(f"{number} {long}", [one(1, [0, number], [0, 9])]) for number in range(14)]
    draw_together(
        groups, tmp_path / "a.png", "$title", "metric", over_time=True, baselines={"pi:PI": 0.5}
    )
    [figure] = drawn
    [axis] = figure.axes
    [legend] = figure.legends
    parts = [axis.get_tightbbox(), *(text.get_window_extent() for text in legend.get_texts())]
    for index, part in enumerate(parts):
        assert not any(part.overlaps(other) for other in parts[index + 1 :])
        assert 0 <= part.x0 < part.x1 <= figure.bbox.width
        assert 0 <= part.y0 < part.y1 <= figure.bbox.height


def test_the_command_draws_folders_of_runs_and_prints_intervals(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 4):
        a_run(tmp_path / "study" / f"seed_{seed}", 10.0 * seed, seed=seed)
    a_run(tmp_path / "other", 5.0, gamma=0.9)
    a_run(tmp_path / "young", 5.0, count=0)
    assert main(["plot", "study", "other", "young", "--over", "time", "--out", "a.svg"]) == 0
    text = capsys.readouterr().out
    assert "young: has no charts/episodic_return yet, and is left out" in text
    assert "gamma=0.99 (3 seeds): 20, 95 % interval 10 to 30" in text
    assert "gamma=0.9 (1 seed): 5\n" in text
    svg = (tmp_path / "a.svg").read_text()
    assert "training time (s)" in svg
    assert main(["plot", "study", "other", "--label", "mine", "before"]) == 0
    assert "mine (3 seeds): 20" in capsys.readouterr().out
    assert main(["plot", "other"]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_compare_leads_from_folders_of_runs_to_plot(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        a_run(tmp_path / name, 5.0)
    assert main(["compare", "one", "two"]) == 2
    text = capsys.readouterr().err
    assert "one is the folder of a run" in text
    [command] = re.findall(r"`([^`]*)`", text)
    assert (
        main(command.partition(" plot ")[2] and ["plot", *command.partition(" plot ")[2].split()])
        == 0
    )


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "RUN is missing"),
        (["nowhere"], "does not exist"),
        (["run", "--out", "a.pdf"], "out=a.pdf: must end in .png or .svg"),
        (["run", "--out", "no/a.png"], "out=no/a.png: cannot be written"),
        (
            ["run", "--metric", "losses/kl"],
            "metric=losses/kl: is not in run. It has charts/episodic_return",
        ),
        (
            ["run", "--metric", "training_s"],
            "metric=training_s: is not in run. Did you mean time/training_s?",
        ),
        (
            ["run", "--label", "a", "b"],
            "label=a b: pass one name for each line, here 1 line: E-v0 (1 seed)",
        ),
        (["young"], "metric=charts/episodic_return: there is nothing to draw yet in 1 run"),
        (["run", "--over", "epochs"], "invalid choice"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    words: list[str], refusal: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run", 5.0)
    a_run(tmp_path / "young", 5.0, count=0)
    assert main(["plot", *words]) in (1, 2)
    assert refusal in capsys.readouterr().err
