"""The simulated simulators: right in everything but what they are meant to get wrong."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import dppo.envs.simulated  # noqa: F401  registers the environments
from dppo.envs.simulated import Latency

SLOW, CRASHING, DRIFTING = "dppo/SlowCartPole-v0", "dppo/CrashingCartPole-v0", "dppo/DriftingCartPole-v0"


def rollout(env: gymnasium.Env, seed: int, steps: int = 60) -> list[tuple]:
    """What an env says to a fixed sequence of actions, reset with the same seed after each end."""
    obs, _ = env.reset(seed=seed)
    said: list[tuple] = [tuple(obs)]
    for action in np.random.default_rng(7).integers(0, 2, steps):
        obs, reward, terminated, truncated, _ = env.step(int(action))
        said.append((*obs, reward, terminated, truncated))
        if terminated or truncated:
            said.append(tuple(env.reset(seed=seed)[0]))
    return said


class SleptFor:
    """Stands in for the `time` module: notes the sleeps instead of sleeping."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.perf_counter = lambda: 0.0

    def sleep(self, seconds: float) -> None:
        self.times.append(seconds)


# ---------------------------------------------------------------------------------------------- slow


@pytest.mark.parametrize("distribution", ["constant", "lognormal", "spikes"])
def test_slow_cartpole_is_cartpole_in_everything_but_time(distribution: str) -> None:
    slow = gymnasium.make(SLOW, step_s=1e-5, distribution=distribution, reset_s=1e-5)
    assert rollout(slow, seed=3) == rollout(gymnasium.make("CartPole-v1"), seed=3)
    assert slow.observation_space == gymnasium.make("CartPole-v1").observation_space
    assert slow.spec is not None
    assert slow.spec.max_episode_steps == 500


def test_a_constant_step_takes_its_time_dynamics_included() -> None:
    env = gymnasium.make(SLOW, step_s=0.01)
    env.reset(seed=0)
    started = time.perf_counter()
    for _ in range(8):
        env.step(0)
    assert 0.08 <= time.perf_counter() - started < 0.12


def test_a_reset_takes_its_time() -> None:
    env = gymnasium.make(SLOW, step_s=0, reset_s=0.03)
    started = time.perf_counter()
    env.reset(seed=0)
    assert time.perf_counter() - started >= 0.03


def test_burning_uses_that_much_cpu() -> None:
    env = gymnasium.make(SLOW, step_s=0.01, burn=True)
    env.reset(seed=0)
    started = time.thread_time()
    for _ in range(5):
        env.step(0)
    assert 0.05 <= time.thread_time() - started < 0.06


@pytest.mark.parametrize("distribution", ["lognormal", "spikes"])
def test_the_same_seed_gives_the_same_step_times(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    for seed in (1, 1, 2):
        slept = SleptFor()
        monkeypatch.setattr("dppo.envs.simulated.time", slept)
        rollout(gymnasium.make(SLOW, distribution=distribution), seed)
        times.append(slept.times)
    assert times[0] == times[1]
    assert times[0] != times[2]
    assert len(set(times[0])) > 1


@pytest.mark.parametrize(
    ("latency", "cv"),
    [
        (Latency(0.2), 0.0),
        (Latency(0.2, "lognormal"), 0.5),
        (Latency(0.2, "lognormal", cv=1.0), 1.0),
        # base b: mean = b (1 + p (f - 1)), second moment = b^2 (1 + p (f^2 - 1))
        (Latency(0.2, "spikes"), math.sqrt((1 + 0.01 * (50**2 - 1)) / (1 + 0.01 * 49) ** 2 - 1)),
        (Latency(0.2, "spikes", spike_probability=0.5, spike_factor=3), 0.5),
        (Latency(0.0, "lognormal"), 0.0),
    ],
)
def test_the_mean_is_step_s_under_every_law(latency: Latency, cv: float) -> None:
    rng = np.random.default_rng(0)
    times = np.array([latency.draw(rng) for _ in range(100_000)])
    assert times.mean() == pytest.approx(latency.step_s, rel=0.03)
    assert times.std() == pytest.approx(cv * latency.step_s, rel=0.05)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"step_s": -0.01},
            r"step_s=-0.01: the mean time of a step in seconds is a finite number of at least 0",
        ),
        ({"step_s": math.nan}, r"step_s=nan"),
        ({"step_s": "fast"}, r"step_s='fast'"),
        ({"step_s": True}, r"step_s=True"),
        ({"reset_s": math.inf}, r"reset_s=inf"),
        ({"distribution": "normal"}, r"distribution='normal': is not one of constant, lognormal, spikes"),
        ({"cv": 0.5}, r"cv=0.5 has no effect: distribution is 'constant'.*use distribution='lognormal'"),
        ({"distribution": "lognormal", "cv": -1}, r"cv=-1"),
        ({"distribution": "spikes", "spike_probability": 1.5}, r"spike_probability=1.5.*from 0 to 1"),
        ({"distribution": "spikes", "spike_factor": 0.5}, r"spike_factor=0.5.*at least 1"),
        ({"distribution": "lognormal", "spike_factor": 9}, r"spike_factor=9 has no effect"),
        ({"burn": "yes"}, r"burn='yes'"),
    ],
)
def test_a_latency_that_cannot_be_is_refused(kwargs: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make(SLOW, **kwargs)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="steps_s"):
        gymnasium.make(SLOW, steps_s=0.01)


# ---------------------------------------------------------------------------------------------- faulty


def test_a_step_raises_at_the_chosen_place_only() -> None:
    env = gymnasium.make(CRASHING, at_episode=1, at_step=3)
    env.reset(seed=0)
    for _ in range(5):
        env.step(1)
    env.reset(seed=0)
    env.step(1)
    env.step(1)
    with pytest.raises(RuntimeError, match=r"failed in its step \(episode 1, step 3\)"):
        env.step(1)


def test_a_reset_raises_at_the_chosen_episode_only() -> None:
    env = gymnasium.make(CRASHING, where="reset", at_episode=1)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="failed in its reset"):
        env.reset(seed=1)


def test_a_constructor_raises() -> None:
    with pytest.raises(RuntimeError, match=r"failed in its constructor$"):
        gymnasium.make(CRASHING, where="constructor")


def test_a_marker_lets_it_fail_once(tmp_path: Path) -> None:
    kwargs = {"at_step": 1, "marker": str(tmp_path / "failed")}
    first, second = gymnasium.make(CRASHING, **kwargs), gymnasium.make(CRASHING, **kwargs)
    first.reset(seed=0)
    with pytest.raises(RuntimeError):
        first.step(0)
    assert rollout(second, seed=0) == rollout(gymnasium.make("CartPole-v1"), seed=0)


PROGRAM = """
import sys, json, gymnasium, dppo.envs.simulated
env = gymnasium.make("dppo/CrashingCartPole-v0", **json.loads(sys.argv[1]))
env.reset(seed=0)
env.step(0)
"""


def start_in_own_process(**kwargs: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(kwargs)])


@pytest.mark.parametrize(
    ("how", "where", "exitcode"),
    [
        ("exit", "step", 13),
        ("exit", "constructor", 13),
        ("kill", "step", -signal.SIGKILL),
        ("kill", "reset", -signal.SIGKILL),
    ],
)
def test_it_takes_its_process_along(how: str, where: str, exitcode: int) -> None:
    assert start_in_own_process(how=how, where=where).wait(60) == exitcode


@pytest.mark.parametrize("where", ["step", "reset", "constructor"])
def test_it_hangs(where: str, tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    process = start_in_own_process(how="hang", where=where, marker=str(marker))
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"how": "melt"}, "how='melt': is not one of raise, exit, kill, hang"),
        ({"where": "close"}, "where='close'"),
        ({"at_step": 0}, "at_step=0"),
        ({"at_episode": -1}, "at_episode=-1"),
    ],
)
def test_a_failure_that_cannot_be_is_refused(kwargs: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make(CRASHING, **kwargs)


def test_a_drifting_simulator_does_not_replay() -> None:
    env = gymnasium.make(DRIFTING)
    first, second = rollout(env, seed=5), rollout(env, seed=5)
    assert first[0] == second[0]
    assert first[5] != second[5]
    assert env.spec is not None
    assert not env.spec.nondeterministic


# ---------------------------------------------------------------------------------------------- small


def test_point_mass_is_deterministic_bounded_and_ends_at_its_time_limit() -> None:
    said = []
    for _ in range(2):
        env = gymnasium.make("dppo/PointMass-v0")
        obs, _ = env.reset(seed=4)
        env.action_space.seed(4)
        total, truncated, steps = 0.0, False, 0
        while not truncated:
            obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
            assert env.observation_space.contains(obs)
            assert not terminated
            assert info["is_success"] == (reward > -0.1)
            total, steps = total + reward, steps + 1
        said.append((tuple(obs), total))
        assert steps == 50
    assert said[0] == said[1]


def test_point_mass_can_be_solved() -> None:
    env = gymnasium.make("dppo/PointMass-v0")
    obs, _ = env.reset(seed=4)
    for _ in range(50):
        position, velocity, goal = obs[:2], obs[2:4], obs[4:]
        obs, _, _, _, info = env.step(np.clip(5 * (goal - position) - 2 * velocity, -1, 1))
    assert info["is_success"]


def test_counting_tells_its_step_and_rewards_the_action() -> None:
    env = gymnasium.make("dppo/Counting-v0", num_actions=3, terminate_after=3, truncate_after=3)
    assert env.reset(seed=0)[0] == 0
    assert [env.step(action)[:4] for action in (2, 0, 1)] == [
        (1, 2.0, False, False),
        (2, 0.0, False, False),
        (3, 1.0, True, True),
    ]
    assert env.reset(seed=0)[0] == 0


def test_counting_goes_on_where_no_end_is_given() -> None:
    env = gymnasium.make("dppo/Counting-v0")
    env.reset(seed=0)
    for step in range(1, 2000):
        obs, _, terminated, truncated, _ = env.step(0)
        assert (obs[0], terminated, truncated) == (step, False, False)


@pytest.mark.parametrize("kwargs", [{"num_actions": 0}, {"terminate_after": 0}, {"truncate_after": 0}])
def test_a_count_that_cannot_be_is_refused(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}=0"):
        gymnasium.make("dppo/Counting-v0", **kwargs)
