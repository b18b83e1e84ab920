"""Control a Functional Mock-up Unit (FMI 2, co-simulation): pip install fmpy; dppo train fmu:make --env-kwargs '{...}'.

    dppo train fmu:make --env-kwargs '{"path": "tank.fmu"}'

Adapt the names of inputs and outputs, the start values that a seed chooses, and the reward to your FMU. This one is for
the tank of `tank_slave.py`, which `pythonfmu build -f tank_slave.py` packs as an FMU, as Modelica tools and Simulink do
with their models.
"""

import shutil
from typing import Any

import fmpy
import gymnasium as gym
import numpy as np
from fmpy.fmi2 import FMU2Slave

STEP_S, STEPS = 60.0, 120
INPUTS, OUTPUTS = ["heating"], ["temperature", "level"]
TARGET = 50.0


class Fmu(gym.Env[np.ndarray, np.ndarray]):
    """Keep the temperature of a tank at 50 degrees with a heating from 0 to 1, while its inflow varies.

    The FMU is unpacked once, and instantiated anew for each episode: many tools do not implement its reset.
    """

    def __init__(self, path: str) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (len(OUTPUTS),), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (len(INPUTS),), np.float32)
        self._described, self._folder = fmpy.read_model_description(path), fmpy.extract(path)
        self._numbers = {one.name: one.valueReference for one in self._described.modelVariables}
        self._fmu: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._end()
        of = self._described
        self._fmu = FMU2Slave(
            guid=of.guid,
            unzipDirectory=self._folder,
            modelIdentifier=of.coSimulation.modelIdentifier,
            instanceName="it",
        )
        self._fmu.instantiate()
        self._fmu.setupExperiment(startTime=0.0)
        self._set(
            {
                "temperature": self.np_random.uniform(10, 40),
                "inflow": self.np_random.uniform(0.5, 1.5),
            }
        )
        self._fmu.enterInitializationMode()
        self._fmu.exitInitializationMode()
        self._taken = 0
        return self._outputs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._set(dict(zip(INPUTS, action.tolist(), strict=True)))
        self._fmu.doStep(
            currentCommunicationPoint=self._taken * STEP_S, communicationStepSize=STEP_S
        )
        self._taken += 1
        obs = self._outputs()
        return obs, -abs(float(obs[0]) - TARGET) / 10, False, self._taken == STEPS, {}

    def close(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        if self._fmu is not None:
            self._fmu.terminate()
            self._fmu.freeInstance()
            self._fmu = None

    def _set(self, values: dict[str, float]) -> None:
        self._fmu.setReal(
            [self._numbers[name] for name in values], [float(value) for value in values.values()]
        )

    def _outputs(self) -> np.ndarray:
        return np.array(self._fmu.getReal([self._numbers[name] for name in OUTPUTS]), np.float32)


def make(path: str) -> Fmu:
    """Return the environment of the FMU at `path`."""
    return Fmu(path)
