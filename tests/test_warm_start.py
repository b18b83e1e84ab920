"""`--init-from`: weights of another run where names and shapes agree, listed, and exact through a resume."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import bits_of, tiny_run
from recorder import Notes, Recorder
from worlds.acting import Actuated, Masked

import dppo
from dppo.__main__ import main
from dppo.errors import CheckpointError, ConfigError
from dppo.records.files import checkpoint as checkpoints

CARTPOLE = {"env_id": "CartPole-v1", "norm_obs": True, "norm_reward": True}
ACROBOT = CARTPOLE | {"env_id": "Acrobot-v1"}
SIZES: dict[str, Any] = {"checkpoint_interval_s": 0, "hidden_sizes": (8, 8), "keep_checkpoints": 9}
TAKEN = {
    "policy.0.bias",
    "policy.2.weight",
    "policy.2.bias",
    "value.0.bias",
    "value.2.weight",
    "value.2.bias",
    "value.4.weight",
    "value.4.bias",
}


def config_of(run_dir: Path, settings: dict[str, Any], **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, steps=32, **SIZES | settings | changes)


def first(run_dir: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays with which a run has begun."""
    return checkpoints.load(run_dir / "checkpoints" / "iter_000000.safetensors").arrays


def last(run_dir: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays with which a run has ended."""
    return checkpoints.find(run_dir).checkpoint.arrays


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
    origin = tmp_path / "origin"
    dppo.train(config_of(origin, continuous, log_std_init=-2.0))
    expected = last(origin)["model"]["log_std"]
    changes = {}
    if log_std_init is not None:
        changes["log_std_init"] = log_std_init
        expected = np.full(2, log_std_init, np.float32)
    with caplog.at_level(logging.INFO, "dppo"):
        dppo.train(config_of(tmp_path / "new", continuous, init_from=origin, **changes))
    deviations = first(tmp_path / "new")["model"]["log_std"]
    np.testing.assert_array_equal(deviations, expected)
    assert "Deviation: " not in caplog.text


def names_listed(messages: list[str], what: str) -> set[str]:
    """Return the parameters that the lines list as taken, or as not taken."""
    matches = [re.fullmatch(rf"  {what}: ([\w.]+), .*", line) for line in messages]
    return {match[1] for match in matches if match}


def test_what_fits_is_taken_and_listed(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dppo.train(config_of(tmp_path / "cold", ACROBOT))
    with caplog.at_level(logging.INFO, "dppo"):
        dppo.train(config_of(tmp_path / "warm", ACROBOT, init_from=source))
    there = last(source)["model"]
    cold = first(tmp_path / "cold")["model"]
    warm = first(tmp_path / "warm")
    for name, array in warm["model"].items():
        expected = there if name in TAKEN else cold
        np.testing.assert_array_equal(array, expected[name])
    assert any((there[name] != cold[name]).any() for name in TAKEN)
    assert warm["normalizer"]["obs.count"] == 0  # of 4 numbers there, and of 6 here

    messages = [record.getMessage() for record in caplog.records]
    assert names_listed(messages, "taken") == TAKEN
    assert "  not taken: policy.0.weight, 8x6 here and 8x4 there" in messages
    assert "  not taken: statistics of observations" in messages

    [summary] = [line for line in messages if line.startswith("Starting with 8 of 12 parameters (")]
    taken_numbers = sum(there[name].size for name in TAKEN)
    numbers = sum(array.size for array in warm["model"].values())
    assert f"({taken_numbers} of {numbers} numbers)" in summary


def test_statistics_of_alike_observations_are_taken(source: Path, tmp_path: Path) -> None:
    changes = {
        "init_from": source,
        "freeze_norm_after": 0,
        "norm_reward": False,
        "activation": "relu",
    }
    dppo.train(config_of(tmp_path / "run", CARTPOLE, **changes))
    there = last(source)
    begun = first(tmp_path / "run")
    for arrays in (begun, last(tmp_path / "run")):
        here = arrays["normalizer"]
        expected = there["normalizer"]
        assert here["obs.count"] == expected["obs.count"] > 0
        np.testing.assert_array_equal(here["obs.mean"], expected["obs.mean"])
    for name, array in there["model"].items():
        np.testing.assert_array_equal(begun["model"][name], array)
    assert begun["optimizer"].keys() == there["optimizer"].keys()


def test_masks_beside_observations_are_no_part_of_them(tmp_path: Path) -> None:
    masked = {"env_id": Masked, "env_kwargs": {"source": "method"}, "norm_obs": True}
    dppo.train(config_of(tmp_path / "origin", masked))
    free = masked | {"env_id": Actuated, "env_kwargs": {"kind": "dials"}}
    dppo.train(config_of(tmp_path / "run", free, init_from=tmp_path / "origin"))
    expected = last(tmp_path / "origin")["normalizer"]["obs.count"]
    assert first(tmp_path / "run")["normalizer"]["obs.count"] == expected > 0


def test_statistics_of_invalid_observations_are_not_taken(source: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.find(source).checkpoint
    checkpoint.state["model"]["obs"] = 1
    bad = tmp_path / "bad"
    checkpoints.save(bad / "checkpoints", 1, checkpoint, keep=checkpoints.Keep(1), score=None)
    with Notes() as notes:
        dppo.train(config_of(tmp_path / "run", CARTPOLE, init_from=bad))
    assert "  not taken: statistics of observations" in notes.texts


def test_a_resumed_run_starts_from_its_own_checkpoint(source: Path, tmp_path: Path) -> None:
    whole = dppo.train(config_of(tmp_path / "whole", ACROBOT, init_from=source))
    copy = tmp_path / "copy"
    copy.symlink_to(source)
    config = config_of(tmp_path / "run", ACROBOT, init_from=copy)
    stopped = dppo.train(config, observers=[Recorder(interrupt_at=1)])
    assert stopped.iterations == 1
    copy.unlink()  # it is not needed again
    resumed = dppo.train(config, resume=tmp_path / "run")
    assert resumed.weights_sha256 == whole.weights_sha256


def test_a_branch_needs_no_start_of_its_origin(source: Path, tmp_path: Path) -> None:
    run = dppo.train(config_of(tmp_path / "run", ACROBOT, init_from=source))
    branch = tmp_path / "branch"
    dppo.train(config_of(branch, ACROBOT), resume=run, branch=True)
    assert main(["train", "--resume", str(run.run_dir), "--branch", str(tmp_path / "typed")]) == 0
    typed = tmp_path / "typed"
    assert "init_from: null" in (typed / "config.yaml").read_text()
    assert bits_of(first(typed)["model"]) == bits_of(first(branch)["model"])


@pytest.mark.parametrize("norm_value", [True, False])
def test_values_begin_in_units_of_rewards(norm_value: bool, tmp_path: Path) -> None:
    """A network that was trained with `norm_value` estimates values in another unit, which is not taken over."""
    raw = CARTPOLE | {"norm_reward": False}
    source = tmp_path / "source"
    dppo.train(config_of(source, raw, norm_value=True))
    dppo.train(config_of(tmp_path / "run", raw, init_from=source, norm_value=norm_value))
    arrays = last(source)
    there = arrays["model"]
    here = first(tmp_path / "run")["model"]
    count, mean, m2 = arrays["optimizer"]["value_targets"]
    std = np.sqrt(m2 / count)
    assert mean > 1

    weight = there["value.4.weight"] * std
    bias = there["value.4.bias"] * std + mean
    np.testing.assert_allclose(here["value.4.weight"], weight, rtol=1e-6)
    np.testing.assert_allclose(here["value.4.bias"], bias, atol=1e-5)
    np.testing.assert_array_equal(here["value.2.weight"], there["value.2.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [0, 1])
def test_actors_and_learners_start_with_the_same_weights(
    num_learners: int, source: Path, tmp_path: Path, ray_session: None
) -> None:
    here = dppo.train(config_of(tmp_path / "here", ACROBOT, init_from=source))
    on_ray = {
        "init_from": source,
        "num_actors": 2,
        "num_learners": num_learners,
        "cpus_per_actor": 0.5,
    }
    there = dppo.train(config_of(tmp_path / "there", ACROBOT, **on_ray))
    assert there.weights_sha256 == here.weights_sha256


def test_a_start_with_nothing_is_refused(source: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", CARTPOLE, hidden_sizes=(9, 9), init_from=source)
    words = r"^init_from=\S+: no weights fit: none of its 12 (?s:.*)8x4 there\n"
    with pytest.raises(ConfigError, match=words):
        dppo.train(config)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.find(source).checkpoint
    checkpoint.arrays["model"]["policy.2.weight"] = np.full((8, 8), np.nan, np.float32)
    bad = tmp_path / "bad"
    checkpoints.save(bad / "checkpoints", 1, checkpoint, keep=checkpoints.Keep(1), score=None)
    config = config_of(tmp_path / "run", ACROBOT, init_from=bad)
    with pytest.raises(CheckpointError, match="has weights that are not finite"):
        dppo.train(config)
