"""A flow controlled with OpenFOAM: the same weights in one process and with actors, killed, and resumed."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from mpi import ranks_of, use_mpi
from processes import Disturbance, send, wait_until
from recorder import Recorder

import dppo
from dppo.slots.slots import Slots

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "simulators"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("icoFoam") is None, reason="needs OpenFOAM"),
]


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    flow: dict[str, Any] = {"env_id": "openfoam:make", "critic_obs": ("field",), "update_epochs": 2}
    return tiny_run(run_dir, samplers=2, steps=8, iterations=4, **flow | changes)


@pytest.mark.parametrize("env_state", ["auto", "own"])
def test_a_flow_has_the_same_weights_however_its_run_was_disturbed(
    env_state: str, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    whole = dppo.train(settings(tmp_path / "whole"))
    assert whole.incidents == {}

    run_dir = tmp_path / "run"
    stopped = settings(run_dir, env_state=env_state)
    dppo.train(stopped, observers=[Recorder(interrupt_at=2)])
    resumed = dppo.train(stopped, resume=run_dir)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.incidents == {}
    if env_state == "own":
        assert sum(row["replay/steps"] for row in resumed.metrics) == 0

    on_actors = settings(tmp_path / "killed", env_state=env_state, num_actors=2)
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=1):
        killed = dppo.train(on_actors)
    assert killed.weights_sha256 == whole.weights_sha256
    assert killed.incidents["actor_lost"] >= 1
    assert "replay_mismatch" not in killed.incidents


def test_the_lid_that_holds_a_target_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    openfoam = importlib.import_module("openfoam")
    flow = openfoam.make(str(tmp_path), Slots())
    _, info = flow.reset(seed=1)
    speed = openfoam.lid_for(info["target"])
    lid = np.array([speed], np.float32)
    rewards = [flow.step(lid)[1] for _ in range(openfoam.LENGTH)]
    assert rewards[-1] > -0.02
    assert rewards[-1] > rewards[0]


def test_controllers_show_what_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    openfoam = importlib.import_module("openfoam")

    def play(controller: Any) -> float:
        result = dppo.evaluate(controller, env="openfoam:make", episodes=3)
        return float(np.mean(result.returns))

    best = play(openfoam.Best())
    assert best > -0.1
    assert play(openfoam.Steady()) < best - 0.05


class KillsARank(dppo.Observer):
    """Kills one of the two ranks of a step, once."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._kill)

    def on_iteration(self, row: dict[str, float]) -> None:
        if row["iteration"] == 1:
            self._thread.start()

    def _kill(self) -> None:
        wait_until(lambda: ranks_of("icoFoam -parallel"))
        *_, last = ranks_of("icoFoam -parallel")
        os.kill(last, signal.SIGKILL)

    def on_end(self, result: dppo.Result | None, error: BaseException | None) -> None:
        self._thread.join()


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
@pytest.mark.parametrize("num_actors", [0, 2])
def test_a_flow_of_two_ranks_has_the_same_weights_when_one_is_killed(
    num_actors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mpi("openmpi", tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    sizes = {"ranks_per_env": 2, "cores_per_rank": 0, "num_steps": 2, "total_timesteps": 12}
    whole = dppo.train(settings(tmp_path / "whole", **sizes))
    counted = {"num_actors": num_actors, "info_keys": ("failures",)}
    killed = settings(tmp_path / "killed", **sizes, **counted)
    result = dppo.train(killed, observers=[KillsARank()])
    assert result.weights_sha256 == whole.weights_sha256

    failures = [row["info/failures_max"] for row in result.metrics]
    assert max(failures) == 1
    assert not ranks_of("icoFoam -parallel")
