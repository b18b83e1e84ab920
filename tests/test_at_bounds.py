"""Policies that stay at a bound of their actions are named: at evaluations, at the end of a run, by `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import small
from recorder import Notes
from test_doctor import findings_of_phase, run_findings
from worlds.acting import SPACES

import dppo
from dppo.policies.bounds import BoundCounter, element_at_bound
from dppo.ppo.exchange.records import Episode
from dppo.records.metrics.reading import read_metrics
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions, NestedActions

VALVE: dict[str, Any] = {
    "env_id": "worlds.acting:Actuated",
    "env_kwargs": {"kind": "valve"},
    "action_bounds": "clip",
}


def box(bounds: str, *shape: int) -> BoxActions:
    return BoxActions(np.full(shape, 0.0), np.full(shape, 10.0), bounds)  # type: ignore[arg-type]


def counted(actions: Actions, *steps: Any) -> Episode:
    counter = BoundCounter(actions)
    for step in steps:
        counter.add(np.array([step]))
    return Episode(0, 0, 0.0, len(steps), None, at_bounds=counter.counts)


@pytest.mark.parametrize(
    ("bounds", "inside", "lower", "upper"),
    [("clip", 5.0, -0.1, 10.0), ("rescale", 0.9, -1.0, 1.5), ("squash", 2.0, -2.5, 2.5)],
)
def test_a_step_counts_where_the_environment_gets_a_bound(
    bounds: str, inside: float, lower: float, upper: float
) -> None:
    actions = box(bounds, 2)
    counts = counted(actions, [inside, lower], [upper, lower], [inside, lower]).at_bounds
    assert counts is not None
    assert counts.tolist() == [[0, 3], [1, 0]]


def test_the_element_that_is_at_a_bound_most_often_is_named_with_its_side() -> None:
    actions = NestedActions((DiscreteActions(3), box("rescale", 2)), ("gear", "valves"))
    element = element_at_bound(
        actions, [counted(actions, [0, 0.0, 1.0], [2, -1.0, 1.0], [1, 0.0, 0.0])]
    )
    assert element is not None
    assert element.share == pytest.approx(2 / 3)
    assert str(element) == (
        "the greedy policy takes element 1 of action['valves'] at its upper bound in 67% of the steps, more often "
        "than most good controllers."
    )
    assert element_at_bound(actions, [Episode(0, 0, 0.0, 3, None)]) is None, (
        "sampled actions are not counted"
    )


def shares_at_bounds(result: dppo.Result) -> list[float]:
    """Return the share of steps at a bound in each evaluation."""
    key = "eval/at_bound_frac"
    return [row[key] for row in read_metrics(result.run_dir) if key in row]


def test_a_policy_at_a_bound_is_named_at_evaluations_and_at_the_end(tmp_path: Path) -> None:
    """A policy that hardly learns stays near 0, below a valve that opens from 0.2 to 1."""
    assert SPACES["valve"].low.min() > 0  # type: ignore[attr-defined]
    config = small(tmp_path / "run", **VALVE, eval_every=1, eval_episodes=1, learning_rate=1e-9)
    with Notes() as notes:
        result = dppo.train(config)
    sentence = (
        "the greedy policy takes the action at its lower bound in 100% of the steps. Unless an on-off controller is "
        "right here, use action_bounds=rescale (--action-bounds rescale)."
    )
    named = [text for text in notes.texts if sentence in text]
    assert len(named) == 1, "once, however many evaluations there are"
    assert f"In the last evaluation, {sentence}" in result.notes
    assert {*shares_at_bounds(result)} == {1.0}

    for deterministic in (True, False):
        with Notes() as notes:
            dppo.evaluate(result, episodes=1, deterministic=deterministic)
        assert (sentence in notes.texts) == deterministic


def test_the_remedy_takes_the_policy_off_the_bound(tmp_path: Path) -> None:
    rescaled = VALVE | {"action_bounds": "rescale", "eval_every": 1, "eval_episodes": 1}
    result = dppo.train(small(tmp_path / "run", **rescaled, learning_rate=1e-9))
    assert shares_at_bounds(result)[-1] == 0.0


def run_of(
    folder: Path, returns: list[float], evaluated: Sequence[tuple[int, float]] = (), **settings: Any
) -> list[str]:
    """Return the warnings of `dppo doctor` about a run with these mean returns, and evaluations of some iterations."""
    rows: list[dict[str, float]] = [
        {
            "iteration": number,
            "global_step": 8192 * number,
            "charts/episodes": 60 * number,
            "charts/episodic_return": mean,
            "charts/episodic_return_std": 5.0,
        }
        for number, mean in enumerate(returns, 1)
    ]
    for number, mean in evaluated:
        evaluation = {"eval/episodic_return": mean, "eval/episodes": 5}
        rows[number - 1] |= evaluation | {"eval/global_step": 8192 * number}
    findings = run_findings(folder, rows, **settings)
    return [text for kind, text in findings if kind == "warning"]


def test_the_doctor_of_a_run_says_that_it_is_flat_and_what_to_try(tmp_path: Path) -> None:
    flat = run_of(tmp_path, [-100.0, -100.0, -99.0, -99.5])
    assert flat == [
        "the mean return has not risen in the last 16,384 env steps: -100 before, -99.5 now, with a standard error of "
        "0.71. If more is possible, try in a new run: (1) --reuse 4 --num-steps 32: 0.77 of the env steps on 17 known "
        "tasks"
    ]
    assert not run_of(tmp_path, [-100.0, -80.0, -60.0, -40.0])
    assert not run_of(tmp_path, [-100.0, -100.0, -99.0, -99.5], evaluated=[(2, -60.0), (4, -40.0)])
    assert "--reuse" not in run_of(tmp_path, [1.0, 1.0, 1.0], reuse=4)[0]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"num_actors": 2}, "Use more actors, up to --num-actors 8, if there are CPUs for them"),
        ({"num_actors": 8}, ""),
        (
            {"num_actors": 8, "envs_per_sampler": 2},
            "Use --num-samplers 16 --envs-per-sampler 1 and as many actors",
        ),
    ],
)
def test_the_doctor_of_a_run_advises_no_actors_that_it_has(
    settings: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    texts = findings_of_phase("env", tmp_path, policy_lag=1, **settings)
    [advice] = [text.partition(". ")[2] for text in texts if "went to the environments" in text]
    assert advice.startswith(remedy)
    assert bool(advice) == bool(remedy)


@pytest.mark.parametrize("baseline", ["worlds.acting:closed", "worlds.acting:opened"])
def test_a_policy_at_a_bound_that_is_no_worse_than_the_baseline_is_not_named(
    baseline: str, tmp_path: Path
) -> None:
    """Some good controllers are at a bound most of the time, such as a lamp that is off at night."""
    settings = {"eval_every": 1, "eval_episodes": 2, "learning_rate": 1e-9, "baseline": baseline}
    with Notes() as notes:
        result = dppo.train(small(tmp_path / "run", **VALVE, **settings))
    assert {*shares_at_bounds(result)} == {1.0}
    rows = read_metrics(result.run_dir)
    differences = [
        row["eval/baseline_difference"] for row in rows if "eval/baseline_difference" in row
    ]
    is_worse = differences[0] < 0
    assert is_worse == (baseline == "worlds.acting:opened")
    assert any("at its lower bound" in text for text in notes.texts) == is_worse
