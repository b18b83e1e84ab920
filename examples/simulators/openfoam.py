"""Control the flow in a cavity with OpenFOAM: apt install openfoam; dppo train openfoam:make --critic-obs field.

The policy moves the lid of a square cavity, and reads four probes. It is to bring the velocity at another place to a
target that differs from episode to episode. Once the flow is steady, one velocity of the lid does so, that of
`lid_for(target)`; before, while the fluid is at rest, the lid has to move faster. The whole field is for the critic.
Two controllers show what can be reached: `Steady` and `Best`.

Each step is a run of icoFoam that goes on from the last time folder. This folder is also the state by reference: it is
never changed after `get_state` has returned it, but copied. With `--ranks-per-env 2`, each step decomposes the case,
runs icoFoam in parallel, and puts the new time folder together.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.slots.slots import Slots

CELLS = 16  # in each direction
SIDE = 0.1  # m
VISCOSITY = 0.01  # m2/s: a lid at 1 m/s makes a flow of Reynolds number 10
TIME_STEP = 0.002  # s
STEPS = 10  # of icoFoam in one step of the environment
LENGTH = 12  # steps of an episode
MAX_LID = 2.0  # m/s
PROBES = [(3, 8), (12, 8), (8, 2), (8, 13)]  # cells (x, y)
PLACE = (8, 4)
SHARE = -0.1357  # velocity at PLACE, in units of that of the lid, once the flow is steady
FASTEST = MAX_LID * abs(SHARE)
# velocity at PLACE in the steps after the lid has moved at 1 for one step, in units of FASTEST: the flow is slow enough
# to be linear
RESPONSE = np.sign(SHARE) * np.array([0.618, 0.224, 0.0965, 0.0378, 0.0142, 0.0053, 0.002])
TIMEOUT_S = 60.0  # of a program
LID = re.compile(r"(lid\s*\{[^}]*value\s+uniform \()\S+")

HEADER = "FoamFile {{ version 2.0; format ascii; class {kind}; object {name}; }}\n"
MESH = """
scale {side};
vertices ((0 0 0) (1 0 0) (1 1 0) (0 1 0) (0 0 0.1) (1 0 0.1) (1 1 0.1) (0 1 0.1));
blocks (hex (0 1 2 3 4 5 6 7) ({cells} {cells} 1) simpleGrading (1 1 1));
boundary
(
    lid {{ type wall; faces ((3 7 6 2)); }}
    walls {{ type wall; faces ((0 4 7 3) (2 6 5 1) (1 5 4 0)); }}
    sides {{ type empty; faces ((0 3 2 1) (4 5 6 7)); }}
);
"""
VELOCITY = """
dimensions [0 1 -1 0 0 0 0];
internalField uniform (0 0 0);
boundaryField
{
    lid { type fixedValue; value uniform (0 0 0); }
    walls { type noSlip; }
    sides { type empty; }
}
"""
PRESSURE = """
dimensions [0 2 -2 0 0 0 0];
internalField uniform 0;
boundaryField { "(lid|walls)" { type zeroGradient; } sides { type empty; } }
"""
SCHEMES = """
ddtSchemes { default Euler; }
gradSchemes { default Gauss linear; }
divSchemes { default none; div(phi,U) Gauss linear; }
laplacianSchemes { default Gauss linear orthogonal; }
interpolationSchemes { default linear; }
snGradSchemes { default orthogonal; }
"""
SOLUTION = """
solvers
{
    p { solver PCG; preconditioner DIC; tolerance 1e-8; relTol 0.01; }
    pFinal { $p; relTol 0; }
    U { solver smoothSolver; smoother symGaussSeidel; tolerance 1e-8; relTol 0; }
}
PISO { nCorrectors 2; nNonOrthogonalCorrectors 0; pRefCell 0; pRefValue 0; }
"""
CONTROL = """
application icoFoam;
startFrom startTime; startTime {start:g}; stopAt endTime; endTime {end:g}; deltaT {step};
writeControl timeStep; writeInterval {steps}; writePrecision 12; timePrecision 8;
"""
DECOMPOSITION = (
    "numberOfSubdomains {ranks}; method simple; simpleCoeffs {{ n ({ranks} 1 1); delta 0.001; }}\n"
)
VARIABLES = {"WM_PROJECT_DIR": "/usr/share/openfoam"}


def make(scratch_dir: str, slots: Slots) -> gym.Env[Any, Any]:
    """Return the environment, with its case in `scratch_dir`."""
    return Cavity(Path(scratch_dir, "case"), slots)


def lid_for(target: float) -> float:
    """Return the action that holds the target, in units of FASTEST, once the flow is steady."""
    return target * np.sign(SHARE)


class Steady:
    """Moves the lid at the velocity that holds the target, and waits for the flow."""

    def act(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.array([lid_for(target_in(observation))], np.float32)


class Best:
    """Moves the lid so that the target is reached in the next step: nothing is better, within the bounds of the lid."""

    def __init__(self) -> None:
        self._actions: list[float] = []

    def reset(self) -> None:
        self._actions.clear()

    def act(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        latest = self._actions[::-1][: len(RESPONSE) - 1]
        still_moving = float(np.dot(RESPONSE[1 : 1 + len(latest)], latest))
        action = float(np.clip((target_in(observation) - still_moving) / RESPONSE[0], -1, 1))
        self._actions.append(action)
        return np.array([action], np.float32)


def target_in(observation: dict[str, np.ndarray]) -> float:
    """Return the target of an episode, in units of FASTEST."""
    return float(observation["probes"][-2])


class Cavity(gym.Env[dict[str, np.ndarray], np.ndarray]):
    """Action: velocity of the lid, -1 to 1 in units of MAX_LID.

    Observation: `probes`, both velocities at four places, the target and the last action; `field`, both velocities in
    all cells. Reward: minus the distance from the target, in units of FASTEST.
    """

    def __init__(self, case: Path, slots: Slots) -> None:
        """Write the case, and make its mesh."""
        numbers = {"field": 2 * CELLS**2, "probes": 2 * len(PROBES) + 2}
        self.observation_space = gym.spaces.Dict(
            {name: gym.spaces.Box(-10, 10, (count,), np.float32) for name, count in numbers.items()}
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._case = case
        self._slots = slots
        self._steps = 0
        self._target = 0.0
        self._action = 0.0
        self._write("system/blockMeshDict", MESH.format(side=SIDE, cells=CELLS))
        self._write("system/fvSchemes", SCHEMES)
        self._write("system/fvSolution", SOLUTION)
        self._write("constant/transportProperties", f"nu {VISCOSITY};\n")
        self._write("system/decomposeParDict", DECOMPOSITION.format(ranks=slots.layout.ranks))
        self._write("0/U", VELOCITY, "volVectorField")
        self._write("0/p", PRESSURE, "volScalarField")
        self._write_control()
        self._run("blockMesh")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._remove_times()
        self._steps = 0
        self._action = 0.0
        self._target = float(self.np_random.uniform(-0.7, 0.7))
        return self._observation(), {"target": self._target}

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._action = float(action[0])
        before = self._time()
        velocity = (before / "U").read_text()
        changed = LID.sub(rf"\g<1>{MAX_LID * self._action!r}", velocity)
        (before / "new").write_text(changed)
        (before / "new").replace(before / "U")  # the file that get_state returned is another one
        self._write_control()
        failures = 0
        try:
            self._advance()
        except RuntimeError:  # it may have been killed, and would go on from the same folder
            failures = 1
            self._advance()
        self._steps += 1
        if self._steps > 1:
            shutil.rmtree(before)
        x, y = PLACE
        velocity_here = float(self._velocities()[y, x, 0]) / FASTEST
        reward = -abs(velocity_here - self._target)
        info = {"target": self._target, "velocity": velocity_here, "failures": failures}
        return self._observation(), reward, False, self._steps == LENGTH, info

    def get_state(self) -> dict[str, Any]:
        """Return the time folder, by reference, and what else later steps depend on."""
        return {
            "folder": self._time(),
            "steps": self._steps,
            "target": self._target,
            "action": self._action,
            "random": self.np_random.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._remove_times()
        self._steps = state["steps"]
        self._target = state["target"]
        self._action = state["action"]
        self.np_random.bit_generator.state = state["random"]
        shutil.rmtree(self._time(), ignore_errors=True)
        shutil.copytree(state["folder"], self._time())

    def _time(self) -> Path:
        return self._case / f"{self._steps * STEPS * TIME_STEP:g}"

    def _remove_times(self) -> None:
        for folder in self._case.glob("0.*"):
            shutil.rmtree(folder)

    def _velocities(self) -> np.ndarray:
        """Return both velocities in the cells, [y, x, 2]."""
        text = (self._time() / "U").read_text()
        start = text.find("nonuniform List<vector>")
        if start < 0:  # at rest
            return np.zeros((CELLS, CELLS, 2))
        inside = text[text.index("(", start) : text.index(";", start)]
        numbers = np.array(inside.translate(str.maketrans("()", "  ")).split(), np.float64)
        return numbers.reshape(CELLS, CELLS, 3)[:, :, :2]

    def _observation(self) -> dict[str, np.ndarray]:
        velocities = self._velocities() / MAX_LID
        probes = [velocities[y, x] for x, y in PROBES]
        numbers = np.concatenate([*probes, [self._target, self._action]])
        return {
            "field": velocities.ravel().astype(np.float32),
            "probes": numbers.astype(np.float32),
        }

    def _write(self, name: str, text: str, kind: str = "dictionary") -> None:
        path = self._case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER.format(kind=kind, name=path.name) + text)

    def _write_control(self) -> None:
        start = self._steps * STEPS * TIME_STEP
        end = start + STEPS * TIME_STEP
        self._write(
            "system/controlDict", CONTROL.format(start=start, end=end, step=TIME_STEP, steps=STEPS)
        )

    def _advance(self) -> None:
        if self._slots.layout.ranks == 1:
            self._run("icoFoam")
            return
        self._run("decomposePar", "-force")
        program = self._slots.launch(["icoFoam", "-parallel"], self._case, VARIABLES)
        program.terminate(TIMEOUT_S)
        if program.poll() != 0:
            raise RuntimeError(f"icoFoam failed {program.end()}")
        self._run("reconstructPar", "-latestTime")

    def _run(self, *words: str) -> None:
        """Run a program of OpenFOAM in the case; raise RuntimeError with its last lines if it fails."""
        process = subprocess.run(
            words,
            cwd=self._case,
            env={**VARIABLES, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(f"{words[0]} failed: {process.stdout[-500:]}")
