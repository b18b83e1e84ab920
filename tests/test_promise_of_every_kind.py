"""The promise for every kind of policy: actors, kills, learners and resuming do not change the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from kinds import ITERATIONS, KINDS, SMALL, RunOf, settings
from recorder import Recorder, lasting

import dppo

every_kind = pytest.mark.parametrize("kind", KINDS)


def on_ray(proof: str) -> pytest.MarkDecorator:
    """Run the proof for every kind; slow, except for the kinds that name it as a fast one."""
    slow_or_not = ((name, () if proof in kind.fast else pytest.mark.slow) for name, kind in KINDS.items())
    return pytest.mark.parametrize("kind", [pytest.param(name, marks=marks) for name, marks in slow_or_not])


@every_kind
def test_a_resumed_run_has_the_same_weights(kind: str, run_of: RunOf, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(kind, run), observers=[Recorder(interrupt_at=1)])
    assert stopped.iterations == 1
    resumed = dppo.train(settings(kind, run), resume=run)
    assert resumed.iterations == ITERATIONS
    assert (resumed.weights_sha256, resumed.incidents) == (run_of(kind).weights_sha256, {})


@on_ray("actors")
def test_two_actors_give_the_same_weights(kind: str, run_of: RunOf, tmp_path: Path, ray_session: None) -> None:
    result = dppo.train(settings(kind, tmp_path / "run", num_actors=2))
    assert (result.weights_sha256, lasting(result)) == (run_of(kind).weights_sha256, {})
    assert result.episodes >= 10  # else few resets were compared


@on_ray("killed")
def test_a_killed_actor_does_not_change_the_weights(
    kind: str, run_of: RunOf, tmp_path: Path, ray_session: None
) -> None:
    """The simulator kills its process in the second segment. The replacement replays the episodes that were open."""
    world, marker = KINDS[kind].settings, tmp_path / "marker"
    crashing = {
        "world": world["env_id"],
        "world_kwargs": world.get("env_kwargs", {}),
        "how": "kill",
        "at_episode": None,
        "at_step": SMALL["num_steps"] + 7,
        "marker": str(marker),
    }
    changes = {"env_id": "worlds.faulty:crashing", "env_kwargs": crashing, "num_actors": 2}
    result = dppo.train(settings(kind, tmp_path / "run", **changes))
    assert marker.exists()
    assert lasting(result) == {"actor_lost": 1}
    assert sum(row["replay/steps"] for row in result.metrics) > 0
    assert result.weights_sha256 == run_of(kind).weights_sha256


@pytest.mark.slow
@every_kind
def test_two_learners_give_the_same_weights_for_any_number_of_actors(
    kind: str, tmp_path: Path, ray_session: None
) -> None:
    two = {"num_learners": 2, "cpus_per_actor": 0.5}
    one, other = (dppo.train(settings(kind, tmp_path / str(n), num_actors=n, **two)) for n in (1, 2))
    assert one.weights_sha256 == other.weights_sha256
    assert lasting(one) == lasting(other) == {}
