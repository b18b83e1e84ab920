"""The note on a policy that has fallen below the baseline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from matrix import sized
from recorder import Notes
from remedies import executes
from worlds.plants import Plant, proportional

import dppo
from dppo.config import Config
from dppo.records.baseline_note import BaselineNote

EPISODES = 5
ROWS = 40  # env steps of an iteration of a run in `matrix`
BATCH = 64  # env steps of an iteration
AFTER_CONTROLLER: dict[str, Any] = {"prior": "json:dumps", "prior_steps": BATCH}
SIZES = {"env_id": "E-v0", "num_samplers": 1, "num_steps": BATCH, "total_timesteps": 100 * BATCH}
EVALUATED = {"baseline": "pi:PI", "eval_every": BATCH, "eval_episodes": 20}
NEVER_WORSE: dict[str, Any] = {"never_worse": True}


def config_of(**changes: Any) -> Config:
    return make_config(SIZES | EVALUATED | changes)


def evaluation(number: int, difference: float, margin: float = 1.0) -> dict[str, float]:
    """Return the row of the evaluation after an iteration; the baseline has a return of -10."""
    return {
        "iteration": number + 1,
        "eval/iteration": number,
        "eval/global_step": number * BATCH,
        "eval/episodic_return": difference - 10,
        "eval/baseline_return": -10,
        "eval/baseline_difference": difference,
        "eval/baseline_difference_low": difference - margin,
        "eval/baseline_difference_high": difference + margin,
    }


def notes_of(differences: list[float], *, resumed_after: int = 0, **changes: Any) -> list[str]:
    """Return the note after each evaluation; the first one is that of the clone, if there is a controller."""
    rows = [evaluation(number, difference) for number, difference in enumerate(differences, 1)]
    observer = BaselineNote(config_of(**changes), rows[:resumed_after])
    return [observer.note(row) for row in rows[resumed_after:]]


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_fall_is_noted_once_with_its_size_and_place(algo: str) -> None:
    notes = notes_of([0, 0.5, -4, -5, -30], **AFTER_CONTROLLER, algo=algo)
    assert [bool(note) for note in notes] == [False, False, True, False, False]
    fact = "the policy has fallen below the baseline pi:PI: mean return -14.0 after 192 env steps, -9.50 after 128; "
    assert notes[2].startswith(
        fact
        + "baseline -10.0, difference -4.00 (95 % -5.00 to -3.00). checkpoints/best.json names the best policy "
        "so far, -9.50 after 128;"
    )


@pytest.mark.parametrize(
    ("differences", "changes", "noted"),
    [
        pytest.param([0, -4, -5, 0, -4], AFTER_CONTROLLER, [1, 4], id="two falls"),
        pytest.param([-30, -20, -30], {}, [], id="a new policy that has not been as good yet"),
        pytest.param([-30, 0, -30], {}, [2], id="a new policy that was as good"),
        pytest.param(
            [-4, 0.5, -0.9],
            AFTER_CONTROLLER,
            [],
            id="the clone itself, and a difference within the error",
        ),
        pytest.param([0, -1.1], AFTER_CONTROLLER, [], id="a small difference"),
        pytest.param([2, 3, 1.5], AFTER_CONTROLLER, [], id="a fall above the controller"),
    ],
)
def test_each_fall_below_the_baseline_is_noted_and_no_other_evaluation(
    differences: list[float], changes: dict[str, Any], noted: list[int]
) -> None:
    notes = notes_of(differences, **changes)
    assert [number for number, note in enumerate(notes) if note] == noted
    for number in noted:
        assert ("start a new run" in notes[number]) == bool(changes)


def test_a_resumed_run_does_not_repeat_the_note() -> None:
    assert not any(notes_of([0, -4, -5, -6], resumed_after=2, **AFTER_CONTROLLER))
    assert notes_of([0, -4, 0, -6], resumed_after=3, **AFTER_CONTROLLER) != [""]


def test_never_worse_names_what_is_deployed() -> None:
    *_, without = notes_of([0, -4], **AFTER_CONTROLLER, **NEVER_WORSE)
    assert "never_worse deploys the baseline until an evaluation shows an improvement." in without
    *_, with_one = notes_of([0, 2, -4], **AFTER_CONTROLLER, **NEVER_WORSE)
    assert "never_worse deploys the best policy so far, -8.00 after 128." in with_one


@executes("records/baseline_note.py: If it does not recover, start a new run with {}")
def test_a_run_takes_each_way_out() -> None:
    settings: dict[str, Any] = AFTER_CONTROLLER | {"algo": "sac"}
    *_, note = notes_of([0, -4], **settings)
    assert "or with algo=ppo" in note
    steps = re.search(r"prior_steps=(\d+) \(--prior-steps \1\) instead of 64", note)
    assert steps is not None
    assert config_of(**settings | {"prior_steps": int(steps[1])}).collected_by_prior == 2
    assert config_of(**settings | {"algo": "ppo"}).algo == "ppo"
    assert "never_worse=True (--never-worse), also on resume" in note


def test_more_steps_are_not_advised_to_a_run_that_has_too_few() -> None:
    *_, note = notes_of([0, -4], **AFTER_CONTROLLER, total_timesteps=2 * BATCH)
    assert "start a new run" not in note


class Worn(Plant):
    """A plant that wears out in evaluations: from the third one on, that of the baseline counted, steps cost more."""

    episodes = 0

    def __init__(self, *, wears: bool = False) -> None:
        super().__init__()
        self._wears = wears

    def begin(self) -> None:
        super().begin()
        Worn.episodes += self._wears

    def step(self, action: np.ndarray) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if Worn.episodes > 2 * EPISODES:
            reward -= 10
        return obs, reward, terminated, truncated, info


def test_a_run_logs_the_note(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "env_id": Worn,
        "envs_per_sampler": 1,
        "prior": proportional,
        "prior_steps": ROWS,
        "baseline": proportional,
        "eval_every": ROWS,
        "eval_episodes": EPISODES,
        "eval_env_kwargs": {"wears": True},
        "run_dir": tmp_path / "run",
    }
    with Notes() as notes:
        dppo.train(make_config(sized(settings, 4)))
    (text,) = (text for text in notes.texts if "has fallen below the baseline" in text)
    assert f"after {2 * ROWS} env steps" in text
