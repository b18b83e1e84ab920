"""Options of the algorithm in whole runs: resume is exact, actors and learners change nothing, statistics freeze."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from recorder import Notes, Recorder

import dppo
from dppo.errors import ConfigError
from dppo.ppo.exchange.normalizer import no_statistics
from dppo.records.files import checkpoint as checkpoints
from dppo.records.words import sizes_line
from dppo.run import building

OWN_MEMORY = {"model": "worlds.memory_models:Running", "sequence_length": 8}
ITERATIONS = 4
ROWS = 4 * 40
EVERYTHING: dict[str, Any] = {
    "env_id": "CartPole-v1", "num_samplers": 4, "num_steps": 40, "total_timesteps": ROWS * ITERATIONS,
    "update_epochs": 3, "learning_rate": 1e-3, "anneal_lr": False, "desired_kl": 0.001, "anneal_clip": True,
    "anneal_ent": True, "ent_coef": 0.01, "recompute_advantages": True, "norm_obs": True, "norm_reward": True,
    "norm_value": True, "freeze_norm_after": 2 * ROWS, "clip_reward": 0.7, "progress": "off",
}  # fmt: skip


def train(run_dir: Path, *, resume: Path | None = None, stop_after: int | None = None, **changes: Any) -> dppo.Result:
    config = make_config(EVERYTHING | {"run_dir": run_dir} | changes)
    return dppo.train(config, resume=resume, observers=[Recorder(interrupt_at=stop_after)])


def normalizer(result: dppo.Result) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = checkpoints.load(result.checkpoint).arrays["normalizer"]
    return arrays


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    """A run that nothing interrupted."""
    return train(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_with_every_option_is_the_run_that_was_not_interrupted(
    stop_after: int, whole: dppo.Result, tmp_path: Path
) -> None:
    half = train(tmp_path / "run", stop_after=stop_after)
    assert half.iterations == stop_after
    rates = [row["charts/learning_rate"] for row in half.metrics]  # read now: the file goes on
    resumed = train(tmp_path / "run", resume=tmp_path / "run")
    assert resumed.weights_sha256 == whole.weights_sha256 != half.weights_sha256
    rates += [row["charts/learning_rate"] for row in resumed.metrics]
    assert rates == [row["charts/learning_rate"] for row in whole.metrics]
    assert len(set(rates)) > 1


def test_a_resumed_run_with_values_in_their_own_unit_continues_the_segment_in_flight(tmp_path: Path) -> None:
    """With `overlap`, the policy in flight has the unit of an earlier update."""
    options: dict[str, Any] = {"overlap": True, "norm_reward": False, "freeze_norm_after": None, "scale_reward": 100.0}
    options |= {"clip_reward": None}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "half", stop_after=2, **options)
    resumed = train(tmp_path / "half", resume=tmp_path / "half", **options)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert whole.metrics[-1]["losses/value_mean"] > 100


def test_every_option_has_an_effect(whole: dppo.Result, tmp_path: Path) -> None:
    off: dict[str, Any] = {"desired_kl": None, "freeze_norm_after": None}
    off |= dict.fromkeys(("anneal_clip", "anneal_ent", "recompute_advantages", "norm_value"), False)
    changes: list[dict[str, Any]] = [{name: value} for name, value in off.items()]
    raw = {"norm_reward": False, "clip_reward": None}  # the scale of rewards that are all one is normalized away
    changes += [raw | {"sign_reward": True}, raw | {"scale_reward": 0.5}]
    weights = [train(tmp_path / str(n), **one).weights_sha256 for n, one in enumerate(changes)]
    assert len({whole.weights_sha256, *weights}) == len(weights) + 1


@pytest.mark.parametrize("num_learners", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_option_trains_on_ray(num_learners: int, whole: dppo.Result, ray_session: None, tmp_path: Path) -> None:
    result = train(tmp_path / "run", num_actors=2, num_learners=num_learners, cpus_per_actor=0.25)
    frozen, expected = normalizer(result), normalizer(whole)
    assert float(frozen["obs.count"]) == 2 * ROWS
    if num_learners == 0:
        assert result.weights_sha256 == whole.weights_sha256
        for name, array in expected.items():
            np.testing.assert_array_equal(frozen[name], array)
    else:  # other minibatches, but as many steps and the same statistics
        assert math.isfinite(result.metrics[-1]["losses/policy_loss"])


def test_statistics_stop_moving_after_so_many_steps(whole: dppo.Result, tmp_path: Path) -> None:
    frozen, at_two = normalizer(whole), normalizer(train(tmp_path / "two", stop_after=2))
    assert float(frozen["obs.count"]) == float(frozen["returns.count"]) == 2 * ROWS
    for name, array in at_two.items():
        np.testing.assert_array_equal(frozen[name], array)
    moving = normalizer(train(tmp_path / "moving", freeze_norm_after=None))
    assert float(moving["obs.count"]) == 4 * ROWS


def test_a_branch_may_keep_its_statistics_and_has_its_own_learning_rate(whole: dppo.Result, tmp_path: Path) -> None:
    config = make_config(EVERYTHING | {"run_dir": tmp_path / "new", "freeze_norm_after": 0, "learning_rate": 2e-4})
    branched = dppo.train(config, resume=whole.run_dir, branch=True, observers=[Recorder(interrupt_at=1)])
    for name, array in normalizer(whole).items():
        np.testing.assert_array_equal(normalizer(branched)[name], array)
    rate = branched.metrics[0]["charts/learning_rate"]
    assert rate == pytest.approx(2e-4 * 1.5 ** round(math.log(rate / 2e-4) / math.log(1.5)))
    with pytest.raises(ConfigError, match=r"freeze_norm_after=0: .* has no statistics to keep"):
        train(tmp_path / "run", freeze_norm_after=0)


@pytest.mark.slow
def test_dropped_episodes_are_the_same_with_actors(ray_session: None, tmp_path: Path) -> None:
    world = {"reward": None, "episodes": [1, 2, 5], "length": 30, "at_step": 17}
    dropping: dict[str, Any] = {"env_id": "worlds.faulty:Faulty", "env_kwargs": world, "on_env_fault": "rebuild"}
    dropping |= {"env_faults": "unlimited"}
    dropping |= {"num_samplers": 4, "num_steps": 40, "total_timesteps": 6 * ROWS, "recompute_advantages": True}
    here, there = (
        dppo.train(make_config(dropping | {"run_dir": tmp_path / str(n), "num_actors": n, "progress": "off"}))
        for n in (0, 2)
    )
    assert (there.weights_sha256, there.global_step) == (here.weights_sha256, here.global_step)
    assert here.incidents["bad_step"] == there.incidents["bad_step"] > 0
    assert here.env_faults == there.env_faults


@pytest.mark.parametrize("norm_adv", [False, True])
def test_value_normalization_alone_is_warned_of(norm_adv: bool, tmp_path: Path) -> None:
    with Notes() as notes:
        train(tmp_path / "run", stop_after=1, norm_adv=norm_adv)
    assert any("norm_value=True without norm_adv=True" in note for note in notes.texts) is not norm_adv


PARTS: dict[str, Any] = {
    "env_id": "worlds.observed:Everything", "drop_obs": ("mission", "robot.note", "camera"),
    "norm_obs_keys": ("robot",), "norm_value": False, "num_samplers": 2, "num_steps": 20, "total_timesteps": 40 * 3,
    "freeze_norm_after": 80,
}  # fmt: skip


def test_a_part_of_the_observations_may_be_normalized(tmp_path: Path) -> None:
    straight = train(tmp_path / "whole", **PARTS)
    assert normalizer(straight)["obs.mean"].shape == (3,)  # robot.arm holds two numbers and one
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
        ({"env_id": "CartPole-v1", "drop_obs": (), "norm_obs_keys": ("pole",)}, "leave `norm_obs_keys` out"),
    ],
    ids=["off", "float64", "no names"],
)
def test_parts_that_cannot_be_normalized_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "run", **PARTS | changes)


@pytest.mark.parametrize(
    ("env_id", "changes", "epochs"),
    [
        ("CartPole-v1", {}, 20),
        ("CartPole-v1", {"update_epochs": 3}, 3),
        ("CartPole-v1", {"reuse": 2}, 10),
        ("CartPole-v1", {"memory": "gru"}, 10),
        ("CartPole-v1", OWN_MEMORY, 10),
        ("CartPole-v1", {"overlap": True}, 10),
        ("Pendulum-v1", {}, 10),
    ],
)
def test_the_number_of_epochs_follows_from_the_actions(
    env_id: str, changes: dict[str, Any], epochs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"env_id": env_id, "num_samplers": 2, "num_steps": 32, "total_timesteps": 128, "progress": "off"}
    caplog.set_level("INFO", logger="dppo")
    config = make_config(settings | changes | {"run_dir": tmp_path / "run"})
    result = dppo.train(config)
    assert [row["losses/minibatches"] for row in result.metrics] == [epochs, epochs * config.reuse]
    said = "Epochs: 20, because actions are discrete; update_epochs=10 (--update-epochs 10)"
    assert (said in caplog.text) == (epochs == 20)
    assert ("Entropy: a bonus of 0.01" in caplog.text) == (config.reuse > 1)  # with discrete actions
    assert f"for {epochs} epochs" in sizes_line(config) or ", or 20 if actions are discrete" in sizes_line(config)


def test_the_limit_of_the_kl_grows_with_the_square_of_the_clipping_range() -> None:
    small = {"env_id": "CartPole-v1", "num_samplers": 1, "num_steps": 16, "total_timesteps": 64}
    configs = [make_config(small | {"reuse": reuse}) for reuse in (1, 3, 4)]
    assert [config.largest_kl_for(real=True) for config in configs] == [0.04, 0.01, 0.0064]
    assert configs[-1].largest_kl_for(real=False) == 0


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        *(({}, 0), ({"memory": "gru"}, 0), ({"reuse": 4}, 0)),
        *(({"reuse": 4, "memory": "gru"}, 0.0064), ({"reuse": 4, **OWN_MEMORY}, 0.0064)),
    ],
)
def test_reuse_with_memory_has_a_limit_of_the_kl_whatever_the_actions(
    changes: dict[str, Any], limit: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dppo")
    small = {"env_id": "CartPole-v1", "num_samplers": 1, "num_steps": 16, "total_timesteps": 64, "progress": "off"}
    config = make_config(small | changes | {"run_dir": tmp_path / "run"})
    dppo.train(config)
    assert config.largest_kl_for(real=False) == limit
    said = "too far (KL above 0.0064) ends early; target_kl=0.0"
    assert (said in caplog.text) == (limit > 0)


def test_discrete_actions_have_a_bonus_of_entropy_with_reuse_unless_there_is_memory_or_another_is_set() -> None:
    of: list[dict[str, Any]] = [{}, {"memory": "gru"}, OWN_MEMORY, {"ent_coef": 0.0}, {"ent_coef": 0.3}]
    configs = [make_config({"env_id": "CartPole-v1", "reuse": 2} | changes) for changes in of]
    assert [config.entropy_weight_for(discrete=True) for config in configs] == [0.01, 0, 0, 0, 0.3]
    assert [config.entropy_weight_for(discrete=False) for config in configs] == [0, 0, 0, 0, 0.3]
    assert make_config({"env_id": "CartPole-v1"}).entropy_weight_for(discrete=True) == 0


@pytest.mark.parametrize(
    ("env_id", "changes", "ends"),
    [
        ("Pendulum-v1", {}, True),
        ("Pendulum-v1", {"target_kl": 0.0}, False),
        ("Pendulum-v1", {"desired_kl": 0.5}, False),
        ("Pendulum-v1", {"update_epochs": 1}, True),  # planned: an epoch; there is nothing to say
        ("Pendulum-v1", {"reuse": 2}, True),
        ("CartPole-v1", {"update_epochs": 10}, False),
        ("CartPole-v1", {"update_epochs": 10, "target_kl": 0.04}, True),
    ],
)
def test_an_update_of_real_actions_ends_at_a_large_kl(
    env_id: str, changes: dict[str, Any], ends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of this size change any policy by more than 0.04 within an epoch."""
    settings = {"env_id": env_id, "num_samplers": 2, "num_steps": 64, "total_timesteps": 256, "progress": "off"}
    caplog.set_level("INFO", logger="dppo")
    result = dppo.train(make_config(settings | {"learning_rate": 0.05, "run_dir": tmp_path / "run"} | changes))
    assert (result.metrics[0]["losses/minibatches"] < 20) == ends
    assert ("too far (KL above 0.04) ends early" in caplog.text) == (ends and not changes)


@pytest.mark.parametrize(
    ("env_id", "changes", "standardized"),
    [
        ("Pendulum-v1", {}, False),
        ("Pendulum-v1", {"norm_adv": True}, True),
        ("Pendulum-v1", {"norm_reward": False}, True),  # advantages have no unit
        ("Pendulum-v1", {"norm_value": True}, True),
        ("Pendulum-v1", {"reuse": 2}, False),
        ("CartPole-v1", {}, True),
    ],
)
def test_advantages_of_real_actions_keep_their_unit(
    env_id: str, changes: dict[str, Any], standardized: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"env_id": env_id, "num_samplers": 2, "num_steps": 32, "total_timesteps": 128, "progress": "off"}
    caplog.set_level("INFO", logger="dppo")
    results = [
        dppo.train(make_config(settings | {"run_dir": tmp_path / name} | changes | more))
        for name, more in [("left", {}), ("set", {"norm_adv": standardized})]
    ]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert ("Advantages: not standardized" in caplog.text) is not standardized


def test_statistics_that_an_environment_does_not_have_cannot_be_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That images are not normalized shows when the environment is known."""
    none: dict[str, Any] = {"env_id": "worlds.observed:Picture", "norm_reward": False, "freeze_norm_after": 10}
    with pytest.raises(
        ConfigError, match="freeze_norm_after=10 has no effect: norm_reward is off, and no observations"
    ):
        dppo.train(make_config({"progress": "off", "run_dir": tmp_path / "run", **none}))
    nothing = partial(no_statistics, obs=False, returns=False)
    monkeypatch.setattr(building, "_no_statistics", lambda config, spaces, resumed: nothing(spaces))
    sizes = {"num_samplers": 1, "num_steps": 8, "total_timesteps": 8, "progress": "off", "run_dir": tmp_path / "run"}
    dppo.train(make_config(sizes | none))  # as an earlier version did
    monkeypatch.undo()
    dppo.train(make_config(sizes | none), resume=tmp_path / "run")
