"""SlowCartPole: CartPole in everything but time."""

import math
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from dppo.envs.make import make_env
from dppo.envs.simulated import register

SLOW = "dppo/SlowCartPole-v0"
register()


class SleptFor:
    """Replacement of the `time` module that records sleeps; each reading of a clock takes `tick`."""

    def __init__(self, tick: float = 0.0) -> None:
        self.times: list[float] = []
        self.now = 0.0
        self._tick = tick

    def perf_counter(self) -> float:
        self.now += self._tick
        return self.now

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.times.append(seconds)


def rollout(env: gymnasium.Env[Any, Any], seed: int, steps: int = 60) -> list[tuple[Any, ...]]:
    """Return the results of fixed actions, with a reset to the same seed after each episode."""
    obs, _ = env.reset(seed=seed)
    results: list[tuple[Any, ...]] = [tuple(obs)]
    for action in np.random.default_rng(7).integers(0, 2, steps):
        obs, reward, terminated, truncated, _ = env.step(int(action))
        results.append((*obs, reward, terminated, truncated))
        if terminated or truncated:
            results.append(tuple(env.reset(seed=seed)[0]))

    return results


def test_slow_cartpole_differs_from_cartpole_in_time_only() -> None:
    slow = gymnasium.make(SLOW, step_s=1e-5, reset_s=1e-5)
    assert rollout(slow, seed=3) == rollout(gymnasium.make("CartPole-v1"), seed=3)
    assert slow.observation_space == gymnasium.make("CartPole-v1").observation_space
    assert slow.spec is not None
    assert slow.spec.max_episode_steps == 500


def test_resets_and_steps_take_their_time_dynamics_included(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = SleptFor(tick=0.002)
    monkeypatch.setattr("dppo.envs.simulated.time", slept)
    env = gymnasium.make(SLOW, step_s=0.01, reset_s=0.03)
    env.reset(seed=0)
    for _ in range(8):
        env.step(0)
    assert slept.times == pytest.approx([0.028] + [0.008] * 8)


def test_burning_uses_that_much_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleptFor(tick=0.001)
    monkeypatch.setattr("dppo.envs.simulated.time", clock)
    env = gymnasium.make(SLOW, step_s=0.01, burn=True)
    env.reset(seed=0)
    started = clock.now
    for _ in range(5):
        env.step(0)
    assert 0.05 <= clock.now - started < 0.06
    assert clock.times == []


def test_burning_is_counted_by_the_clock_of_the_thread() -> None:
    env = gymnasium.make(SLOW, step_s=0.01, burn=True)
    env.reset(seed=0)
    started = time.thread_time()
    env.step(0)
    assert time.thread_time() - started >= 0.01


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"step_s": -0.01}, r"step_s=-0.01: must be a finite number of seconds, of at least 0"),
        ({"step_s": math.nan}, r"step_s=nan"),
        ({"step_s": "fast"}, r"step_s='fast'"),
        ({"step_s": True}, r"step_s=True"),
        ({"reset_s": math.inf}, r"reset_s=inf"),
        ({"burn": "yes"}, r"burn='yes'"),
    ],
)
def test_an_invalid_time_is_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make(SLOW, **kwargs)


def test_the_environment_is_registered_when_it_is_first_created() -> None:
    program = """
import gymnasium, dppo.envs.simulated, dppo.envs.make as make
before = [name for name in gymnasium.registry if name.startswith("dppo/")]
for _ in range(2):
    make.make_env("dppo/SlowCartPole-v0", {"step_s": 0})
print(before, [name for name in gymnasium.registry if name.startswith("dppo/")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] ['dppo/SlowCartPole-v0']"
    assert make_env(SLOW, {"step_s": 0}).spec is not None
