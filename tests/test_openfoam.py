"""A flow controlled with OpenFOAM: the same weights in one process and with actors, killed, and resumed."""

from __future__ import annotations

import importlib
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from processes import Disturbance, send
from recorder import Recorder

import dppo

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "simulators"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("icoFoam") is None, reason="needs OpenFOAM"),
]


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    base: dict[str, Any] = {
        "env_id": "openfoam:make",
        "critic_obs": ("field",),
        "num_samplers": 2,
        "num_steps": 8,
        "total_timesteps": 4 * 16,
        "update_epochs": 2,
        "progress": "off",
        "run_dir": run_dir,
    }
    return make_config(base | changes)


@pytest.mark.parametrize("env_state", ["auto", "own"])
def test_a_flow_has_the_same_weights_however_its_run_was_disturbed(
    env_state: str, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    whole = dppo.train(settings(tmp_path / "whole"))
    assert whole.incidents == {}

    dppo.train(
        settings(tmp_path / "run", env_state=env_state), observers=[Recorder(interrupt_at=2)]
    )
    run_dir = tmp_path / "run"
    resumed = dppo.train(settings(run_dir, env_state=env_state), resume=run_dir)
    assert (resumed.weights_sha256, resumed.incidents) == (whole.weights_sha256, {})
    if env_state == "own":
        assert sum(row["replay/steps"] for row in resumed.metrics) == 0

    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=1):
        killed = dppo.train(settings(tmp_path / "killed", env_state=env_state, num_actors=2))
    assert killed.weights_sha256 == whole.weights_sha256
    assert killed.incidents["actor_lost"] >= 1
    assert "replay_mismatch" not in killed.incidents


def test_the_lid_that_holds_a_target_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    openfoam = importlib.import_module("openfoam")
    flow = openfoam.make(str(tmp_path))
    _, info = flow.reset(seed=1)
    lid = np.array([openfoam.lid_for(info["target"])], np.float32)
    rewards = [flow.step(lid)[1] for _ in range(openfoam.LENGTH)]
    assert rewards[-1] > -0.02
    assert rewards[-1] > rewards[0]
