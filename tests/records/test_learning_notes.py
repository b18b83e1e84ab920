"""A run that does not learn says so, once; one that learns, or has learned, says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import BOX, DISCRETE, make_config, tiny_run
from gymnasium.wrappers import TimeLimit, TransformReward
from recorder import Notes, Recorder
from remedies import executes
from worlds.simple import Counting

import dppo
from dppo.records.notes import NOTES, PATIENCE, LearningNotes
from dppo.spaces.actions import Actions, DiscreteActions, NestedActions

ROWS = 100
SETTINGS: dict[str, Any] = {
    "env_id": "E-v0",
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "norm_reward": False,
}
HEALTHY = {
    "charts/learning_rate": 3e-4,
    "losses/approx_kl": 5e-3,
    "losses/entropy": 0.6,
    "losses/explained_variance": 0.7,
}
# of each row, by the last word of the key: a number, or a function of the iteration
Changes = dict[str, Any]


def rows(changes: Changes) -> list[dict[str, float]]:
    """Rows of a healthy run whose return rises from 20 to 119, with `changes`."""
    metrics = []
    for i in range(ROWS):
        row = HEALTHY | {
            "iteration": i + 1,
            "global_step": 1000 * (i + 1),
            "charts/episodes": 10 * (i + 1),
            "charts/episodic_return": 20.0 + i,
            "charts/episodic_length": 20.0 + i,
            "charts/episodic_return_std": 0.0,
        }
        for key in row:
            last_word = key.rpartition("/")[2]
            if last_word in changes:
                value = changes[last_word]
                row[key] = value(i) if callable(value) else value
        metrics.append(row)
    return metrics


def texts(changes: Changes, actions: Actions = DISCRETE, **settings: Any) -> list[str]:
    """The notes, in order; each is given once."""
    notes = LearningNotes(make_config(SETTINGS | settings), actions)
    printed: list[str] = []
    for row in rows(changes):
        printed += notes.follow(row)
    return printed


def name_of(note: str) -> str:
    return next(name for name, text in NOTES.items() if note.startswith(text[:15]))


def noted(changes: Changes, **options: Any) -> list[str]:
    """Names of the notes, in order."""
    return [name_of(note) for note in texts(changes, **options)]


def falling(start: float) -> Callable[[int], float]:
    return lambda i: max(0.0, start * (1 - i / 40))


FLAT = {"episodic_return": lambda i: 20.0 + 2 * (i % 2)}  # noise
GETS_WORSE = {"episodic_return": lambda i: 200.0 - 2 * i}
FALLS_AFTER_A_RISE = {"episodic_return": lambda i: 20.0 + min(i, 50) - 2 * min(30, max(0, i - 50))}
FALLS_FROM_A_PLATEAU = {
    "episodic_return": lambda i: -100.0 + (60 if 10 <= i < 30 else 20 * (i > 5))
}
LARGE = {"episodic_return": lambda i: -1200.0 - i % 2, "episodic_length": 200.0}
SMALL = {"episodic_return": lambda i: 4e-4 + 1e-5 * (i % 2)}
ALWAYS_AT_THE_LIMIT = {"episodic_return": -200.0, "episodic_length": 200.0}
NARROW = {"entropy": lambda i: 2.8 - 0.15 * i}
POOR = {"explained_variance": lambda i: 0.02 * (i % 2) - 0.01}
NOT_LEARNING: list[tuple[list[str], Changes, dict[str, Any]]] = [
    (["still"], FLAT | {"approx_kl": 7.6e-9}, {}),
    (["certain"], FLAT | {"entropy": falling(1.1)}, {}),
    (["certain"], FLAT | NARROW, {"actions": BOX}),
    (["certain"], GETS_WORSE | {"entropy": falling(1.1)}, {}),
    (["unexplained"], FLAT | POOR, {}),
    (["fallen"], FALLS_AFTER_A_RISE, {}),
    (["fallen"], FALLS_FROM_A_PLATEAU, {}),
    (["constant"], ALWAYS_AT_THE_LIMIT, {"norm_reward": True}),
    (["constant"], {"episodic_return": 0.0}, {}),
    (["scale"], LARGE, {}),
    (["scale"], SMALL, {}),
]
RECOVERS = {"episodic_return": lambda i: 20.0 + min(i, 50) - (40 if 50 <= i < 70 else 0)}
FALLS_BY_LESS_THAN_HALF = {"episodic_return": lambda i: 20.0 + min(i, 50) - min(20, max(0, i - 50))}
OF_FEW_EPISODES = {"episodic_return": 500.0, "episodes": lambda i: i // 3}
NO_FIGURE = float("nan")
BESIDE_A_CHOICE = NestedActions((DiscreteActions(3), BOX), None)
LEARNING: list[tuple[Changes, dict[str, Any]]] = [
    ({}, {}),
    (FLAT, {}),
    # not in a row
    (FLAT | {"approx_kl": lambda i: 5e-3 if i % 20 == 0 else 1e-9}, {}),
    # annealed
    (FLAT | {"learning_rate": 1e-5, "approx_kl": 1e-9}, {}),
    # solved
    ({"approx_kl": lambda i: 5e-3 / 3**i, "entropy": falling(1.1)}, {}),
    # a deviation of 0.08
    (FLAT | {"entropy": lambda i: 2.8 - 0.05 * i}, {"actions": BOX}),
    # narrow from the start, or wide and squashed
    (FLAT | {"entropy": -7.0}, {"actions": BOX}),
    # a little narrower than at the start
    (FLAT | {"entropy": lambda i: -7.0 - 0.03 * i}, {"actions": BOX}),
    (FLAT | NARROW, {"actions": BESIDE_A_CHOICE}),
    # a slow start
    (FLAT | {"explained_variance": lambda i: -0.5 if i < 25 else 0.5}, {}),
    (FLAT | {"explained_variance": NO_FIGURE}, {}),
    (FLAT | POOR, {"vf_coef": 0.0}),
    (OF_FEW_EPISODES, {"norm_reward": True}),
    # constant after a rise
    ({"episodic_return": lambda i: 20.0 + min(i, 40)}, {}),
    (RECOVERS, {}),
    (FALLS_BY_LESS_THAN_HALF, {}),
    # of few episodes
    ({"episodic_return": lambda i: 60.0 - 40 * (i > 3)}, {}),
    # many environments, whose episodes end together
    ({"episodic_return": 20.0, "episodic_return_std": 3.0}, {}),
    (FLAT | {"approx_kl": NO_FIGURE, "entropy": NO_FIGURE}, {}),
    (LARGE, {"norm_reward": True}),
    (LARGE, {"norm_value": True}),
    (LARGE, {"sign_reward": True}),
    (LARGE, {"clip_reward": 1.0}),
    (LARGE, {"gamma": 0.9}),
]


@pytest.mark.parametrize(("names", "changes", "options"), NOT_LEARNING)
def test_each_sign_of_a_run_that_does_not_learn_is_noted_once(
    names: list[str], changes: Changes, options: Any
) -> None:
    assert noted(changes, **options) == names


@pytest.mark.parametrize(("changes", "options"), LEARNING)
def test_runs_that_learn_or_have_learned_get_no_notes(
    changes: Changes, options: dict[str, Any]
) -> None:
    assert noted(changes, **options) == []


def test_notes_have_the_numbers_and_a_remedy() -> None:
    notes = LearningNotes(make_config(SETTINGS), DISCRETE)
    assert notes.follow({"iteration": 0}) == [], "a row that somebody else wrote"
    assert texts({"approx_kl": 7.6e-9, "episodic_return": -200.0}, norm_reward=True) == [
        "the policy hardly changes: approx_kl is 8e-09. Raise learning_rate (0.0003 now) or update_epochs, and check "
        "that actions affect rewards",
        "all returns are -200 in 34,000 env steps (340 episodes): there is nothing to learn from. Reward progress "
        "on the way, or explore more (ent_coef)",
    ]
    assert texts({"episodic_return": lambda i: 70.0 - abs(i - 25)}) == [
        "the mean return has fallen from 70, after 26,000 env steps, to 30. If it does not recover, batches may be too "
        "small: begin again, from scratch or from an earlier checkpoint (init_from), with more num_steps (64 now) or a "
        "lower learning_rate (0.0003 now)"
    ]


@pytest.mark.parametrize(
    ("settings", "now"),
    [
        ({}, "0"),
        ({"reuse": 4}, "0.01"),
        ({"reuse": 4, "ent_coef": 0.0}, "0"),
        ({"ent_coef": 0.2}, "0.2"),
    ],
)
def test_a_note_names_the_weight_of_the_entropy_that_is_in_effect(
    settings: dict[str, Any], now: str
) -> None:
    [note] = texts(FLAT | {"entropy": falling(1.1)}, **settings)
    assert f"Raise ent_coef ({now} now)" in note


def same() -> gym.Env[Any, Any]:
    """Return an environment of five steps with the reward 1000 for any actions."""
    return TransformReward(Counting(terminate_after=5), lambda _: 1000.0)


def test_real_runs_are_noted_once_also_after_a_resume(tmp_path: Path) -> None:
    useless: dict[str, Any] = {"env_id": same, "learning_rate": 1e-12, "norm_reward": False}
    config = tiny_run(tmp_path / "run", steps=20, iterations=60, **useless)
    with Notes() as first:
        dppo.train(config, observers=[Recorder(interrupt_at=PATIENCE + 20)])
    with Notes() as second:
        result = dppo.train(config, resume=tmp_path / "run")
    for beginning in (
        "the policy hardly changes: ",
        "all returns are 5000 in ",
        "discounted returns are about 5e+03",
    ):
        assert [text.startswith(beginning) for text in first.texts].count(True) == 1
        assert not any(text.startswith(beginning) for text in second.texts)
    assert result.iterations == 60
    assert result.times.startswith("An iteration took ")


def test_rows_of_evaluations_do_not_count_as_iterations() -> None:
    notes = LearningNotes(make_config(SETTINGS), DISCRETE)
    logged = [
        (row["iteration"], note)
        for row in rows(FLAT | {"approx_kl": 7.6e-9})
        for _ in "12"
        for note in notes.follow(row)
    ]
    assert [iteration for iteration, _ in logged] == [PATIENCE]


@pytest.mark.parametrize(("last", "is_flat"), [(20.0, True), (60.0, False)])
def test_a_run_is_not_flat_if_its_evaluations_have_risen(last: float, is_flat: bool) -> None:
    notes = LearningNotes(make_config(SETTINGS), DISCRETE)
    run_rows = rows(FLAT)
    evaluation = {"eval/episodes": 5, "eval/return_std": 1.0}
    for number, mean in ((51, 20.0), (99, last)):
        row = run_rows[number]
        notes.follow(row)
        evaluation |= {"eval/global_step": row["global_step"], "eval/episodic_return": mean}
        notes.follow(row | evaluation)  # a second row of the iteration
    assert bool(notes.closing_notes()) == is_flat


def limited(max_steps: int) -> gym.Env[Any, Any]:
    return TimeLimit(Counting(), max_steps)


@executes(
    "records/notes.py: Return truncated=True at a time limit, as gymnasium.wrappers.TimeLimit does"
)
def test_an_environment_without_ends_is_named_until_it_has_a_time_limit(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"samplers": 2, "steps": 256, "iterations": 4}
    fact = "no episode has ended in 1,024 steps of each environment, "
    with Notes() as endless:
        dppo.train(tiny_run(tmp_path / "endless", env_id=Counting, **sizes))
    assert [text.startswith(fact) for text in endless.texts].count(True) == 1
    kwargs = {"max_steps": 500}
    with Notes() as with_limit:
        dppo.train(tiny_run(tmp_path / "limited", env_id=limited, env_kwargs=kwargs, **sizes))
    assert not any(text.startswith("no episode has ended") for text in with_limit.texts)


@pytest.mark.parametrize(
    ("returns", "evaluations", "settings", "is_noted"),
    [
        pytest.param(100.0, 5.0, {}, True, id="worse"),
        pytest.param(100.0, 85.0, {}, False, id="a small difference"),
        pytest.param(100.0, lambda i: 95.0 if i == 89 else 5.0, {}, False, id="one is good"),
        pytest.param(lambda i: 5.0 + 95 * (i > 80), 5.0, {}, False, id="just improved"),
        pytest.param(lambda i: 100.0 - 95 * (i > 80), 5.0, {}, False, id="just become worse"),
        pytest.param(100.0, 5.0, {"eval_stochastic": True}, False, id="with noise"),
        pytest.param(100.0, 5.0, {"eval_env_kwargs": {"a": 1}}, False, id="another task"),
    ],
)
def test_evaluations_without_noise_that_are_clearly_worse_are_noted(
    returns: Any, evaluations: Any, settings: dict[str, Any], is_noted: bool
) -> None:
    notes = LearningNotes(make_config(SETTINGS | {"eval_every": 10_000} | settings), DISCRETE)
    for i, row in enumerate(rows({"episodic_return": returns, "episodic_return_std": 20.0})):
        if i % 10 == 9:
            mean = evaluations(i) if callable(evaluations) else evaluations
            row |= {"eval/episodes": 20, "eval/return_std": 0.0, "eval/episodic_return": mean}
            row["eval/global_step"] = row["global_step"]
        notes.follow(row)
    printed = [text for text in notes.closing_notes() if "worse without noise" in text]
    assert len(printed) == is_noted


class Alternating(gym.Env[Any, Any]):
    """Rewards an action that differs from the last one, which the observation does not show."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.actions: list[int] = []
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        is_new = bool(self.actions) and action != self.actions[-1]
        self.actions.append(action)
        return np.zeros(1, np.float32), float(is_new), False, len(self.actions) == 8, {}


@executes("records/greedy.py: If both play the same task, use {}, also on resume")
def test_a_policy_that_needs_its_noise_is_evaluated_with_noise(tmp_path: Path) -> None:
    run: dict[str, Any] = {"env_id": Alternating, "steps": 80, "learning_rate": 1e-12}
    config = tiny_run(tmp_path / "run", iterations=48, eval_every=320, **run)
    [note] = [text for text in dppo.train(config).notes if "worse without noise" in text]
    assert "have mean returns of at most 0, and the training episodes since" in note
    assert "eval_stochastic=True (--eval-stochastic), also on resume" in note
    longer = {"iterations": 96, "eval_every": 320, "eval_stochastic": True}
    result = dppo.train(tiny_run(config.run_dir, **longer, **run), resume=config.run_dir)
    assert not any("worse without noise" in text for text in result.notes)
    assert result.metrics[-1]["eval/episodic_return"] > 2
