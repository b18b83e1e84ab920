"""Real simulators, most of the extra `sims`: each trains, and a run that is resumed replays its open episodes exactly.

`.ci/run` installs them in two venvs of their own and sets DPPO_SIMS, so that none of them can be skipped there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from extras import EXTRAS, show
from recorder import Recorder

import dppo

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "simulators"
# The package that each needs, the settings of a small run, and whether its episodes can be replayed.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "highway-env": ("highway_env", {"env_id": "highway_env:highway-fast-v0", "num_steps": 8}, True),
    "Humanoid": ("mujoco", {"env_id": "Humanoid-v5", "num_steps": 32, "norm_obs": True}, True),
    "Box2D": ("Box2D", {"env_id": "LunarLander-v3", "num_steps": 64}, True),
    "MiniGrid": (
        "minigrid",
        {"env_id": "minigrid:MiniGrid-DoorKey-5x5-v0", "drop_obs": ["mission"]},
        True,
    ),
    "robotics": (
        "gymnasium_robotics",
        {"env_id": "gymnasium_robotics:FetchReach-v4", "num_steps": 32},
        True,
    ),
    "Grid2Op": ("grid2op", {"env_id": "grid:make", "num_steps": 16}, True),
    "EnergyPlus": ("pyenergyplus", {"env_id": "energyplus:make", "num_steps": 40}, True),
    "FMU": ("pythonfmu", {"env_id": "fmu:make", "num_steps": 64}, True),
    "SimPy": ("simpy", {"env_id": "factory:make", "num_steps": 64}, True),
    "PettingZoo": ("mpe2", {"env_id": "agents:make", "envs_per_sampler": 3, "num_steps": 32}, True),
    "ale_py": ("ale_py", {"env_id": "vectors:atari", "envs_per_sampler": 2, "num_steps": 8}, True),
    "EnvPool": (
        "envpool",
        {
            "env_id": "vectors:pool",
            "env_kwargs": {"task": "CartPole-v1"},
            "envs_per_sampler": 3,
            "num_steps": 32,
        },
        False,
    ),
}


def troubles(result: dppo.Result) -> dict[str, int]:
    """Return the incidents of a run, without notes on numbers such as the joints of FetchReach, which hardly move."""
    return {kind: count for kind, count in result.incidents.items() if kind != "small_observations"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_simulator_trains_and_a_resumed_run_goes_on_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, settings, replays = CASES[name]
    if importlib.util.find_spec(package) is None:
        assert "DPPO_SIMS" not in os.environ, f"{package} is not installed"
        pytest.skip(f"{package} is not installed")
    for names in EXTRAS:
        show(names)  # simulators import some of these packages themselves
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if name == "FMU":
        build = ["-m", "pythonfmu", "build", "-f"]
        source = str(EXAMPLES / "tank_slave.py")
        words = [sys.executable, *build, source, "-d", str(tmp_path)]
        subprocess.run(words, check=True, capture_output=True)
        settings = settings | {"env_kwargs": {"path": str(tmp_path / "Tank.fmu")}}
    sizes = {"num_samplers": 2, "num_steps": 32, "envs_per_sampler": 1} | settings
    batch = sizes["num_samplers"] * sizes["num_steps"] * sizes["envs_per_sampler"]
    common = sizes | {"total_timesteps": 3 * batch, "progress": "off", "update_epochs": 2}

    def config(folder: str) -> dppo.Config:
        return make_config(common | {"run_dir": tmp_path / folder})

    whole = dppo.train(config("whole"))
    assert whole.iterations == 3
    assert troubles(whole) == {}

    dppo.train(config("run"), observers=[Recorder(interrupt_at=2)])
    resumed = dppo.train(config("run"), resume=tmp_path / "run")
    if replays:
        assert resumed.weights_sha256 == whole.weights_sha256
        assert troubles(resumed) == {}
    else:
        assert set(troubles(resumed)) == {"episode_abandoned"}
