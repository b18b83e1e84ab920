"""Options of the algorithm in whole runs: each has an effect, statistics freeze, defaults follow from the task."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from matrix import EVERY_OPTION, sized
from recorder import Notes, Recorder

import dppo
from dppo.errors import ConfigError
from dppo.ppo.exchange.normalizer import no_statistics
from dppo.records.files import checkpoint as checkpoints
from dppo.records.run_lines import sizes_line
from dppo.run import building

OWN_MEMORY = {"model": "worlds.memory_models:Running", "sequence_length": 8}
ROWS = 4 * 40
ALL_OPTIONS = sized(EVERY_OPTION, 4)
SMALL: dict[str, Any] = {"num_samplers": 2, "num_steps": 32, "total_timesteps": 128, "progress": "off"}
TINY = SMALL | {"num_samplers": 1, "num_steps": 16, "total_timesteps": 64}
DISCRETE = {"env_id": "CartPole-v1"}
CONTINUOUS = {"env_id": "Pendulum-v1"}


def train(run_dir: Path, *, stop_after: int | None = None, **changes: Any) -> dppo.Result:
    config = make_config(ALL_OPTIONS | {"run_dir": run_dir} | changes)
    return dppo.train(config, observers=[Recorder(interrupt_at=stop_after)])


def normalizer(result: dppo.Result) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = checkpoints.load(result.checkpoint).arrays["normalizer"]
    return arrays


def assert_equal_arrays(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    return train(tmp_path_factory.mktemp("whole") / "run")


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
def test_every_option_has_an_effect(change: dict[str, Any], whole: dppo.Result, tmp_path: Path) -> None:
    assert train(tmp_path / "run", **change).weights_sha256 != whole.weights_sha256


def test_signs_and_scales_of_rewards_have_an_effect(tmp_path: Path) -> None:
    raw = CONTINUOUS | {"norm_reward": False, "clip_reward": None}
    changes: list[dict[str, Any]] = [{}, {"sign_reward": True}, {"scale_reward": 0.5}]
    runs = [train(tmp_path / str(number), **raw | change) for number, change in enumerate(changes)]
    assert len({run.weights_sha256 for run in runs}) == len(runs)


def test_statistics_stop_moving_after_so_many_steps(whole: dppo.Result, tmp_path: Path) -> None:
    frozen = normalizer(whole)
    assert float(frozen["obs.count"]) == float(frozen["returns.count"]) == 2 * ROWS
    assert_equal_arrays(frozen, normalizer(train(tmp_path / "two", stop_after=2)))
    moving = normalizer(train(tmp_path / "moving", freeze_norm_after=None))
    assert float(moving["obs.count"]) == 4 * ROWS


def test_a_branch_may_keep_its_statistics_and_has_its_own_learning_rate(whole: dppo.Result, tmp_path: Path) -> None:
    changes = {"run_dir": tmp_path / "new", "freeze_norm_after": 0, "learning_rate": 2e-4}
    config = make_config(ALL_OPTIONS | changes)
    branched = dppo.train(config, resume=whole.run_dir, branch=True, observers=[Recorder(interrupt_at=1)])
    assert_equal_arrays(normalizer(branched), normalizer(whole))
    rate = branched.metrics[0]["charts/learning_rate"]
    steps = round(math.log(rate / 2e-4) / math.log(1.5))
    assert rate == pytest.approx(2e-4 * 1.5**steps)
    with pytest.raises(ConfigError, match=r"freeze_norm_after=0: .* has no statistics to keep"):
        train(tmp_path / "run", freeze_norm_after=0)


@pytest.mark.parametrize("norm_adv", [False, True])
def test_value_normalization_alone_is_warned_of(norm_adv: bool, tmp_path: Path) -> None:
    with Notes() as notes:
        train(tmp_path / "run", stop_after=1, norm_adv=norm_adv)
    assert any("norm_value=True without norm_adv=True" in note for note in notes.texts) is not norm_adv


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
    assert len(dppo.evaluate(straight, episodes=2).returns) == 2
    all_leaves = train(tmp_path / "all", **PARTS | {"norm_obs_keys": ()})
    assert all_leaves.weights_sha256 != straight.weights_sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_obs": False, "norm_obs_keys": ("robot",)}, "has no effect: norm_obs=False normalizes nothing"),
        ({"obs_dtype": "float64", "norm_obs_keys": ("robot/arm/1",)}, "leaves out robot.arm.0, whose float64 numbers"),
        (DISCRETE | {"drop_obs": (), "norm_obs_keys": ("pole",)}, "leave `norm_obs_keys` out"),
    ],
    ids=["off", "float64", "no names"],
)
def test_parts_that_cannot_be_normalized_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "run", **PARTS | changes)


# ------------------------------------------------------------------ defaults that follow from the task


@pytest.mark.parametrize(
    ("changes", "epochs"),
    [
        (DISCRETE, 20),
        (DISCRETE | {"update_epochs": 3}, 3),
        (DISCRETE | {"reuse": 2}, 10),
        (DISCRETE | {"memory": "gru"}, 10),
        (DISCRETE | OWN_MEMORY, 10),
        (DISCRETE | {"overlap": True}, 10),
        (CONTINUOUS, 10),
    ],
)
def test_the_number_of_epochs_follows_from_the_actions(
    changes: dict[str, Any], epochs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dppo")
    config = make_config(SMALL | changes | {"run_dir": tmp_path / "run"})
    result = dppo.train(config)
    assert [row["losses/minibatches"] for row in result.metrics] == [epochs, epochs * config.reuse]
    line = "Epochs: 20, because actions are discrete; update_epochs=10 (--update-epochs 10)"
    assert (line in caplog.text) == (epochs == 20)
    assert ("Entropy: a bonus of 0.01" in caplog.text) == (config.reuse > 1)  # with discrete actions
    assert f"for {epochs} epochs" in sizes_line(config) or ", or 20 if actions are discrete" in sizes_line(config)


def test_the_limit_of_the_kl_grows_with_the_square_of_the_clipping_range() -> None:
    configs = [make_config(TINY | DISCRETE | {"reuse": reuse}) for reuse in (1, 3, 4)]
    assert [config.largest_kl_for(real=True) for config in configs] == [0.04, 0.01, 0.0064]
    assert configs[-1].largest_kl_for(real=False) == 0


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 0),
        ({"memory": "gru"}, 0),
        ({"reuse": 4}, 0),
        ({"reuse": 4, "memory": "gru"}, 0.0064),
        ({"reuse": 4, **OWN_MEMORY}, 0.0064),
    ],
)
def test_reuse_with_memory_has_a_limit_of_the_kl_whatever_the_actions(
    changes: dict[str, Any], limit: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dppo")
    config = make_config(TINY | DISCRETE | changes | {"run_dir": tmp_path / "run"})
    dppo.train(config)
    assert config.largest_kl_for(real=False) == limit
    assert ("too far (KL above 0.0064) ends early; target_kl=0.0" in caplog.text) == (limit > 0)


def test_discrete_actions_have_a_bonus_of_entropy_with_reuse_unless_there_is_memory_or_another_is_set() -> None:
    changes: list[dict[str, Any]] = [{}, {"memory": "gru"}, OWN_MEMORY, {"ent_coef": 0.0}, {"ent_coef": 0.3}]
    configs = [make_config(DISCRETE | {"reuse": 2} | change) for change in changes]
    assert [config.entropy_weight_for(discrete=True) for config in configs] == [0.01, 0, 0, 0, 0.3]
    assert [config.entropy_weight_for(discrete=False) for config in configs] == [0, 0, 0, 0, 0.3]
    assert make_config(DISCRETE).entropy_weight_for(discrete=True) == 0


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        (CONTINUOUS, True),
        (CONTINUOUS | {"target_kl": 0.0}, False),
        (CONTINUOUS | {"desired_kl": 0.5}, False),
        (CONTINUOUS | {"update_epochs": 1}, True),  # one epoch is planned: there is nothing to log
        (CONTINUOUS | {"reuse": 2}, True),
        (DISCRETE | {"update_epochs": 10}, False),
        (DISCRETE | {"update_epochs": 10, "target_kl": 0.04}, True),
    ],
)
def test_an_update_of_continuous_actions_ends_at_a_large_kl(
    changes: dict[str, Any], ends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of this size change any policy by more than 0.04 within an epoch."""
    sizes = SMALL | {"num_steps": 64, "total_timesteps": 256, "learning_rate": 0.05}
    caplog.set_level("INFO", logger="dppo")
    result = dppo.train(make_config(sizes | {"run_dir": tmp_path / "run"} | changes))
    assert (result.metrics[0]["losses/minibatches"] < 20) == ends
    assert ("too far (KL above 0.04) ends early" in caplog.text) == (changes == CONTINUOUS)


@pytest.mark.parametrize(
    ("changes", "standardized"),
    [
        (CONTINUOUS, False),
        (CONTINUOUS | {"norm_adv": True}, True),
        (CONTINUOUS | {"norm_reward": False}, True),  # advantages have no unit
        (CONTINUOUS | {"norm_value": True}, True),
        (CONTINUOUS | {"reuse": 2}, False),
        (DISCRETE, True),
    ],
)
def test_advantages_of_continuous_actions_keep_their_unit(
    changes: dict[str, Any], standardized: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dppo")
    default = dppo.train(make_config(SMALL | {"run_dir": tmp_path / "default"} | changes))
    explicit = changes | {"norm_adv": standardized}
    chosen = dppo.train(make_config(SMALL | {"run_dir": tmp_path / "chosen"} | explicit))
    assert default.weights_sha256 == chosen.weights_sha256
    assert ("Advantages: not standardized" in caplog.text) is not standardized


def test_statistics_that_an_environment_does_not_have_cannot_be_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That images are not normalized shows when the environment is known."""
    images: dict[str, Any] = {"env_id": "worlds.observed:Picture", "norm_reward": False, "freeze_norm_after": 10}
    config = make_config(TINY | images | {"num_steps": 8, "total_timesteps": 8, "run_dir": tmp_path / "run"})
    with pytest.raises(ConfigError, match="freeze_norm_after=10 has no effect: norm_reward is off, and no observ"):
        dppo.train(config)
    nothing = partial(no_statistics, obs=False, returns=False)
    monkeypatch.setattr(building, "_no_statistics", lambda config, spaces, resumed: nothing(spaces))
    dppo.train(config)  # as an earlier version did
    monkeypatch.undo()
    dppo.train(config, resume=tmp_path / "run")
