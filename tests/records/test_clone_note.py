"""The note on a clone that is worse than its controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_config

import dppo
from dppo.records import clone_note
from dppo.records.clone_note import CloneNote

CONTROLLER = {"iteration": 2, "charts/recent_episodes": 10}
CLONE = {"iteration": 3, "eval/iteration": 2, "eval/episodes": 20}
CONFIG = {"env_id": "E-v0", "prior": "json:dumps", "num_steps": 128, "prior_steps": 1000}


def note_of(
    controller: tuple[float, float], clone: tuple[float, float], **settings: Any
) -> str | None:
    """Return the note on a mean and a deviation of the controller's returns, and those of its clone."""
    mean, std = controller
    first = CONTROLLER | {"charts/episodic_return": mean, "charts/episodic_return_std": std}
    mean, std = clone
    second = CLONE | {"eval/episodic_return": mean, "eval/return_std": std}
    note = CloneNote(make_config(CONFIG | {"num_samplers": 4} | settings))
    assert note.note(first) is None
    return note.note(second)


@pytest.mark.parametrize(
    ("controller", "clone", "is_noted"),
    [
        pytest.param((-20, 5), (-90, 10), True, id="worse"),
        pytest.param((-20, 5), (-15, 5), False, id="better"),
        pytest.param((-20, 40), (-40, 40), False, id="within the error"),
        pytest.param((100, 1), (95, 1), False, id="a small difference"),
    ],
)
def test_a_clone_that_is_clearly_worse_is_noted(
    controller: tuple[float, float], clone: tuple[float, float], is_noted: bool
) -> None:
    note = note_of(controller, clone)
    assert (note is not None) == is_noted
    if note is not None:
        assert (
            "a mean return of -90 in 20 episodes, and json:dumps with noise has -20 in 10" in note
        )
        assert "prior_steps=2048 instead of 1024" in note


@pytest.mark.parametrize(
    ("settings", "has_memory"), [({}, True), ({"memory": "gru"}, False), ({"algo": "sac"}, False)]
)
def test_a_memory_is_advised_where_it_helps(settings: dict[str, Any], has_memory: bool) -> None:
    note = note_of((-20, 5), (-90, 10), **settings)
    assert note is not None
    assert ("--memory lstm" in note) == has_memory


def test_a_run_compares_its_first_evaluation_with_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clone_note, "_is_worse", lambda clone, controller: True)
    config = {
        "env_id": "CartPole-v1",
        "prior": "worlds.priors:balance",
        "prior_steps": 128,
        "algo": "ppo",
        "num_samplers": 2,
        "num_steps": 32,
        "total_timesteps": 256,
        "eval_every": 64,
        "eval_episodes": 2,
        "num_actors": 0,
        "run_dir": tmp_path / "run",
    }
    dppo.train(make_config(config))
    notes = [text for text in caplog.messages if text.startswith("the clone is worse")]
    assert len(notes) == 1
    assert "worlds.priors:balance with noise has" in notes[0]


def test_a_resumed_run_does_not_repeat_the_note() -> None:
    first = CONTROLLER | {"charts/episodic_return": -20, "charts/episodic_return_std": 5}
    second = CLONE | {"eval/episodic_return": -90, "eval/return_std": 10}
    config = make_config(CONFIG | {"num_samplers": 4})
    assert CloneNote(config, [first]).note(second) is not None
    assert CloneNote(config, [first, second]).note({"iteration": 4}) is None
