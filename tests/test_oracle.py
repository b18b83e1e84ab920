"""`dppo` and examples/ppo_in_one_file.py compute the same weights up to rounding."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.wrappers import TransformReward
from worlds.episodic import Episodic

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


class Odd(Episodic):
    """Properties that CartPole and Pendulum lack.

    Observations are integers of shape [2, 2]. They exceed 10, where normalized ones are clipped, and so do rewards:
    one step in 200 brings a prize. Choices start at -1; actions often exceed the bounds of the Box. An episode may
    terminate and be truncated in the same step, and may last a single step.
    """

    observation_space = gym.spaces.Box(-60, 60, (2, 2), np.int32)

    def __init__(self, discrete: bool) -> None:
        low = np.array([[-0.5], [0.0]], np.float32)
        high = np.array([[0.1], [2.0]], np.float32)
        self.action_space: Any = gym.spaces.Box(low, high)
        if discrete:
            self.action_space = gym.spaces.Discrete(3, start=-1)

    def begin(self) -> None:
        self._state = self.np_random.normal(size=(2, 2)) * 15

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        noise = self.np_random.normal(size=(2, 2))
        self._state = self._state * 0.9 + 4 * np.asarray(action) + noise
        luck = self.np_random.random()
        reward = 1000.0 if luck < 0.005 else float(self._state.sum() / 2)
        terminated = bool(luck < 0.2)
        return self.observation(), reward, terminated, self.steps >= 6, {}

    def observation(self) -> np.ndarray:
        return np.clip(np.rint(self._state), -60, 60).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def _environments() -> Iterator[None]:
    worlds: dict[str, tuple[Any, int | None]] = {
        "OddChoices": (lambda **_: Odd(discrete=True), None),
        "OddForces": (lambda **_: Odd(discrete=False), None),
        "ShortPendulum": (PendulumEnv, 17),
        # before a pole can fall
        "ShortCartPole": (CartPoleEnv, 5),
        "NoRewards": (lambda **_: TransformReward(CartPoleEnv(), lambda _: 0.0), 5),
    }
    for name, (make, steps) in worlds.items():
        gym.register(f"oracle/{name}-v0", make, max_episode_steps=steps)
    yield
    for name in worlds:
        del gym.registry[f"oracle/{name}-v0"]


# Two iterations of 3 samplers x 2 envs x 24 steps, in which episodes of every env end.
SIZES: dict[str, Any] = {
    "num_samplers": 3,
    "envs_per_sampler": 2,
    "num_steps": 24,
    "total_timesteps": 2 * 144,
}
LONGER = {"total_timesteps": 3 * 144}
SIZES |= {"learning_rate": 1e-3, "dtype": "float64"}
FAST = {"update_epochs": 2, "minibatch_size": 36, "anneal_lr": True, "ent_coef": 0.01}
SIZES |= FAST | {"norm_obs": False, "norm_reward": False}
EVERYTHING_NORMALIZED = {"norm_obs": True, "norm_reward": True}
ENVS = {
    "discrete": "CartPole-v1",
    "continuous": "oracle/ShortPendulum-v0",
    "rewards are equal": "oracle/ShortCartPole-v0",
    "no rewards": "oracle/NoRewards-v0",
}
BOTH = ("discrete", "continuous")
# The kinds of actions that an option is tested with; the first one is in the fast set. Some do not depend on the kind.
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "none": (BOTH, {}),
    "advantages": (BOTH, {"gamma": 0.8, "gae_lambda": 0.3, "norm_adv": False, "update_epochs": 4}),
    "clipping": (BOTH[::-1], {"clip_coef": 0.01, "clip_vloss": True}),
    "coefficients": (BOTH, {"ent_coef": 0.3, "vf_coef": 0.01, "update_epochs": 4}),
    "early stop": (BOTH[::-1], {"target_kl": 1e-5}),
    "normalized observations": (BOTH[::-1], {"norm_obs": True}),
    "normalized rewards": (BOTH, {"norm_reward": True, "gamma": 0.9}),
    "floor of deviations": (
        ("no rewards", "rewards are equal"),
        LONGER | {"norm_reward": True, "adv_floor": 2.0},
    ),
    "layers": (BOTH[::-1], {"hidden_sizes": (16, 24, 8), "activation": "relu"}),
    "all at once": (
        BOTH,
        EVERYTHING_NORMALIZED
        | LONGER
        | {"clip_vloss": True, "target_kl": 0.001, "minibatch_size": 50, "activation": "relu"}
        | {"hidden_sizes": (32,), "anneal_lr": False, "update_epochs": 4},
    ),
    "sizes": (
        ("continuous",),
        {
            "seed": 12345,
            "num_samplers": 2,
            "envs_per_sampler": 3,
            "num_steps": 31,
            "total_timesteps": 400,
        },
    ),
    "one env": (
        ("discrete",),
        {"num_samplers": 1, "envs_per_sampler": 1, "num_steps": 144, "gae_lambda": 1.0},
    ),
    "optimizer": (
        ("continuous",),
        {"learning_rate": 3e-3, "anneal_lr": False, "max_grad_norm": 0.01},
    ),
    "epochs": (("discrete",), {"update_epochs": 3, "minibatch_size": 31}),
    "one minibatch": (("continuous",), {"minibatch_size": 144}),
    "linear": (("discrete",), {"hidden_sizes": ()}),
    "policy lag": (("discrete",), LONGER | {"policy_lag": 1}),
    # the scales of observations lag as well, those of rewards do not
    "policy lag of three": (
        ("continuous",),
        EVERYTHING_NORMALIZED | {"total_timesteps": 6 * 144, "policy_lag": 3},
    ),
}


@cache
def expected(args: Any) -> tuple[np.ndarray, list[float]]:
    """Return weights and mean returns of the one file."""
    weights, returns = oracle.train(args)
    return weights, returns


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape != b.shape or bool(np.abs(a - b).max() > MOVED)


def assert_close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same(args: Any, run_dir: Path) -> None:
    weights, returns = expected(args)
    untrained, _ = expected(dataclasses.replace(args, total_timesteps=0))
    assert differ(weights, untrained)
    assert not math.isnan(returns[-1]), "no episode ended: the test shows less than it should"

    # as the one file does, whatever the bounds are
    settings = vars(args) | {"action_bounds": "clip"}
    config = dppo.Config(**settings, num_actors=0, progress="off", run_dir=run_dir)
    result = dppo.train(config)
    our_returns = [row.get("charts/episodic_return", math.nan) for row in result.metrics]
    our_weights = dppo.load_policy(run_dir).weights
    assert our_weights.dtype == np.float64
    assert_close(our_weights, weights)
    assert_close(our_returns, returns)


@pytest.mark.parametrize(
    ("option", "env"),
    [
        pytest.param(option, env, marks=[] if env == envs[0] else pytest.mark.slow)
        for option, (envs, _) in OPTIONS.items()
        for env in envs
    ],
)
def test_each_option_has_the_same_effect(option: str, env: str, tmp_path: Path) -> None:
    plain = oracle.Args(env_id=ENVS[env], **SIZES)
    changes = OPTIONS[option][1]
    args = dataclasses.replace(plain, **changes)
    for name in changes:  # each option must have an effect, or equality would prove nothing
        without = dataclasses.replace(args, **{name: getattr(plain, name)})
        assert differ(expected(args)[0], expected(without)[0]), f"{name} has no effect here"
    assert_same(args, tmp_path / "run")


@pytest.mark.parametrize("normalized", [{}, EVERYTHING_NORMALIZED], ids=["raw", "normalized"])
@pytest.mark.parametrize("env_id", ["oracle/OddChoices-v0", "oracle/OddForces-v0"])
def test_odd_spaces_and_episodes_give_the_same_weights(
    env_id: str, normalized: Any, tmp_path: Path
) -> None:
    assert_same(oracle.Args(env_id=env_id, **SIZES | LONGER | normalized), tmp_path / "run")


def test_pendulums_own_time_limit_falls_within_a_segment(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_steps": 72, "total_timesteps": 3 * 3 * 2 * 72, "minibatch_size": 64}
    assert_same(
        oracle.Args(env_id="Pendulum-v1", **sizes | EVERYTHING_NORMALIZED), tmp_path / "run"
    )


def test_every_option_is_varied_and_defaults_are_those_of_dppo() -> None:
    varied = {"env_id", "dtype"}
    for _, changes in OPTIONS.values():
        varied |= changes.keys()
    args = oracle.Args()
    assert varied == set(vars(args))
    config = dppo.Config(env_id=args.env_id)
    ours = {name: getattr(config, name) for name in varied}
    without_reuse = {"ent_coef": config.ent_coef or 0.0}
    assert vars(args) == ours | without_reuse


def test_the_one_file_imports_nothing_of_dppo() -> None:
    assert not re.search(r"^\s*(import|from) dppo", EXAMPLE.read_text("utf8"), re.MULTILINE)


def test_the_one_file_runs_as_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--total-timesteps", "2048"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(r"global_step=2048 +episodic_return=(\S+) +approx_kl=\S+", last)
    assert match is not None, last
    assert float(match[1]) >= 8  # no episode of CartPole is shorter, whatever the policy
