"""Policy lag K: segment k is collected with policy max(0, k - K), whatever the actors do."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from processes import Disturbance, send
from recorder import Recorder, lasting

import dppo
from dppo.errors import SegmentsLost
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.records import Update

ITERATIONS, LAG = 6, 3
slow = pytest.mark.slow
Whole = Callable[[int], dppo.Result]


def settings(run_dir: Path, lag: int, **changes: Any) -> dppo.Config:
    base: dict[str, Any] = {"env_id": "CartPole-v1", "num_samplers": 6, "num_steps": 32, "update_epochs": 2}
    base |= {"total_timesteps": 6 * 32 * ITERATIONS, "norm_obs": True, "norm_value": True, "progress": "off"}
    return make_config(base | {"policy_lag": lag, "run_dir": run_dir} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function of K: the result of an undisturbed run in this process."""
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda lag: dppo.train(settings(folder / str(lag), lag)))


def lags_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every update adds its policy lag."""
    lags: list[int] = []
    update = LocalTrainer.update

    def updated(self: LocalTrainer, segments: Any, policy: Any, reward_scale: Any, iteration: int) -> Update:
        lags.append(iteration - policy.version)
        return update(self, segments, policy, reward_scale, iteration)

    monkeypatch.setattr(LocalTrainer, "update", updated)
    return lags


def test_the_lag_is_constant_after_the_first_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lags = lags_of(monkeypatch)
    dppo.train(settings(tmp_path / "run", LAG))
    assert lags == [0, 1, 2, 3, 3, 3]


def test_overlap_is_a_lag_of_one(whole: Whole, tmp_path: Path) -> None:
    overlap = dppo.train(settings(tmp_path / "run", 0, overlap=True))
    assert overlap.weights_sha256 == whole(1).weights_sha256 != whole(LAG).weights_sha256


ON_RAY = [pytest.param(*one, marks=slow) for one in ((3, 3), (0, 3), (3, 0))]


@pytest.mark.parametrize("stop_at", [1, 4])
@pytest.mark.parametrize(("before", "after"), [(0, 0), *ON_RAY])
def test_a_stopped_and_resumed_run_has_the_same_weights(
    stop_at: int, before: int, after: int, whole: Whole, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The policies in flight are those of up to K earlier iterations."""
    if before or after:
        request.getfixturevalue("ray_session")
    dppo.train(settings(tmp_path / "run", LAG, num_actors=before), observers=[Recorder(interrupt_at=stop_at)])
    resumed = dppo.train(settings(tmp_path / "run", LAG, num_actors=after), resume=tmp_path / "run")
    assert (resumed.resumed_at, resumed.iterations) == (stop_at, ITERATIONS)
    assert resumed.weights_sha256 == whole(LAG).weights_sha256


@pytest.mark.parametrize("num_actors", [0, pytest.param(3, marks=slow)])
def test_lost_segments_are_collected_again_with_those_behind_them(
    num_actors: int, whole: Whole, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, to_come = LocalTrainer.update, [0, 2, 4]

    def update_or_lose(self: LocalTrainer, *update_of: Any) -> Update:
        if update_of[-1] in to_come:
            to_come.remove(update_of[-1])
            raise SegmentsLost("lost on their way")
        return update(self, *update_of)

    if num_actors:
        request.getfixturevalue("ray_session")
    monkeypatch.setattr(LocalTrainer, "update", update_or_lose)
    result = dppo.train(settings(tmp_path / "run", LAG, num_actors=num_actors))
    assert (result.weights_sha256, lasting(result)) == (whole(LAG).weights_sha256, {"segments_lost": 3})


@slow
@pytest.mark.parametrize("num_actors", [3, 6])
def test_actors_that_are_killed_change_nothing(
    num_actors: int, whole: Whole, tmp_path: Path, ray_session: None
) -> None:
    delayed = {"env_id": "worlds.slow:delayed_cartpole", "env_kwargs": {"longest_s": 0.006}}
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)):
        result = dppo.train(settings(tmp_path / "run", LAG, num_actors=num_actors, **delayed))
    assert (result.weights_sha256, lasting(result)) == (whole(LAG).weights_sha256, {"actor_lost": 1})


@slow
def test_learners_fetch_segments_of_several_iterations_in_flight(tmp_path: Path, ray_session: None) -> None:
    two = {"num_learners": 2, "cpus_per_actor": 0.5, "minibatch_size": 48}
    one, other = (dppo.train(settings(tmp_path / str(n), LAG, num_actors=n, **two)) for n in (1, 3))
    assert one.weights_sha256 == other.weights_sha256
    assert lasting(one) == lasting(other) == {}
