"""Presets learn. benchmarks/learning.py measures returns over many seeds; these are the bounds for every change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dppo
from dppo.config import make_config, presets


def trained(env_id: str, run_dir: Path, **changes: Any) -> tuple[dppo.Result, float]:
    """Return the result with the preset of `env_id`, and the mean return of 20 episodes of its deterministic policy."""
    config = make_config(presets()[env_id] | {"env_id": env_id, "run_dir": run_dir, "progress": "off"} | changes)
    result = dppo.train(config)
    return result, dppo.evaluate(result, episodes=20).mean_return


def test_cartpole_is_halfway_there_after_a_third_of_the_steps(tmp_path: Path) -> None:
    """A random policy balances for 22 steps; the preset is at some 250 by then, on every seed tried."""
    result, _ = trained("CartPole-v1", tmp_path / "run", total_timesteps=35_000)
    assert result.episodic_return > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_with_its_preset(seed: int, tmp_path: Path) -> None:
    assert trained("CartPole-v1", tmp_path / "run", seed=seed)[1] >= 475


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_swings_up_with_its_preset(seed: int, tmp_path: Path) -> None:
    assert trained("Pendulum-v1", tmp_path / "run", seed=seed)[1] >= -250  # single seeds; -200 is for their mean
