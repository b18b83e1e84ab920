"""Measure the cost of checking what environments return, as a share of a CartPole segment.

    python benchmarks/checks.py

Each check is timed against the least that would do without it: a copy of the observation, a reward and flags taken as
they are, no look at the segment. CPU time, and the best of many on both sides. The bar is 1 %.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.config import Config
from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.checks.returned import MAX_REWARD, reward_of
from dppo.envs.spaces import describe_spaces
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.numerics.arithmetic import limit_blas
from dppo.ppo.acting.sampler import collect_together
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.networks.choice import choose_network

BAR = 0.01
EPISODE = 22  # steps of an episode under a random policy: the shortest there are
SAMPLERS, STEPS = 8, 128


def main() -> int:
    """Print the time of each check per env step, and their share of a segment; return 0 if the bar is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--segments", type=int, default=60, help="segments of each sampler to measure"
    )
    flags = parser.parse_args()
    step_us, parts = time_of_a_step(flags.segments), times_of_checks()
    for name, microseconds in parts.items():
        print(f"{name:<24} {microseconds:7.3f} us per env step")
    share = sum(parts.values()) / step_us
    print(
        f"{'segment':<24} {step_us:7.3f} us per env step, {SAMPLERS} samplers x {STEPS} steps acting together"
    )
    print(
        f"checks: {share:.2%} of a segment: {'pass' if share <= BAR else 'FAIL'} (bar: {BAR:.0%})"
    )
    return 0 if share <= BAR else 1


def time_of_a_step(segments: int) -> float:
    """Return the microseconds of an env step of a segment, with all checks, the best of many."""
    config = Config(env_id="CartPole-v1", num_samplers=SAMPLERS, num_steps=STEPS)
    limit_blas(1)
    built = [build_sampler(sampler_plan(config), sampler) for sampler in range(SAMPLERS)]
    spec = choose_network(config.network, built[0].spaces).spec
    weights = (
        np.random.default_rng(0).normal(size=spec.num_parameters, scale=0.05).astype(spec.dtype)
    )
    seconds = []
    for index in range(segments):
        requests = [SegmentRequest(sampler, index) for sampler in range(SAMPLERS)]
        began = time.process_time()
        collect_together([one.sampler for one in built], requests, PolicySnapshot(index, weights))
        seconds.append(time.process_time() - began)
    return 1e6 * min(seconds) / (SAMPLERS * STEPS)


def times_of_checks() -> dict[str, float]:
    """Return the microseconds per env step of each check, beyond what is needed without it."""
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    reward, checks = 1.0, SpaceChecks([env], describe_spaces(env), "benchmark")
    segment = np.zeros((STEPS + 1, 1, 4), np.float32)
    return {
        "form of the observation": microseconds(lambda: checks.pack(obs))
        - microseconds(lambda: np.array(obs)),
        "reward": microseconds(lambda: _reward(reward)) - microseconds(lambda: _converted(reward)),
        "flags": microseconds(lambda: _flags(False, False))
        - microseconds(lambda: _nothing(False, False)),
        "limits, once a segment": microseconds(lambda: checks.check_limits(segment)) / STEPS,
        "spaces, once an episode": microseconds(lambda: checks.change(0, env)) / EPISODE,
    }


def _reward(reward: Any) -> Any:
    if type(reward) is not float or not abs(reward) <= MAX_REWARD:
        reward = reward_of(reward)
    return reward


def _converted(reward: Any) -> float:
    return float(reward)


def _flags(terminated: Any, truncated: Any) -> bool:
    return (terminated is not False or truncated is not False) and not (
        type(terminated) is bool and type(truncated) is bool
    )


def _nothing(terminated: Any, truncated: Any) -> bool:
    return False


def microseconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call, the best of many."""
    number = 20_000
    return (
        1e6 * min(timeit.repeat(call, timer=time.process_time, number=number, repeat=15)) / number
    )


if __name__ == "__main__":
    raise SystemExit(main())
