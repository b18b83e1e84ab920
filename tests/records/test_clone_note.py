"""The note on a clone that is worse than its controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from remedies import executes

import dppo
from dppo.ppo.exchange.records import Episode
from dppo.records.clone_note import CloneNote

CONFIG = {
    "env_id": "E-v0",
    "prior": "json:dumps",
    "num_samplers": 4,
    "num_steps": 128,
    "prior_steps": 1000,
}
WORSE = [-20.0, -30.0, -10.0]
"""Returns of a controller, beside which a clone with -90 is worse."""


def notes_of(
    caplog: pytest.LogCaptureFixture,
    returns: list[float],
    clone: tuple[float, float],
    *,
    resumed_at: int = 0,
    **settings: Any,
) -> list[str]:
    """Return the notes after these returns of the controller, and a mean and a deviation of its clone's returns."""
    config = make_config(CONFIG | settings)
    note = CloneNote(config, resumed_at)
    for episode_return in returns:
        note.on_episode(Episode(0, 0, episode_return, 200, None))
    note.on_iteration({"iteration": 2})
    note.on_episode(Episode(0, 0, 1e6, 200, None))
    mean, std = clone
    evaluation = {"eval/episodic_return": mean, "eval/return_std": std, "eval/episodes": 20}
    note.on_iteration({"iteration": 3, "eval/iteration": 2} | evaluation)
    return caplog.messages


@pytest.mark.parametrize(
    ("returns", "clone"),
    [
        pytest.param(WORSE, (-15, 5), id="better"),
        pytest.param([-60, 20, -20], (-60, 40), id="within the error"),
        pytest.param([100.0] * 5, (95, 1), id="a small difference"),
        pytest.param([-20], (-90, 10), id="a single episode"),
    ],
)
def test_a_clone_that_is_not_clearly_worse_is_not_noted(
    returns: list[float], clone: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    assert notes_of(caplog, returns, clone) == []


def test_a_worse_clone_is_noted_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    (note,) = notes_of(caplog, WORSE, (-90, 10))
    assert "a mean return of -90 in 20 episodes, and json:dumps with noise has -20 in 3" in note
    assert (
        "Otherwise collect more of its env steps: prior_steps=2048 (--prior-steps 2048) instead of 1024"
        in note
    )


def test_no_more_env_steps_are_advised_than_the_run_has(caplog: pytest.LogCaptureFixture) -> None:
    (note,) = notes_of(caplog, WORSE, (-90, 10), total_timesteps=2048)
    assert "prior_steps" not in note


def test_a_run_that_was_resumed_after_the_controller_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notes_of(caplog, WORSE, (-90, 10), resumed_at=2) == []


@pytest.mark.parametrize(
    ("settings", "has_memory"), [({}, True), ({"memory": "gru"}, False), ({"algo": "sac"}, False)]
)
def test_a_memory_is_advised_where_it_helps(
    settings: dict[str, Any], has_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (note,) = notes_of(caplog, WORSE, (-90, 10), **settings)
    assert ("--memory lstm" in note) == has_memory


def remembering(run_dir: Path, **settings: Any) -> dppo.Config:
    """Return a run that starts from a controller which remembers its first observation."""
    config = {
        "env_id": "worlds.priors:Cue",
        "prior": "worlds.priors:Remembering",
        "prior_steps": 512,
        "num_samplers": 2,
        "num_steps": 256,
        "total_timesteps": 1024,
        "eval_every": 512,
        "num_actors": 0,
        "run_dir": run_dir,
    }
    return make_config(config | settings)


@pytest.mark.slow
@executes("records/clone_note.py: , or give the policy a memory ({})")
def test_a_memory_makes_the_clone_as_good_as_a_controller_that_remembers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A controller that collects a single iteration is compared, too."""

    def notes() -> list[str]:
        return [text for text in caplog.messages if text.startswith("the clone is worse")]

    dppo.train(remembering(tmp_path / "without"))
    assert len(notes()) == 1
    assert "worlds.priors:Remembering with noise has" in notes()[0]

    caplog.clear()
    dppo.train(remembering(tmp_path / "with", memory="lstm"))
    assert notes() == []
