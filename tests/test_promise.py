"""The promise: the number of actors changes the time, never the result. Bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from processes import Disturbance, send
from recorder import Notes, Recorder, lasting

import dppo
from dppo.cluster.collecting.collector import Collected
from dppo.cluster.collecting.in_process import InProcessCollector
from dppo.cluster.learning.trainers import LocalTrainer
from dppo.errors import SegmentsLost
from dppo.ppo.exchange.records import IncidentKind, Update

ITERATIONS = 3
CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"env_id": "CartPole-v1", "num_steps": 64},
    "continuous": {"env_id": "Pendulum-v1", "num_steps": 120, "norm_obs": True, "norm_reward": True, "gamma": 0.9},
}
DELAYED = {"cartpole": "worlds.slow:delayed_cartpole", "continuous": "worlds.slow:delayed_pendulum"}
both = pytest.mark.parametrize("case", list(CASES))
slow = pytest.mark.slow
QUICK = {"longest_s": 0.004}  # a segment takes a quarter of a second at least, long enough to kill its actor


def with_actors(*fast: tuple[str, int], more: tuple[tuple[str, int], ...] = ()) -> pytest.MarkDecorator:
    """Cases and numbers of actors: `fast` ones, and `more` in the slow set."""
    slow_ones = [pytest.param(*one, marks=slow) for one in more]
    return pytest.mark.parametrize(("case", "num_actors"), [*fast, *slow_ones])


def settings(case: str, run_dir: Path, **changes: Any) -> dppo.Config:
    base = CASES[case] | {"num_samplers": 8, "update_epochs": 2, "progress": "off", "run_dir": run_dir} | changes
    return make_config(base | {"total_timesteps": 8 * base["num_steps"] * ITERATIONS})


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the weights of an uninterrupted run in this process, by case; all other runs must give the same."""
    folder = tmp_path_factory.mktemp("in_process")
    results = {case: dppo.train(settings(case, folder / case)) for case in CASES}
    assert all(result.episodes >= 8 for result in results.values())  # or no test here would see a reset
    return {case: result.weights_sha256 for case, result in results.items()}


@pytest.fixture(autouse=True)
def running_ray(request: pytest.FixtureRequest) -> None:
    """Let tests with actors share the Ray of the whole test run."""
    if "num_actors" in request.fixturenames:
        request.getfixturevalue("ray_session")


@both
def test_the_seed_decides_the_weights(case: str, in_process: dict[str, str], tmp_path: Path) -> None:
    again = dppo.train(settings(case, tmp_path / "again")).weights_sha256
    other = dppo.train(settings(case, tmp_path / "other", seed=2)).weights_sha256
    assert again == in_process[case] != other


@with_actors(
    ("continuous", 3), more=(("cartpole", 1), ("cartpole", 3), ("cartpole", 8), ("continuous", 1), ("continuous", 8))
)
def test_any_number_of_actors_gives_the_same_weights(
    case: str, num_actors: int, in_process: dict[str, str], tmp_path: Path
) -> None:
    result = dppo.train(settings(case, tmp_path / "run", num_actors=num_actors))
    assert result.weights_sha256 == in_process[case]
    assert lasting(result) == {}


@slow  # the fast test that kills an actor has random delays, too
@both
def test_the_order_of_arrival_does_not_change_the_weights(
    case: str, in_process: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    result = dppo.train(settings(case, tmp_path / "run", num_actors=8, env_id=DELAYED[case]))
    assert result.weights_sha256 == in_process[case]


def a_killed_actor() -> Disturbance:
    """Kill an actor in the middle of a segment of the run inside."""
    return Disturbance("PPOActor.make_segment", send(signal.SIGKILL))


@slow  # the same with overlap is in the fast set
@both
def test_an_actor_killed_in_the_middle_of_a_segment_does_not_change_the_weights(
    case: str, in_process: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    recorder = Recorder()
    config = settings(case, tmp_path / "run", num_actors=3, env_id=DELAYED[case], env_kwargs=QUICK)
    with a_killed_actor(), Notes() as notes:
        result = dppo.train(config, observers=[recorder])
    assert lasting(result) == {"actor_lost": 1}
    assert any("replaced" in note for note in notes.texts)
    assert "actor_lost" in [incident.kind for incident in recorder.incidents]
    assert any("actor_lost" in line for line in recorder.ending)
    assert result.weights_sha256 == in_process[case]


def test_actors_killed_in_a_constructor_a_reset_and_a_step_do_not_change_the_weights(
    in_process: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    """The simulator kills its process. Open episodes, which may have begun iterations ago, are replayed."""
    config = settings(
        "cartpole",
        tmp_path / "run",
        num_actors=2,
        env_id="worlds.faulty:deadly_cartpole",
        env_kwargs={"folder": str(tmp_path)},
    )
    result = dppo.train(config)
    assert all((tmp_path / where).exists() for where in ("constructor", "reset", "step"))
    assert lasting(result) == {"actor_lost": 3}
    assert sum(row["replay/steps"] for row in result.metrics) > 0
    assert result.weights_sha256 == in_process["cartpole"]


@with_actors(("cartpole", 0), ("continuous", 0), more=(("cartpole", 3), ("continuous", 3)))
def test_a_stopped_and_resumed_run_gives_the_same_weights(
    case: str, num_actors: int, in_process: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(case, run, num_actors=num_actors), observers=[Recorder(interrupt_at=2)])
    assert (stopped.stopped_by, stopped.iterations) == ("SIGINT", 2)
    assert stopped.weights_sha256 != in_process[case]
    resumed = dppo.train(settings(case, run, num_actors=num_actors), resume=run)
    assert resumed.iterations == ITERATIONS
    assert lasting(resumed) == {}
    assert resumed.weights_sha256 == in_process[case]


def test_a_run_can_be_resumed_with_another_number_of_actors(
    in_process: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    run = tmp_path / "run"
    dppo.train(settings("cartpole", run), observers=[Recorder(interrupt_at=1)])
    assert dppo.train(settings("cartpole", run, num_actors=2), resume=run).weights_sha256 == in_process["cartpole"]


def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    drifting = {"env_id": "worlds.faulty:drifting_cartpole"}
    dppo.train(settings("cartpole", run, **drifting), observers=[Recorder(interrupt_at=2)])
    recorder = Recorder()
    with Notes() as notes:
        resumed = dppo.train(settings("cartpole", run, **drifting), resume=run, observers=[recorder])
    assert 1 <= resumed.incidents["replay_mismatch"] <= 8
    assert resumed.metrics[-1]["incidents/replay_mismatch"] == resumed.incidents["replay_mismatch"]
    assert any("not deterministic given its seed" in note or "replay ended" in note for note in notes.texts)
    assert any("replay_mismatch" in line for line in recorder.ending)


def test_without_replay_open_episodes_are_abandoned_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    dppo.train(settings("cartpole", run, replay=False), observers=[Recorder(interrupt_at=2)])
    resumed = dppo.train(settings("cartpole", run, replay=False), resume=run)
    assert resumed.incidents == {"episode_abandoned": 8}


def test_nothing_global_is_seeded_or_drawn_from(tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    def state() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    dppo.train(settings("continuous", tmp_path / "run"))
    assert state() == before


def lose_segments(monkeypatch: pytest.MonkeyPatch, *iterations: int) -> None:
    """Lose the segments of each of these iterations once, on their way to the update."""
    update, to_come = LocalTrainer.update, list(iterations)

    def update_or_lose(
        self: LocalTrainer, segments: Any, policy: Any, reward_scale: float | None, iteration: int
    ) -> Update:
        if iteration in to_come:
            to_come.remove(iteration)
            raise SegmentsLost("lost on their way")
        return update(self, segments, policy, reward_scale, iteration)

    monkeypatch.setattr(LocalTrainer, "update", update_or_lose)


@with_actors(("cartpole", 0), ("continuous", 0), more=(("cartpole", 1), ("cartpole", 3), ("continuous", 3)))
def test_segments_lost_before_the_update_are_collected_again(
    case: str,
    num_actors: int,
    in_process: dict[str, str],
    tmp_path: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first iteration, without an entry in the ledger, and in the third. losing_nodes.py loses real nodes."""
    lose_segments(monkeypatch, 0, 2)
    with Notes() as notes:
        recorder = Recorder()
        result = dppo.train(settings(case, tmp_path / "run", num_actors=num_actors), observers=[recorder])
    assert result.weights_sha256 == in_process[case]
    assert lasting(result) == {"segments_lost": 2}
    assert [incident.kind for incident in recorder.incidents].count(IncidentKind.SEGMENTS_LOST) == 2
    assert "lost on their way; they are collected again" in notes.texts


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the weights of an uninterrupted run in this process with `overlap`, by case."""
    folder = tmp_path_factory.mktemp("overlapped")
    return {case: dppo.train(settings(case, folder / case, overlap=True)).weights_sha256 for case in CASES}


@both
def test_overlap_changes_the_weights_and_the_seed_still_decides_them(
    case: str, in_process: dict[str, str], overlapped: dict[str, str], tmp_path: Path
) -> None:
    again = dppo.train(settings(case, tmp_path / "again", overlap=True)).weights_sha256
    assert again == overlapped[case] != in_process[case]


def test_with_overlap_policy_lag_is_one_from_the_second_iteration_on(tmp_path: Path) -> None:
    lags = []
    receive, update = InProcessCollector.receive, LocalTrainer.update

    def received(self: InProcessCollector, stop: Any) -> Collected:
        collected = receive(self, stop)
        assert {report.policy_version for report in collected.reports} == {collected.policy.version}
        return collected

    def updated(self: LocalTrainer, segments: Any, policy: Any, reward_scale: Any, iteration: int) -> Update:
        lags.append(iteration - policy.version)
        return update(self, segments, policy, reward_scale, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessCollector, "receive", received)
        patch.setattr(LocalTrainer, "update", updated)
        for overlap in (True, False):
            dppo.train(settings("cartpole", tmp_path / str(overlap), overlap=overlap))
    assert lags == [0, 1, 1, 0, 0, 0]


@slow
@both
@pytest.mark.parametrize("num_actors", [1, 3])
def test_overlap_any_number_of_actors_gives_the_same_weights(
    case: str, num_actors: int, overlapped: dict[str, str], tmp_path: Path
) -> None:
    result = dppo.train(settings(case, tmp_path / "run", overlap=True, num_actors=num_actors, env_id=DELAYED[case]))
    assert result.weights_sha256 == overlapped[case]
    assert lasting(result) == {}


@pytest.mark.parametrize("case", ["cartpole", pytest.param("continuous", marks=slow)])
def test_overlap_an_actor_killed_in_the_middle_of_a_segment_does_not_change_the_weights(
    case: str, overlapped: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    delayed = {"env_id": DELAYED[case], "env_kwargs": QUICK}
    with a_killed_actor():
        result = dppo.train(settings(case, tmp_path / "run", overlap=True, num_actors=3, **delayed))
    assert lasting(result) == {"actor_lost": 1}
    assert result.weights_sha256 == overlapped[case]


@both
@pytest.mark.parametrize(
    ("before", "after"), [(0, 0), *(pytest.param(*one, marks=slow) for one in ((0, 2), (3, 3), (2, 0)))]
)
def test_overlap_a_stopped_and_resumed_run_gives_the_same_weights(
    case: str, before: int, after: int, overlapped: dict[str, str], tmp_path: Path, ray_session: None
) -> None:
    """The segments in flight are collected again, with the policy of the first time."""
    run = tmp_path / "run"
    stopped = dppo.train(settings(case, run, overlap=True, num_actors=before), observers=[Recorder(interrupt_at=2)])
    assert (stopped.stopped_by, stopped.iterations) == ("SIGINT", 2)
    resumed = dppo.train(settings(case, run, overlap=True, num_actors=after), resume=run)
    assert resumed.iterations == ITERATIONS
    assert lasting(resumed) == {}
    assert resumed.weights_sha256 == overlapped[case]


@with_actors(("cartpole", 0), ("continuous", 0), more=(("cartpole", 3), ("continuous", 3)))
def test_overlap_segments_lost_while_the_next_are_in_flight_are_collected_again(
    case: str,
    num_actors: int,
    overlapped: dict[str, str],
    tmp_path: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_segments(monkeypatch, 0, 1, 2)
    result = dppo.train(settings(case, tmp_path / "run", overlap=True, num_actors=num_actors))
    assert result.weights_sha256 == overlapped[case]
    assert lasting(result) == {"segments_lost": 3}
