"""`dppo` and examples/ppo_in_one_file.py compute the same weights up to rounding."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import dppo

EXAMPLE = Path(__file__).parents[1] / "examples" / "ppo_in_one_file.py"
TOLERANCE = 1e-10  # absolute and relative; float64 rounding shows as 1e-15
MOVED = 1e-3  # least change by training, and by each option: ten million times the tolerance


def _load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXAMPLE.stem] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


oracle = _load_example()


class Odd(gym.Env[Any, Any]):
    """Properties that CartPole and Pendulum lack.

    Observations are integers of shape [2, 2]. They exceed 10, where normalized ones are clipped, and so do rewards:
    one step in 200 brings a prize. Choices start at -1; actions often exceed the bounds of the Box. An episode may
    terminate and be truncated in the same step, and may last a single step.
    """

    def __init__(self, discrete: bool) -> None:
        self.observation_space = gym.spaces.Box(-60, 60, (2, 2), np.int32)
        low, high = np.array([[-0.5], [0.0]], np.float32), np.array([[0.1], [2.0]], np.float32)
        self.action_space = gym.spaces.Discrete(3, start=-1) if discrete else gym.spaces.Box(low, high)
        self._state, self._steps = np.zeros((2, 2)), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._state, self._steps = self.np_random.normal(size=(2, 2)) * 15, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._steps += 1
        self._state = self._state * 0.9 + 4 * np.asarray(action) + self.np_random.normal(size=(2, 2))
        luck, truncated = self.np_random.random(), self._steps >= 6
        reward = 1000.0 if luck < 0.005 else self._state.sum() / 2
        return self._observation(), float(reward), bool(luck < 0.2), truncated, {}

    def _observation(self) -> np.ndarray:
        return np.clip(np.rint(self._state), -60, 60).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def _environments_and_one_thread() -> Iterator[None]:
    ids = ("oracle/OddChoices-v0", "oracle/OddForces-v0", "oracle/ShortPendulum-v0")
    gym.register(ids[0], lambda **_: Odd(discrete=True))
    gym.register(ids[1], lambda **_: Odd(discrete=False))
    gym.register(ids[2], "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=17)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, several threads make networks this small ten times slower
    yield
    torch.set_num_threads(threads)
    for env_id in ids:
        del gym.registry[env_id]


# Three iterations of 3 samplers x 2 envs x 24 steps, in which episodes of every env end.
SIZES: dict[str, Any] = {
    "num_samplers": 3,
    "envs_per_sampler": 2,
    "num_steps": 24,
    "total_timesteps": 3 * 144,
    "learning_rate": 1e-3,
    "dtype": "float64",
}
ENVS = {"discrete": "CartPole-v1", "continuous": "oracle/ShortPendulum-v0"}
OPTIONS: dict[str, dict[str, Any]] = {
    "advantages": {"gamma": 0.8, "gae_lambda": 0.3, "norm_adv": False},
    "clipping": {"clip_coef": 0.01, "clip_vloss": True},
    "coefficients": {"ent_coef": 0.3, "vf_coef": 0.01},
    "early stop": {"target_kl": 1e-5},
    "normalized observations": {"norm_obs": True},
    "normalized rewards": {"norm_reward": True, "gamma": 0.9},
    "layers": {"hidden_sizes": (16, 24, 8), "activation": "relu"},
    "all at once": {
        "norm_obs": True,
        "norm_reward": True,
        "clip_vloss": True,
        "target_kl": 0.001,
        "minibatch_size": 50,
        "activation": "relu",
        "hidden_sizes": (32,),
        "anneal_lr": False,
    },
    # The other options do not depend on the kind of actions, so one kind is enough.
    "sizes": {"seed": 12345, "num_samplers": 2, "envs_per_sampler": 3, "num_steps": 31, "total_timesteps": 300},
    "one env": {"num_samplers": 1, "envs_per_sampler": 1, "num_steps": 144, "gae_lambda": 1.0},
    "optimizer": {"learning_rate": 3e-3, "anneal_lr": False, "max_grad_norm": 0.01},
    "epochs": {"update_epochs": 3, "minibatch_size": 31},
    "one minibatch": {"minibatch_size": 144},
    "linear": {"hidden_sizes": ()},
}
ONLY = {
    "sizes": "continuous",
    "one env": "discrete",
    "optimizer": "continuous",
    "epochs": "discrete",
    "one minibatch": "continuous",
    "linear": "discrete",
}
# These are tested with both kinds, with this one in the fast set.
FAST = {
    "advantages": "discrete",
    "clipping": "continuous",
    "coefficients": "discrete",
    "early stop": "continuous",
    "normalized observations": "continuous",
    "normalized rewards": "discrete",
    "layers": "continuous",
}
EVERYTHING_NORMALIZED = {"norm_obs": True, "norm_reward": True}


@cache
def expected(args: Any) -> tuple[np.ndarray, list[float]]:
    """Return weights and mean returns of the one file."""
    weights, returns = oracle.train(args)
    return weights, returns


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape != b.shape or bool(np.abs(a - b).max() > MOVED)


def trained(args: Any, run_dir: Path) -> tuple[np.ndarray, list[float]]:
    """Return weights and mean returns of `dppo`."""
    result = dppo.train(dppo.Config(**vars(args), num_actors=0, progress="off", run_dir=run_dir))
    returns = [row.get("charts/episodic_return", math.nan) for row in result.metrics]
    return dppo.load_policy(run_dir).weights, returns


def assert_same(args: Any, run_dir: Path) -> None:
    weights, returns = expected(args)
    untrained, _ = expected(dataclasses.replace(args, total_timesteps=0))
    assert differ(weights, untrained)
    assert not math.isnan(returns[-1]), "no episode ended: the test shows less than it should"
    ours, our_returns = trained(args, run_dir)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, weights, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(our_returns, returns, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("env", ENVS)
def test_weights_equal_those_of_one_file(env: str, tmp_path: Path) -> None:
    assert_same(oracle.Args(env_id=ENVS[env], **SIZES), tmp_path / "run")


@pytest.mark.parametrize(
    ("option", "env"),
    [
        pytest.param(option, env, marks=[] if FAST.get(option, env) == env else pytest.mark.slow)
        for option in OPTIONS
        for env in ENVS
        if ONLY.get(option, env) == env
    ],
)
def test_each_option_has_the_same_effect(option: str, env: str, tmp_path: Path) -> None:
    plain = oracle.Args(env_id=ENVS[env], **SIZES)
    args = dataclasses.replace(plain, **OPTIONS[option])
    for name in OPTIONS[option]:  # each option must have an effect, or equality would prove nothing
        without = dataclasses.replace(args, **{name: getattr(plain, name)})
        assert differ(expected(args)[0], expected(without)[0]), f"{name} has no effect here"
    assert_same(args, tmp_path / "run")


@pytest.mark.parametrize("normalized", [{}, EVERYTHING_NORMALIZED], ids=["raw", "normalized"])
@pytest.mark.parametrize("env_id", ["oracle/OddChoices-v0", "oracle/OddForces-v0"])
def test_odd_spaces_and_episodes_give_the_same_weights(
    env_id: str, normalized: dict[str, bool], tmp_path: Path
) -> None:
    assert_same(oracle.Args(env_id=env_id, **SIZES, **normalized), tmp_path / "run")


def test_pendulums_own_time_limit_falls_within_a_segment(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_steps": 72, "total_timesteps": 3 * 3 * 2 * 72, "minibatch_size": 64}
    assert_same(oracle.Args(env_id="Pendulum-v1", **sizes, **EVERYTHING_NORMALIZED), tmp_path / "run")


def test_every_option_is_varied() -> None:
    varied = {name for changes in OPTIONS.values() for name in changes} | {"env_id", "dtype"}
    assert varied == {field.name for field in dataclasses.fields(oracle.Args)}


def test_defaults_are_those_of_dppo() -> None:
    args = oracle.Args()
    config = dppo.Config(env_id=args.env_id)
    ours = {name: getattr(config, name) for name in vars(args)}
    assert vars(args) == ours


def test_the_one_file_imports_nothing_of_dppo() -> None:
    tree = ast.parse(EXAMPLE.read_text(encoding="utf8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    theirs = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert theirs == {"gymnasium", "numpy", "torch"}


def test_the_one_file_runs_as_written() -> None:
    command = [sys.executable, str(EXAMPLE), "--total-timesteps", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"global_step=2048 +episodic_return=(\S+) +approx_kl=\S+", last)
    assert found is not None, last
    assert float(found[1]) > 15  # a policy that chooses at random gets about 22
