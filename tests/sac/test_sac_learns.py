"""Soft actor-critic learns; see tests/test_learning.py on the bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import dppo


@pytest.mark.slow
def test_pendulum_swings_up_in_15_000_env_steps(tmp_path: Path) -> None:
    """PPO needs five times as many. The best controllers reach about -150."""
    config = dppo.Config(
        algo="sac",
        env_id="Pendulum-v1",
        total_timesteps=15_000,
        run_dir=tmp_path / "run",
        progress="off",
    )
    result = dppo.train(config)
    assert dppo.evaluate(result, episodes=20).mean_return >= -250
