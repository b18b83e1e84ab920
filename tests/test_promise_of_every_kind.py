"""The promise for every kind of policy: actors, kills, learners and resuming do not change the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from kinds import ITERATIONS, KINDS, ON_RAY, SMALL, RunOf, settings
from recorder import Recorder, lasting

import dppo

slow = pytest.mark.slow
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_resumed_run_has_the_same_weights(kind: str, run_of: RunOf, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(kind, run), observers=[Recorder(interrupt_at=1)])
    assert stopped.iterations == 1
    resumed = dppo.train(settings(kind, run), resume=run)
    assert resumed.iterations == ITERATIONS
    assert (resumed.weights_sha256, resumed.incidents) == (run_of(kind).weights_sha256, {})


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ON_RAY else slow) for kind in KINDS])
def test_two_actors_give_the_same_weights(kind: str, run_of: RunOf, tmp_path: Path, ray_session: None) -> None:
    result = dppo.train(settings(kind, tmp_path / "run", num_actors=2))
    assert (result.weights_sha256, lasting(result)) == (run_of(kind).weights_sha256, {})
    assert result.episodes >= 10  # else few resets were compared


@slow  # tests/test_promise.py has actors killed with memory in the fast set
@every_kind
def test_a_killed_actor_changes_nothing(kind: str, run_of: RunOf, tmp_path: Path, ray_session: None) -> None:
    """The simulator kills its process in the second segment. The replacement replays the episodes that were open."""
    marker = tmp_path / "marker"
    crashing = {"world": KINDS[kind]["env_id"], "world_kwargs": KINDS[kind].get("env_kwargs", {})}
    crashing |= {"marker": str(marker), "how": "kill", "at_episode": None, "at_step": SMALL["num_steps"] + 7}
    changes = {"env_id": "worlds.faulty:crashing", "env_kwargs": crashing, "num_actors": 2}
    result = dppo.train(settings(kind, tmp_path / "run", **changes))
    assert marker.exists()
    assert sum(row["replay/steps"] for row in result.metrics) > 0
    assert (result.weights_sha256, lasting(result)) == (run_of(kind).weights_sha256, {"actor_lost": 1})


@slow
@every_kind
def test_two_learners_give_the_same_weights_for_any_actors(kind: str, tmp_path: Path, ray_session: None) -> None:
    two = {"num_learners": 2, "cpus_per_actor": 0.5}
    one, other = (dppo.train(settings(kind, tmp_path / str(n), num_actors=n, **two)) for n in (1, 2))
    assert one.weights_sha256 == other.weights_sha256
    assert lasting(one) == lasting(other) == {}
