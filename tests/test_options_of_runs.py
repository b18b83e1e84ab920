"""Options of the algorithm in whole runs: each has an effect, statistics freeze, defaults follow from the task."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config, tiny_run
from matrix import EVERY_OPTION, sized
from recorder import Notes, Recorder

import dppo
from dppo.config import Config, read_settings
from dppo.config.resolve import resolve
from dppo.errors import ConfigError
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.records.files import checkpoint as checkpoints
from dppo.run import building

ROWS = 4 * 40
ALL_OPTIONS = sized(EVERY_OPTION, 4)
CONTINUOUS: dict[str, Any] = {"env_id": "Pendulum-v1"}


def train(run_dir: Path, *, stop_after: int | None = None, **changes: Any) -> dppo.Result:
    config = make_config(ALL_OPTIONS | {"run_dir": run_dir} | changes)
    return dppo.train(config, observers=[Recorder(interrupt_at=stop_after)])


def normalizer(result: dppo.Result) -> dict[str, np.ndarray]:
    checkpoint = checkpoints.load(result.checkpoint)
    arrays: dict[str, np.ndarray] = checkpoint.arrays["normalizer"]
    return arrays


def assert_equal_arrays(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    return train(tmp_path_factory.mktemp("whole") / "run")


def test_outputs_of_a_policy_have_values_in_units_of_rewards(whole: dppo.Result) -> None:
    policy = pickle.loads(pickle.dumps(dppo.load_policy(whole)))
    obs = np.zeros((3, *policy.spaces.obs.shape), np.float32)
    agent = PPOAgent(policy.spec)
    agent.load(PolicySnapshot(0, policy.weights, policy.obs_scale))
    row = whole.metrics[-1]
    standardized = agent.outputs(obs).values
    expected = standardized * row["losses/value_std"] + row["losses/value_mean"]
    np.testing.assert_allclose(policy.outputs(obs).values, expected, rtol=1e-5)
    assert np.abs(expected - standardized).min() > 1e-3
    del policy.state["config"]
    np.testing.assert_allclose(policy.outputs(obs).values, expected, rtol=1e-5)
    policy.state["config"] = {"algo": "sac"}  # whose network has no meaningful values
    assert np.isnan(policy.outputs(obs).values).all()


@pytest.mark.parametrize(
    "change",
    [
        {"desired_kl": None},
        {"freeze_norm_after": None},
        {"anneal_clip": False},
        {"anneal_ent": False},
        {"recompute_advantages": False},
        {"norm_value": False},
    ],
    ids=str,
)
def test_every_option_has_an_effect(
    change: dict[str, Any], whole: dppo.Result, tmp_path: Path
) -> None:
    changed = train(tmp_path / "run", **change)
    assert changed.weights_sha256 != whole.weights_sha256


def test_signs_and_scales_of_rewards_have_an_effect(tmp_path: Path) -> None:
    raw = CONTINUOUS | {"norm_reward": False, "clip_reward": None}
    changes: list[dict[str, Any]] = [
        {},
        {"sign_reward": True},
        # half as large
        {"scale_reward": 0.5},
    ]
    weights = set()
    for number, change in enumerate(changes):
        run = train(tmp_path / str(number), **raw | change)
        weights.add(run.weights_sha256)
    assert len(weights) == len(changes)


def test_statistics_stop_moving_after_so_many_steps(whole: dppo.Result, tmp_path: Path) -> None:
    frozen = normalizer(whole)
    assert frozen["obs.count"] == 2 * ROWS
    assert frozen["returns.count"] == 2 * ROWS
    stopped = train(tmp_path / "two", stop_after=2)
    assert_equal_arrays(frozen, normalizer(stopped))
    moving = train(tmp_path / "moving", freeze_norm_after=None)
    assert normalizer(moving)["obs.count"] == 4 * ROWS


def test_a_branch_may_keep_its_statistics_and_has_its_own_learning_rate(
    whole: dppo.Result, tmp_path: Path
) -> None:
    changes = {"run_dir": tmp_path / "new", "freeze_norm_after": 0, "learning_rate": 2e-4}
    config = make_config(ALL_OPTIONS | changes)
    branched = dppo.train(
        config, resume=whole.run_dir, branch=True, observers=[Recorder(interrupt_at=1)]
    )
    assert_equal_arrays(normalizer(branched), normalizer(whole))
    rate = branched.metrics[0]["charts/learning_rate"]
    factor = rate / 2e-4
    steps = round(math.log(factor) / math.log(1.5))
    assert rate == pytest.approx(2e-4 * 1.5**steps)


@pytest.mark.parametrize("norm_adv", [False, True])
def test_value_normalization_alone_is_warned_of(norm_adv: bool, tmp_path: Path) -> None:
    with Notes() as notes:
        train(tmp_path / "run", stop_after=1, norm_adv=norm_adv)
    warned = [note for note in notes.texts if "norm_value=True without norm_adv=True" in note]
    assert bool(warned) is not norm_adv


PARTS: dict[str, Any] = {
    "env_id": "worlds.observed:Everything",
    "drop_obs": ("mission", "robot.note", "camera"),
    "norm_obs_keys": ("robot",),
    "norm_value": False,
    "num_samplers": 2,
    "num_steps": 20,
    "total_timesteps": 40 * 3,
    "freeze_norm_after": 80,
}


def test_a_part_of_the_observations_may_be_normalized(tmp_path: Path) -> None:
    straight = train(tmp_path / "whole", **PARTS)
    assert normalizer(straight)["obs.mean"].shape == (3,)  # robot.arm has two components and one
    policy = dppo.load_policy(straight.run_dir)
    assert policy.spaces.normalized == ("robot.arm.0", "robot.arm.1")
    evaluated = dppo.evaluate(straight, episodes=2)
    assert len(evaluated.returns) == 2
    every_leaf = PARTS | {"norm_obs_keys": ()}
    all_leaves = train(tmp_path / "all", **every_leaf)
    assert all_leaves.weights_sha256 != straight.weights_sha256


# ------------------------------------------------------------------ defaults that follow from the task


@pytest.mark.parametrize("task", [{}, CONTINUOUS], ids=str)
def test_defaults_of_the_task_are_used_and_recorded(
    task: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"samplers": 2, "steps": 32, "iterations": 2, "update_epochs": None}
    config = tiny_run(tmp_path / "open", **sizes | task)
    resolved, choices = resolve(config, action_dims=int(task == CONTINUOUS))
    with caplog.at_level("INFO", logger="dppo"):
        run = dppo.train(config)
    chosen = ("Epochs:", "Updates:", "Advantages:")
    logged = [line for line in caplog.messages if line.startswith(chosen)]
    assert logged == [choice.line for choice in choices if choice.line]

    explicit = dppo.train(replace(resolved, run_dir=tmp_path / "explicit"))
    assert explicit.weights_sha256 == run.weights_sha256

    path = tmp_path / "open" / "config.yaml"
    written = path.read_text(encoding="utf8")
    for choice in choices:
        assert f"#   {choice.setting}: {json.dumps(choice.value)}" in written

    copied = Config(**read_settings(path))
    assert copied.update_epochs is None, "the setting is still open in a copy of the file"


@pytest.mark.parametrize(("changes", "ends"), [({}, True), ({"target_kl": 0.0}, False)])
def test_an_update_of_continuous_actions_ends_at_a_large_kl(
    changes: dict[str, Any], ends: bool, tmp_path: Path
) -> None:
    """Steps of this size change any policy by more than 0.04 within an epoch."""
    settings = CONTINUOUS | {"learning_rate": 0.05, "update_epochs": None}
    config = tiny_run(tmp_path / "run", samplers=2, steps=64, iterations=1, **settings | changes)
    result = dppo.train(config)
    minibatches = result.metrics[0]["losses/minibatches"]
    assert (minibatches < 20) == ends


def test_statistics_that_an_environment_does_not_have_cannot_be_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That images are not normalized shows when the environment is known."""
    images: dict[str, Any] = {
        "env_id": "worlds.observed:Picture",
        "norm_reward": False,
        "freeze_norm_after": 10,
    }
    config = tiny_run(tmp_path / "run", steps=8, iterations=1, **images)
    with pytest.raises(
        ConfigError, match="freeze_norm_after=10 has no effect: norm_reward is off, and no observ"
    ):
        dppo.train(config)

    nothing = partial(no_statistics, obs=False, returns=False)
    monkeypatch.setattr(building, "_no_statistics", lambda config, spaces, resumed: nothing(spaces))
    dppo.train(config)  # as an earlier version did
    monkeypatch.undo()
    dppo.train(config, resume=tmp_path / "run")
