"""The testbeds are correct except where they are meant to fail."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from testbeds import Counting, crashing_cartpole, drifting_cartpole, point_mass


def rollout(env: gymnasium.Env[Any, Any], seed: int, steps: int = 60) -> list[tuple[Any, ...]]:
    """Return the results of fixed actions, with a reset to the same seed after each episode."""
    obs, _ = env.reset(seed=seed)
    said: list[tuple[Any, ...]] = [tuple(obs)]
    for action in np.random.default_rng(7).integers(0, 2, steps):
        obs, reward, terminated, truncated, _ = env.step(int(action))
        said.append((*obs, reward, terminated, truncated))
        if terminated or truncated:
            said.append(tuple(env.reset(seed=seed)[0]))
    return said


# ---------------------------------------------------------------------------------------------- faulty


def test_a_step_raises_at_the_chosen_place_only() -> None:
    env = crashing_cartpole(at_episode=1, at_step=3)
    env.reset(seed=0)
    for _ in range(5):
        env.step(1)
    env.reset(seed=0)
    env.step(1)
    env.step(1)
    with pytest.raises(RuntimeError, match=r"failed in its step \(episode 1, step 3\)"):
        env.step(1)


def test_a_reset_raises_at_the_chosen_episode_only() -> None:
    env = crashing_cartpole(where="reset", at_episode=1)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="failed in its reset"):
        env.reset(seed=1)


def test_a_constructor_raises() -> None:
    with pytest.raises(RuntimeError, match=r"failed in its constructor$"):
        crashing_cartpole(where="constructor")


def test_with_a_marker_it_fails_once(tmp_path: Path) -> None:
    kwargs = {"at_step": 1, "marker": str(tmp_path / "failed")}
    first, second = crashing_cartpole(**kwargs), crashing_cartpole(**kwargs)
    first.reset(seed=0)
    with pytest.raises(RuntimeError):
        first.step(0)
    assert rollout(second, seed=0) == rollout(gymnasium.make("CartPole-v1"), seed=0)


PROGRAM = """
import sys, json, testbeds
env = testbeds.crashing_cartpole(**json.loads(sys.argv[1]))
env.reset(seed=0)
env.step(0)
"""


def start_in_own_process(**kwargs: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(kwargs)], cwd=Path(__file__).parent)


@pytest.mark.parametrize(
    ("how", "where", "exitcode"),
    [
        ("exit", "step", 13),
        ("exit", "constructor", 13),
        ("kill", "step", -signal.SIGKILL),
        ("kill", "reset", -signal.SIGKILL),
    ],
)
def test_it_ends_its_process(how: str, where: str, exitcode: int) -> None:
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
        ({"how": "melt"}, "how='melt': must be one of raise, interrupt, bare, exit, kill, hang"),
        ({"where": "close"}, "where='close'"),
        ({"at_step": 0}, "at_step=0"),
        ({"at_episode": -1}, "at_episode=-1"),
    ],
)
def test_an_invalid_failure_is_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        crashing_cartpole(**kwargs)


def test_a_drifting_simulator_does_not_replay() -> None:
    env = drifting_cartpole()
    first, second = rollout(env, seed=5), rollout(env, seed=5)
    assert first[0] == second[0]
    assert first[5] != second[5]
    assert env.spec is None  # nothing declares it


# ---------------------------------------------------------------------------------------------- small


def test_point_mass_is_deterministic_bounded_and_ends_at_its_time_limit() -> None:
    said = []
    for _ in range(2):
        env = point_mass()
        obs, _ = env.reset(seed=4)
        env.action_space.seed(4)
        total, truncated, steps = 0.0, False, 0
        while not truncated:
            obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
            assert env.observation_space.contains(obs)
            assert not terminated
            assert info["is_success"] == (float(reward) > -0.1)
            total, steps = total + float(reward), steps + 1
        said.append((tuple(obs), total))
        assert steps == 50
    assert said[0] == said[1]


def test_point_mass_can_be_solved() -> None:
    env = point_mass()
    obs, _ = env.reset(seed=4)
    for _ in range(50):
        position, velocity, goal = obs[:2], obs[2:4], obs[4:]
        obs, _, _, _, info = env.step(np.clip(5 * (goal - position) - 2 * velocity, -1, 1))
    assert info["is_success"]


def test_counting_returns_its_step_and_rewards_the_action() -> None:
    env = Counting(num_actions=3, terminate_after=3, truncate_after=3)
    assert env.reset(seed=0)[0] == 0
    assert [env.step(action)[:4] for action in (2, 0, 1)] == [
        (1, 2.0, False, False),
        (2, 0.0, False, False),
        (3, 1.0, True, True),
    ]
    assert env.reset(seed=0)[0] == 0


def test_counting_does_not_end_by_default() -> None:
    env = Counting()
    env.reset(seed=0)
    for step in range(1, 2000):
        obs, _, terminated, truncated, _ = env.step(0)
        assert (obs[0], terminated, truncated) == (step, False, False)


@pytest.mark.parametrize("kwargs", [{"num_actions": 0}, {"terminate_after": 0}, {"truncate_after": 0}])
def test_an_invalid_count_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}=0"):
        Counting(**kwargs)
