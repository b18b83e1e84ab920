"""Presets learn. benchmarks/learning.py measures returns over many seeds; these are the bounds for every change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dppo
from dppo.config import make_config, presets


def trained(env_id: str, run_dir: Path, **changes: Any) -> dppo.Result:
    """Return the result of a run with the preset of `env_id`."""
    config = make_config(presets()[env_id] | {"env_id": env_id, "run_dir": run_dir, "progress": "off"} | changes)
    return dppo.train(config)


def evaluated(result: dppo.Result) -> float:
    """Return the mean return of 20 episodes of the deterministic policy."""
    return dppo.evaluate(result, episodes=20).mean_return


def test_cartpole_improves_within_a_seventh_of_the_steps(tmp_path: Path) -> None:
    """A random policy balances for 22 steps; seeds 1, 2 and 3 with the preset reach 112 to 127."""
    assert trained("CartPole-v1", tmp_path / "run", total_timesteps=14_000).episodic_return > 60


@pytest.mark.slow
def test_cartpole_is_half_solved_after_a_third_of_the_steps(tmp_path: Path) -> None:
    """About 250 on every seed tried."""
    assert trained("CartPole-v1", tmp_path / "run", total_timesteps=35_000).episodic_return > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_with_its_preset(seed: int, tmp_path: Path) -> None:
    assert evaluated(trained("CartPole-v1", tmp_path / "run", seed=seed)) >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_swings_up_with_its_preset(seed: int, tmp_path: Path) -> None:
    """-200 is the bound for the mean over seeds; single ones may be lower."""
    assert evaluated(trained("Pendulum-v1", tmp_path / "run", seed=seed)) >= -250
