"""Every environment of Gymnasium's registry that can be made here trains for two small iterations."""

from __future__ import annotations

import warnings
from pathlib import Path

import gymnasium as gym
import pytest

import dppo

# wrap another environment, which they have to be given
SHIMS = ("GymV21Environment", "GymV26Environment")


def newest() -> list[str]:
    """Return the newest version of every environment in the registry."""
    specs: dict[str, gym.envs.registration.EnvSpec] = {}
    for spec in gym.registry.values():
        name = spec.id.rpartition("-v")[0]
        if name not in SHIMS and (
            name not in specs or (specs[name].version or 0) < (spec.version or 0)
        ):
            specs[name] = spec

    return sorted(spec.id for spec in specs.values() if spec.namespace != "dppo")


def cost(env_id: str) -> pytest.MarkDecorator | tuple[()]:
    """Mark environments of a large simulator."""
    return pytest.mark.slow if "mujoco" in str(gym.spec(env_id).entry_point) else ()


@pytest.mark.parametrize(
    "env_id", [pytest.param(env_id, marks=cost(env_id)) for env_id in newest()]
)
def test_it_trains(env_id: str, tmp_path: Path) -> None:
    try:
        with warnings.catch_warnings():
            # Box2D warns while it is imported, and crashes where that is an error
            warnings.simplefilter("ignore")
            gym.make(env_id).close()
    except (gym.error.DependencyNotInstalled, ImportError) as missing:
        pytest.skip(f"{missing}")

    config = dppo.Config(
        env_id=env_id, num_samplers=1, num_steps=8, total_timesteps=16, update_epochs=1, minibatch_size=8,
        run_dir=tmp_path / "run", progress="off",
    )  # fmt: skip
    result = dppo.train(config)
    assert result.iterations == 2

    policy = dppo.load_policy(result.run_dir)
    env = gym.make(env_id)
    obs, _ = env.reset(seed=1)
    assert env.action_space.contains(policy.act(obs))

    env.close()
