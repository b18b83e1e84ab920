"""The promise: the number of actors changes the time, never the result. Bit for bit."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from processes import Disturbance, send
from recorder import Notes, Recorder, lasting

import dppo
from dppo.engine.collector import Collected, InProcessCollector
from dppo.errors import SegmentsLost
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.records import IncidentKind, Update

Patch = pytest.MonkeyPatch
ITERATIONS = 3
CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1", "num_steps": 64},
    "continuous": {"env_id": "Pendulum-v1", "num_steps": 120, "norm_obs": True, "norm_reward": True, "gamma": 0.9},
}
# A segment takes a quarter of a second at least, long enough to kill its actor, and segments arrive in any order.
DELAYED = {"cartpole": "worlds.slow:delayed_cartpole", "continuous": "worlds.slow:delayed_pendulum"}
Train = Callable[..., dppo.Result]
Whole = Callable[[str, bool], str]
both = pytest.mark.parametrize("case", list(CASES))
with_and_without_overlap = pytest.mark.parametrize("overlap", [False, True])


def each(names: str, fast: list[Any], slow: list[Any]) -> pytest.MarkDecorator:
    """Run a test for the `fast` ones in the fast set, and for the `slow` ones in the slow set."""
    return pytest.mark.parametrize(names, [*fast, *(pytest.param(*one, marks=pytest.mark.slow) for one in slow)])


def settings(case: str, run_dir: Path, **changes: Any) -> dppo.Config:
    base = CASES[case] | {"num_samplers": 8, "update_epochs": 2, "progress": "off", "run_dir": run_dir} | changes
    return make_config(base | {"total_timesteps": 8 * base["num_steps"] * ITERATIONS})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function of case and `overlap`: the weights of an undisturbed run in this process, trained once."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def weights(case: str, overlap: bool) -> str:
        result = dppo.train(settings(case, folder / f"{case} {overlap}", overlap=overlap))
        assert result.episodes >= 8  # or no test here would see a reset
        return result.weights_sha256

    return weights


@pytest.fixture
def train(tmp_path: Path, request: pytest.FixtureRequest) -> Train:
    """Return a function that trains a case in a folder of this test, or resumes its run there."""

    def train(case: str, *observers: dppo.Observer, resume: bool = False, run: str = "run", **changes: Any) -> Any:
        if changes.get("num_actors"):
            request.getfixturevalue("ray_session")
        config = settings(case, tmp_path / run, **changes)
        return dppo.train(config, resume=tmp_path / run if resume else None, observers=observers)

    return train


@both
@with_and_without_overlap
def test_the_seed_and_overlap_decide_the_weights(case: str, overlap: bool, whole: Whole, train: Train) -> None:
    again = train(case, overlap=overlap).weights_sha256
    other = train(case, run="other", overlap=overlap, seed=2).weights_sha256
    assert again == whole(case, overlap) != other
    assert whole(case, True) != whole(case, False)


MANY_ACTORS = ((1, False), (8, False), (1, True), (3, True))


@each(
    "case, num_actors, overlap",
    [("continuous", 3, False)],
    [("cartpole", 3, False), *((case, *more) for case in CASES for more in MANY_ACTORS)],
)
def test_actors_never_change_the_weights(case: str, num_actors: int, overlap: bool, whole: Whole, train: Train) -> None:
    delayed = {"env_id": DELAYED[case], "env_kwargs": {"longest_s": 0.001}}
    result = train(case, num_actors=num_actors, overlap=overlap, **delayed)
    assert (result.weights_sha256, lasting(result)) == (whole(case, overlap), {})


@each("case, overlap", [("cartpole", True)], [("continuous", True), ("cartpole", False), ("continuous", False)])
def test_an_actor_killed_in_a_segment_changes_nothing(case: str, overlap: bool, whole: Whole, train: Train) -> None:
    recorder = Recorder()
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)), Notes() as notes:
        result = train(case, recorder, num_actors=2, overlap=overlap, env_id=DELAYED[case])
    assert (result.weights_sha256, lasting(result)) == (whole(case, overlap), {"actor_lost": 1})
    assert any("replaced" in note for note in notes.texts)
    assert "actor_lost" in [incident.kind for incident in recorder.incidents]
    assert any("actor_lost" in line for line in recorder.ending)


@pytest.mark.proves("kills its process in constructor, reset or step")
def test_actors_killed_in_constructor_reset_and_step_change_nothing(train: Train, tmp_path: Path) -> None:
    """The simulator kills its process. Open episodes, which may have begun iterations ago, and states are replayed."""
    memory = {"memory": "gru", "memory_size": 8}
    deadly = {"env_id": "worlds.faulty:deadly_cartpole", "env_kwargs": {"folder": str(tmp_path)}}
    result = train("cartpole", num_actors=2, **memory, **deadly)
    assert all((tmp_path / where).exists() for where in ("constructor", "reset", "step"))
    assert sum(row["replay/steps"] for row in result.metrics) > 0
    assert lasting(result) == {"actor_lost": 3}
    assert result.weights_sha256 == train("cartpole", run="undisturbed", **memory).weights_sha256


@each(
    "case, overlap, before, after",
    [*((case, overlap, 0, 0) for case in CASES for overlap in (False, True)), ("cartpole", False, 0, 2)],
    [(case, *way) for case in CASES for way in ((False, 3, 3), (True, 0, 2), (True, 3, 3), (True, 2, 0))],
)
def test_a_stopped_and_resumed_run_gives_the_same_weights(
    case: str, overlap: bool, before: int, after: int, whole: Whole, train: Train
) -> None:
    """With any number of actors; segments in flight are collected again, with the policy of the first time."""
    stopped = train(case, Recorder(interrupt_at=2), num_actors=before, overlap=overlap)
    assert (stopped.stopped_by, stopped.iterations) == ("SIGINT", 2)
    assert stopped.weights_sha256 != whole(case, overlap)
    resumed = train(case, resume=True, num_actors=after, overlap=overlap)
    assert (resumed.iterations, lasting(resumed)) == (ITERATIONS, {})
    assert resumed.weights_sha256 == whole(case, overlap)


@pytest.mark.proves("has episodes that do not follow from the seed")
def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(train: Train) -> None:
    drifting = {"env_id": "worlds.faulty:drifting_cartpole"}
    train("cartpole", Recorder(interrupt_at=2), **drifting)
    recorder = Recorder()
    with Notes() as notes:
        resumed = train("cartpole", recorder, resume=True, **drifting)
    assert 1 <= resumed.incidents["replay_mismatch"] <= 8
    assert resumed.metrics[-1]["incidents/replay_mismatch"] == resumed.incidents["replay_mismatch"]
    assert any("not deterministic given its seed" in note or "replay ended" in note for note in notes.texts)
    assert any("replay_mismatch" in line for line in recorder.ending)


def test_without_replay_open_episodes_are_abandoned_and_reported(train: Train) -> None:
    train("cartpole", Recorder(interrupt_at=2), replay=False)
    assert train("cartpole", resume=True, replay=False).incidents == {"episode_abandoned": 8}


def test_nothing_global_is_seeded_or_drawn_from(train: Train) -> None:
    import random

    import numpy as np
    import torch

    def state() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    train("continuous")
    assert state() == before


@with_and_without_overlap
@each("case, num_actors", [("cartpole", 0), ("continuous", 0)], [("cartpole", 1), ("cartpole", 3), ("continuous", 3)])
def test_segments_lost_before_the_update_are_collected_again(
    case: str, num_actors: int, overlap: bool, whole: Whole, train: Train, monkeypatch: Patch
) -> None:
    """Each segment once; in the first iteration without an entry in the ledger. losing_nodes.py loses real nodes."""
    update, to_come = LocalTrainer.update, [0, 1, 2]

    def update_or_lose(self: LocalTrainer, *update_of: Any) -> Update:
        iteration = update_of[-1]
        if iteration in to_come:
            to_come.remove(iteration)
            raise SegmentsLost("lost on their way")
        return update(self, *update_of)

    monkeypatch.setattr(LocalTrainer, "update", update_or_lose)
    recorder = Recorder()
    with Notes() as notes:
        result = train(case, recorder, num_actors=num_actors, overlap=overlap)
    assert (result.weights_sha256, lasting(result)) == (whole(case, overlap), {"segments_lost": 3})
    assert [incident.kind for incident in recorder.incidents].count(IncidentKind.SEGMENTS_LOST) == 3
    assert "lost on their way; they are collected again" in notes.texts


def test_with_overlap_policy_lag_is_one_from_the_second_iteration_on(train: Train, monkeypatch: Patch) -> None:
    lags = []
    receive, update = InProcessCollector.receive, LocalTrainer.update

    def received(self: InProcessCollector, stop: Any) -> Collected:
        collected = receive(self, stop)
        assert {report.policy_version for report in collected.reports} == {collected.policy.version}
        return collected

    def updated(self: LocalTrainer, segments: Any, policy: Any, reward_scale: Any, iteration: int) -> Update:
        lags.append(iteration - policy.version)
        return update(self, segments, policy, reward_scale, iteration)

    monkeypatch.setattr(InProcessCollector, "receive", received)
    monkeypatch.setattr(LocalTrainer, "update", updated)
    for overlap in (True, False):
        train("cartpole", run=str(overlap), overlap=overlap)
    assert lags == [0, 1, 1, 0, 0, 0]
