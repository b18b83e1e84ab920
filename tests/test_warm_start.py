"""`--init-from`: weights of another run where names and shapes agree, listed, and exact through a resume."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from recorder import Recorder

import dppo
from dppo.errors import CheckpointError, ConfigError
from dppo.records.files import checkpoint as checkpoints

CARTPOLE = {"env_id": "CartPole-v1", "norm_obs": True, "norm_reward": True}
ACROBOT = CARTPOLE | {"env_id": "Acrobot-v1"}
SIZES: dict[str, Any] = {"checkpoint_interval_s": 0, "hidden_sizes": (8, 8), "keep_checkpoints": 9}
TAKEN = {
    "policy.0.bias",
    "policy.2.weight",
    "policy.2.bias",
    *(f"value.{n}.bias" for n in (0, 2, 4)),
}
TAKEN |= {"value.2.weight", "value.4.weight"}


def config_of(run_dir: Path, settings: dict[str, Any], **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, steps=32, **SIZES | settings | changes)


def first(run_dir: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays with which a run has begun."""
    return checkpoints.load(run_dir / "checkpoints" / "iter_000000.safetensors").arrays


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("source") / "run"
    dppo.train(config_of(run, CARTPOLE))
    return run


@pytest.mark.parametrize("log_std_init", [None, -3.0])
def test_deviations_are_those_of_the_other_run_unless_they_are_set(
    log_std_init: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    continuous = {"env_id": "worlds.simple:point_mass", "total_timesteps": 64}
    dppo.train(config_of(tmp_path / "origin", continuous, log_std_init=-2.0))
    changes = {} if log_std_init is None else {"log_std_init": log_std_init}
    with caplog.at_level(logging.INFO, "dppo"):
        dppo.train(
            config_of(tmp_path / "new", continuous, init_from=tmp_path / "origin", **changes)
        )
    deviations = first(tmp_path / "new")["model"]["log_std"]
    there = checkpoints.find(tmp_path / "origin").checkpoint.arrays["model"]["log_std"]
    np.testing.assert_array_equal(
        deviations, there if log_std_init is None else np.full(2, log_std_init, np.float32)
    )
    assert "Deviation: " not in caplog.text


def test_what_fits_is_taken_and_listed(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dppo.train(config_of(tmp_path / "cold", ACROBOT))
    with caplog.at_level(logging.INFO, "dppo"):
        dppo.train(config_of(tmp_path / "warm", ACROBOT, init_from=source))
    there = checkpoints.find(source).checkpoint.arrays["model"]
    warm, cold = (first(tmp_path / name) for name in ("warm", "cold"))
    for name, array in warm["model"].items():
        np.testing.assert_array_equal(array, there[name] if name in TAKEN else cold["model"][name])
    assert any((warm["model"][name] != cold["model"][name]).any() for name in TAKEN)
    assert warm["normalizer"]["obs.count"] == 0  # of 4 numbers there, and of 6 here
    messages = [record.getMessage() for record in caplog.records]
    listed = {
        match[2]: match[1]
        for line in messages
        if (match := re.fullmatch(r"  (taken|not taken): ([\w.]+), .*", line))
    }
    assert {name for name, what in listed.items() if what == "taken"} == TAKEN
    assert "  not taken: policy.0.weight, 8x6 here and 8x4 there" in messages
    assert "  not taken: statistics of observations" in messages
    [summary] = [line for line in messages if line.startswith("Starting with 8 of 12 parameters (")]
    numbers = (
        sum(there[name].size for name in TAKEN),
        sum(array.size for array in warm["model"].values()),
    )
    assert "({} of {} numbers)".format(*numbers) in summary


def test_statistics_of_alike_observations_are_taken(source: Path, tmp_path: Path) -> None:
    changes = {
        "init_from": source,
        "freeze_norm_after": 0,
        "norm_reward": False,
        "activation": "relu",
    }
    result = dppo.train(config_of(tmp_path / "run", CARTPOLE, **changes))
    there = checkpoints.find(source).checkpoint.arrays
    for arrays in (first(tmp_path / "run"), checkpoints.load(result.checkpoint).arrays):
        assert arrays["normalizer"]["obs.count"] == there["normalizer"]["obs.count"] > 0
        np.testing.assert_array_equal(
            arrays["normalizer"]["obs.mean"], there["normalizer"]["obs.mean"]
        )
    begun = first(tmp_path / "run")
    assert all((begun["model"][name] == array).all() for name, array in there["model"].items())
    assert begun["optimizer"].keys() == there["optimizer"].keys()


def test_a_resumed_run_starts_from_its_own_checkpoint(source: Path, tmp_path: Path) -> None:
    whole = dppo.train(config_of(tmp_path / "whole", ACROBOT, init_from=source))
    copy = tmp_path / "copy"
    copy.symlink_to(source)
    config = config_of(tmp_path / "run", ACROBOT, init_from=copy)
    assert dppo.train(config, observers=[Recorder(interrupt_at=1)]).iterations == 1
    copy.unlink()  # it is not needed again
    assert dppo.train(config, resume=tmp_path / "run").weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("norm_value", [True, False])
def test_values_begin_in_units_of_rewards(norm_value: bool, tmp_path: Path) -> None:
    """A network that was trained with `norm_value` estimates values in another unit, which is not taken over."""
    raw = CARTPOLE | {"norm_reward": False}
    source = dppo.train(config_of(tmp_path / "source", raw, norm_value=True)).checkpoint
    dppo.train(config_of(tmp_path / "run", raw, init_from=source, norm_value=norm_value))
    there = checkpoints.load(source).arrays
    here = first(tmp_path / "run")["model"]
    count, mean, m2 = there["optimizer"]["value_targets"]
    std = np.sqrt(m2 / count)
    assert mean > 1
    np.testing.assert_allclose(
        here["value.4.weight"], there["model"]["value.4.weight"] * std, rtol=1e-6
    )
    np.testing.assert_allclose(
        here["value.4.bias"], there["model"]["value.4.bias"] * std + mean, atol=1e-5
    )
    np.testing.assert_array_equal(here["value.2.weight"], there["model"]["value.2.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [0, 1])
def test_actors_and_learners_start_with_the_same_weights(
    num_learners: int, source: Path, tmp_path: Path, ray_session: None
) -> None:
    on_ray = {"num_actors": 2, "num_learners": num_learners, "cpus_per_actor": 0.5}
    runs = [
        dppo.train(config_of(tmp_path / str(len(changes)), ACROBOT, init_from=source, **changes))
        for changes in ({}, on_ray)
    ]
    assert len({result.weights_sha256 for result in runs}) == 1


def test_a_start_with_nothing_is_refused(source: Path, tmp_path: Path) -> None:
    words = r"^init_from=\S+: nothing fits, none of its 12 (?s:.*)8x4 there\n"
    with pytest.raises(ConfigError, match=words):
        dppo.train(config_of(tmp_path / "run", CARTPOLE, hidden_sizes=(9, 9), init_from=source))
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.find(source).checkpoint
    checkpoint.arrays["model"]["policy.2.weight"] = np.full((8, 8), np.nan, np.float32)
    checkpoints.save(
        tmp_path / "bad" / "checkpoints", 1, checkpoint, keep=checkpoints.Keep(1), score=None
    )
    with pytest.raises(CheckpointError, match="has weights that are not finite"):
        dppo.train(config_of(tmp_path / "run", ACROBOT, init_from=tmp_path / "bad"))
