"""Environments that crash, hang, drift, or reveal an off-by-one.

Actors import this module by name: `testbeds:crashing_cartpole`.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit

from dppo.envs.make import make_env


def check_number(setting: str, value: Any, why: str, least: float) -> None:
    """Raise ValueError unless `value` is a finite number of at least `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        raise ValueError(f"{setting}={value!r}: {why} must be a finite number of at least {least:g}.")


def check_choice(setting: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{setting}={value!r}: must be one of {', '.join(known)}.")


class CrashingSimulator(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fails at one place: in a step, in a reset or in its constructor.

    `how` is "raise", "interrupt" (KeyboardInterrupt), "bare" (BaseException), "exit" (code 13), "kill" (SIGKILL to
    its own process) or "hang". `where` is "step": step `at_step` (1, 2, ...) of episode `at_episode` (0, 1, ...) or,
    if `at_episode` is None, of all episodes together; "reset": the reset that begins that episode; or "constructor".
    Each instance counts its own episodes and steps. With `marker`, the path of a file that does not exist yet, only one
    of all processes that see the path fails: the one that creates the file.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        how: str = "raise",
        where: str = "step",
        at_step: int = 1,
        at_episode: int | None = 0,
        marker: str | None = None,
    ) -> None:
        check_choice("how", how, ("raise", "interrupt", "bare", "exit", "kill", "hang"))
        check_choice("where", where, ("step", "reset", "constructor"))
        check_number("at_step", at_step, "the step that fails, counted from 1,", 1)
        if at_episode is not None:
            check_number("at_episode", at_episode, "the episode that fails, counted from 0,", 0)
        super().__init__(env)
        self._how, self._where, self._at_step, self._at_episode = how, where, at_step, at_episode
        self._marker = None if marker is None else Path(marker)
        self._episode, self._steps, self._steps_of_all = -1, 0, 0
        self._fail_if("constructor", here=True)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._steps = self._episode + 1, 0
        self._fail_if("reset", here=self._episode == self._at_episode)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps, self._steps_of_all = self._steps + 1, self._steps_of_all + 1
        place = (None, self._steps_of_all) if self._at_episode is None else (self._episode, self._steps)
        self._fail_if("step", here=place == (self._at_episode, self._at_step))
        return self.env.step(action)

    def _fail_if(self, where: str, *, here: bool) -> None:
        if where != self._where or not here or not self._is_first():
            return
        if self._how == "exit":
            os._exit(13)
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self._how == "hang":
            time.sleep(3600.0)
        if self._how == "interrupt":
            raise KeyboardInterrupt
        if self._how == "bare":
            raise BaseException("neither an error nor an exit")
        place = "" if where == "constructor" else f" (episode {self._episode}, step {self._steps})"
        raise RuntimeError(f"the simulator failed in its {where}{place}")

    def _is_first(self) -> bool:
        if self._marker is None:
            return True
        try:
            self._marker.touch(exist_ok=False)  # atomic: only one of several processes creates it
        except FileExistsError:
            return False
        return True


def crashing_cartpole(**failure: Any) -> gymnasium.Env[Any, Any]:
    """Return CartPole-v1 that fails; `failure` are the arguments of CrashingSimulator."""
    return TimeLimit(CrashingSimulator(CartPoleEnv(), **failure), 500)


def crashing(world: str, world_kwargs: dict[str, Any], **failure: Any) -> gymnasium.Env[Any, Any]:
    """Return the environment `world`, named as in `env_id`, that fails; `failure` are those of CrashingSimulator."""
    return CrashingSimulator(make_env(world, world_kwargs), **failure)


class DriftingSimulator(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose gravity is drawn at each reset, independent of the seed.

    Neither its spec nor the first observation of an episode shows this; only a replay does.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        cartpole: Any = self.env.unwrapped
        cartpole.gravity = 9.8 + np.random.default_rng().uniform(0.01, 0.1)
        return self.env.reset(seed=seed, options=options)


def drifting_cartpole() -> gymnasium.Env[Any, Any]:
    """Return CartPole-v1 that no seed reproduces."""
    return TimeLimit(DriftingSimulator(CartPoleEnv()), 500)


class PointMass(gymnasium.Env[Any, Any]):
    """Push a point to a goal on a square.

    Observation [6]: position, velocity, goal. Action [2]: force, from -1 to 1. Reward: minus the distance to
    the goal. `is_success`: the point is within 0.1 of the goal.
    """

    def __init__(self) -> None:
        high = np.array([2, 2, 1, 1, 1, 1], np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._position = self._velocity = self._goal = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-1, 1, 2)
        self._velocity = np.zeros(2)
        self._goal = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        force = np.clip(np.asarray(action, np.float64), -1, 1)
        self._velocity = 0.8 * self._velocity + 0.2 * force
        self._position = np.clip(self._position + 0.2 * self._velocity, -2, 2)
        away_x, away_y = self._goal - self._position
        distance = math.sqrt(away_x * away_x + away_y * away_y)
        return self._observation(), -distance, False, False, {"is_success": distance < 0.1}

    def _observation(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity, self._goal]).astype(np.float32)


def point_mass() -> gymnasium.Env[Any, Any]:
    """Return PointMass with episodes of 50 steps."""
    return TimeLimit(PointMass(), 50)


class Counting(gymnasium.Env[Any, Any]):
    """The observation is the number of steps since the reset, the reward is the action.

    It terminates at step `terminate_after` and is truncated at step `truncate_after`, if given.
    """

    def __init__(
        self, *, num_actions: int = 4, terminate_after: int | None = None, truncate_after: int | None = None
    ) -> None:
        check_number("num_actions", num_actions, "the number of actions", 1)
        for setting, value in (("terminate_after", terminate_after), ("truncate_after", truncate_after)):
            if value is not None:
                check_number(setting, value, "the last step, counted from 1,", 1)
        self.observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(num_actions)
        self._terminate_after, self._truncate_after = terminate_after, truncate_after
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        terminated, truncated = self._steps == self._terminate_after, self._steps == self._truncate_after
        return np.array([self._steps], np.float32), float(action), terminated, truncated, {}
