"""--licences and --start-rate: how many environments exist at once, and how soon the next one starts."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_config
from matrix import single, sized
from processes import Disturbance, send
from worlds.licensed import locked

import dppo
from dppo.engine.actors import Actor
from dppo.engine.messages import Limits
from dppo.engine.slots import ENDING_S, InstanceSlots
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts import environments
from dppo.ppo.exchange.questions import Question
from dppo.records.metrics.reading import read_metrics


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    folder = run_dir.parent / f"licences of {run_dir.name}"
    folder.mkdir()
    kwargs = {"folder": str(folder), "licences": 4}
    kwargs |= changes.pop("kwargs", {})
    world = {"env_id": "worlds.licensed:Licensed", "env_kwargs": kwargs} | single(4, 16)
    return make_config(sized(world, 6) | {"run_dir": run_dir} | changes)


def made_at(config: dppo.Config) -> list[float]:
    file = Path(config.env_kwargs["folder"]) / "made"
    times = file.read_text().split()
    return sorted(map(float, times))


def actors(*hosted: tuple[int, ...]) -> list[Actor]:
    return [Actor(actor_id, samplers) for actor_id, samplers in enumerate(hosted)]


def test_the_environments_of_a_lost_process_count_until_its_keeper_has_ended_them() -> None:
    slots = InstanceSlots(replace(Limits(), most_hosted=3))
    samplers = (0, 1)
    other_samplers = (2, 3)
    first, other = actors(samplers, other_samplers)
    assert slots.grant(first, samplers, 0.0) == samplers
    assert slots.grant(other, other_samplers, 0.0) == (2,)  # and sampler 3 waits
    assert slots.take_waiting() == [other]
    assert slots.grant(first, samplers, 1.0) == samplers  # it has them

    slots.record_end(first)
    first.end(1.0)
    assert slots.grant(first, samplers, 2.0) == ()

    described = str(slots)
    assert "of 3 of at most 3 samplers exist (licences)" in described
    assert "those of 2 in processes that have just ended" in described
    assert slots.grant(first, samplers, 2.0 + ENDING_S) == samplers
    assert slots.grant(other, other_samplers, 2.0 + ENDING_S) == (2,)


def test_what_an_actor_hosts_no_more_counts_until_it_is_idle_and_then_ends_it_if_need_be() -> None:
    slots = InstanceSlots(replace(Limits(), most_hosted=2))
    samplers = (0, 1)
    giver, taker = actors(samplers, ())
    slots.grant(giver, samplers, 0.0)
    giver.assign(samplers, 0, samplers)

    giver.samplers = (0,)
    taker.samplers = (1,)
    giver.queue[1] = Question(0, samplers, hosted=samplers)
    assert slots.grant(taker, (1,), 1.0) == ()
    assert slots.idle_holders([giver, taker]) == []

    giver.queue.clear()
    assert slots.idle_holders([giver, taker]) == [giver]
    giver.assign((0,), 1, (0,))
    assert slots.grant(taker, (1,), 2.0) == (1,)


def test_environments_start_no_faster_than_allowed_over_all_actors() -> None:
    slots = InstanceSlots(replace(Limits(), start_s=2.0))
    samplers = (0, 1)
    first, other = actors(samplers, (2,))
    assert slots.grant(first, samplers, 10.0) == samplers
    assert slots.grant(other, (2,), 10.0) == ()
    assert slots.grant(other, (2,), 13.9) == ()
    assert slots.grant(other, (2,), 14.0) == (2,)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"licences": 8, "eval_every": 100, "num_actors": 2, "eval_actors": 2},
            r"the 10 environments .*4 samplers x 2 env x 1 copy \+ 2 for evaluations\)\. .* use `num_samplers=3`",
        ),
        (
            {"start_rate": "2"},
            "start_rate=2: must be a number of at least 1 in a time .* Use one such as 2/s",
        ),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(wrong: dict[str, Any], words: str) -> None:
    """tests/remedies/settings.py has others."""
    base = {"env_id": "CartPole-v1", "num_samplers": 4, "envs_per_sampler": 2}
    with pytest.raises(ConfigError, match=words):
        make_config(base | wrong)


def test_too_few_licences_are_reported_with_the_number_of_instances_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with `--num-actors 3` and three licences: the number of actors is not the number of instances."""
    monkeypatch.setattr("dppo.transports.in_process.WAITS_S", (0, 0))
    with pytest.raises(EnvironmentFault) as fault:
        dppo.train(settings(tmp_path / "run", kwargs={"licences": 3}))
    remedies = (
        ". Its process had 3 other instances. If a process may have only 3, use num_actors=2 "
        "(--num-actors 2), samplers_per_actor=3 (--samplers-per-actor 3). 4 samplers x 1 env = 4 instances exist at "
        "once, for any number of actors. With fewer licences, use num_samplers=2 (--num-samplers 2): 2 instances, and "
        "a smaller batch."
    )
    assert "ConnectionError: all licences are in use (" in fault.value.message
    assert fault.value.message.endswith(remedies)
    report = tmp_path / "run" / "incidents" / "001" / "report.txt"
    assert fault.value.message in report.read_text()
    assert caplog.text.count("and was called again after 0 s.") == 2


@pytest.mark.parametrize(
    "changes",
    [{}, {"env_threads": True}, {"num_samplers": 1, "envs_per_sampler": 4}, {"standby_envs": 1}],
    ids=["samplers", "threads", "environments", "standby"],
)
def test_a_licence_that_is_not_free_for_a_moment_is_waited_for(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"licences": 8 if "standby_envs" in changes else 4}
    config = settings(tmp_path / "run", kwargs=kwargs, **changes)
    files = [locked(Path(config.env_kwargs["folder"], "0"))]

    def return_licence(seconds: float) -> None:
        while files:
            os.close(files.pop())

    monkeypatch.setattr("dppo.attempts.time", SimpleNamespace(sleep=return_licence))
    result = dppo.train(config)
    assert result.incidents == {"env_raised": 1}
    undisturbed = dppo.train(settings(tmp_path / "undisturbed", kwargs=kwargs, **changes))
    assert result.weights_sha256 == undisturbed.weights_sha256


class LateClock:
    """A clock that only sleeping moves; the second sleep takes 5 s longer than it should."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        self.now += seconds
        if self._sleeps == 2:
            self.now += 5


def test_a_rate_holds_in_one_process_also_after_a_late_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LateClock()
    starts = []
    make = environments._make_env

    def noted(*arguments: Any) -> Any:
        starts.append(clock.now)
        return make(*arguments)

    monkeypatch.setattr(environments, "time", clock)
    monkeypatch.setattr(environments, "_last_start", [0.0])
    monkeypatch.setattr(environments, "_make_env", noted)
    config = settings(tmp_path / "run", start_rate="10/s", total_timesteps=64)
    dppo.train(config)
    assert len(made_at(config)) == 4
    assert starts == pytest.approx([100.0, 100.1, 105.2, 105.3])

    starts.clear()
    vector = {
        "env_id": "worlds.joint:Native",
        "env_kwargs": {"mode": "NextStep", "fails_at": 30},
        "num_samplers": 1,
        "envs_per_sampler": 3,
        "num_steps": 16,
        "on_env_fault": "rebuild",
        "start_rate": "10/s",
        "run_dir": tmp_path / "vector",
    }
    dppo.train(make_config(sized(vector, 3)))
    assert starts == pytest.approx([105.4, 105.5]), "a vector is made again as it was made"


@pytest.mark.parametrize("kind", ["in process", pytest.param("on Ray", marks=pytest.mark.slow)])
def test_evaluations_have_a_licence_of_their_own(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Actors that play and those that collect are killed; a licence that is not there would be an incident."""
    changes: dict[str, Any] = {"licences": 5, "eval_every": 64, "eval_episodes": 2}
    kwargs: dict[str, Any] = {"licences": 5}
    if kind == "in process":
        config = settings(tmp_path / "run", kwargs=kwargs, **changes)
        assert dppo.train(config).incidents == {}
        return
    request.getfixturevalue("ray_session")
    kwargs |= {"child": True, "sleep_s": 0.01}
    config = settings(tmp_path / "run", kwargs=kwargs, num_actors=2, **changes)
    with Disturbance("EvaluationActor.play", send(signal.SIGKILL)):
        result = dppo.train(config)
    assert result.incidents == {}

    rows = read_metrics(tmp_path / "run")
    episodes = [row["eval/episodes"] for row in rows if "eval/episodes" in row]
    assert episodes == [2] * 6


@pytest.mark.proves("gives its licence back some seconds after its death")
@pytest.mark.slow
def test_a_licence_that_a_dead_actor_gives_back_late_is_waited_for(
    ray_session: None, tmp_path: Path
) -> None:
    """Without `licences`, the constructor of the next process raises."""
    here = dppo.train(settings(tmp_path / "here"))
    late = {"child": True, "sleep_s": 0.01}
    config = settings(tmp_path / "there", licences=4, kwargs=late, num_actors=2)
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)):
        there = dppo.train(config)
    assert there.incidents == {"actor_lost": 1}
    assert there.weights_sha256 == here.weights_sha256


@pytest.mark.proves("cannot start many times at once")
@pytest.mark.slow
def test_a_rate_holds_over_all_actors(ray_session: None, tmp_path: Path) -> None:
    config = settings(tmp_path / "run", start_rate="2/s", num_actors=4)
    assert dppo.train(config).iterations == 6
    first, *_, last = made_at(config)
    assert last - first > 1.0  # 1.5 s but for the time that messages take
