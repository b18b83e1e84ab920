"""Wrap a simulator that owns the loop and calls you back, as EnergyPlus does: python callback_simulator.py [STEPS].

The simulator runs in a thread. Its callback hands a state over and waits for an action; `step` does the opposite.
"""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import dppo


def simulate(on_step: Callable[[float, float], float], seed: int, hours: int = 48) -> None:
    """Stand in for your simulator: run from start to end, and call `on_step(inside, outside) -> heating` each hour."""
    rng = np.random.default_rng(seed)
    inside, outside = rng.uniform(10, 20), rng.normal(0, 5)
    for _ in range(hours):
        heating = on_step(inside, outside)
        inside += 0.3 * (outside - inside) + 10 * heating
        outside += rng.normal()


class Ended(BaseException):
    """Raised in the callback to end a simulation from outside; no `except Exception` of the simulator stops it."""


class Simulation:
    """One run of the simulator in a thread of its own."""

    def __init__(self, seed: int, run: Callable[..., None]) -> None:
        self._states: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(run, seed), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[..., None], seed: int) -> None:
        try:
            run(self._on_step, seed)
            self._states.put(None)  # finished
        except Ended:
            pass
        except BaseException as error:  # raised again in the environment's thread
            self._states.put(error)

    def _on_step(self, *state: float) -> float:
        self._states.put(state)
        action = self._actions.get()
        if action is Ended:
            raise Ended
        return float(action)

    def next_state(self, timeout_s: float) -> tuple[float, ...] | None:
        """Return the simulator's next state, or None when it has finished; raise what it raised."""
        try:
            state = self._states.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the simulator sent no state within {timeout_s:g} s") from None
        if isinstance(state, BaseException):
            raise state
        return None if state is None else tuple(state)

    def act(self, action: float) -> None:
        """Let the callback return."""
        self._actions.put(action)

    def end(self, timeout_s: float) -> None:
        """End the thread. One that hangs in the simulator is a daemon, and ends with the process."""
        self._actions.put(Ended)
        self._thread.join(timeout_s)


class Building(gym.Env[np.ndarray, np.ndarray]):
    """Keep a building at 21 degrees. Observation [2]: temperature inside and outside. Action [1]: power, 0 to 1."""

    def __init__(self, timeout_s: float = 60.0, run: Callable[..., None] = simulate) -> None:
        self.observation_space = gym.spaces.Box(-50.0, 50.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.timeout_s, self._run = timeout_s, run
        self._simulation: Simulation | None = None
        self._last = np.zeros(2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """End the last simulation, and start one whose randomness follows from `seed`."""
        super().reset(seed=seed)
        self.close()
        self._simulation = Simulation(int(self.np_random.integers(2**31)), self._run)
        state = self._simulation.next_state(self.timeout_s)
        assert state is not None, "the simulator finished before its first step"
        self._last = np.array(state, np.float32)
        return self._last, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Give the simulator an action and wait for its next state; its last hour is a time limit."""
        assert self._simulation is not None, "reset comes first"
        self._simulation.act(float(action[0]))
        state = self._simulation.next_state(self.timeout_s)
        if state is not None:
            self._last = np.array(state, np.float32)
        return self._last, -abs(float(self._last[0]) - 21), False, state is None, {}

    def close(self) -> None:
        """End the simulation that is running."""
        if self._simulation is not None:
            self._simulation.end(self.timeout_s)
            self._simulation = None


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    result = dppo.train(
        dppo.Config(env_id=Building, total_timesteps=steps, norm_obs=True, norm_reward=True)
    )
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
