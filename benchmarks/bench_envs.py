"""Environments of the benchmarks, the same for every library: this file imports none of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

POSITIONS = "bench_envs:cartpole_positions"


class Sleeping(gym.Wrapper):
    """Make each step take `step_s` seconds, dynamics included, as in dppo/SlowCartPole-v0."""

    def __init__(self, env: gym.Env, step_s: float) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        started = time.perf_counter()
        result = self.env.step(action)
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - started)))
        return result


class Uneven(gym.Wrapper):
    """Make steps take times that are drawn by the episode's seed."""

    def __init__(self, env: gym.Env, draw_s: Callable[[np.random.Generator], float]) -> None:
        super().__init__(env)
        self._draw_s, self._times = draw_s, np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._times = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        time.sleep(self._draw_s(self._times))
        return self.env.step(action)


def uneven_cartpole(
    mean_s: float = 0.01,
    sigma: float = 1.0,
    slow: float = 1.0,
    mark: str = "",
    spikes: bool = False,
) -> gym.Env:
    """Make CartPole whose steps take log-normal times; with `spikes`, 1 % of them 200 ms and the others 8.

    They take `slow` times as long in the process that first creates `mark`.
    """
    if mark:
        with contextlib.suppress(FileExistsError), open(mark, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        mean_s *= slow if Path(mark).read_text(encoding="utf-8") == str(os.getpid()) else 1

    def draw_s(times: np.random.Generator) -> float:
        if spikes:
            return 0.2 if times.random() < 0.01 else 0.008
        return float(mean_s * np.exp(sigma * times.standard_normal() - sigma**2 / 2))

    return Uneven(gym.make("CartPole-v1"), draw_s)


class SlowToStart(gym.Wrapper):
    """Make each step take `step_s` and each reset `reset_s` seconds."""

    def __init__(self, env: gym.Env, step_s: float, reset_s: float) -> None:
        super().__init__(env)
        self._step_s, self._reset_s = step_s, reset_s

    def reset(self, **keywords: Any) -> Any:
        time.sleep(self._reset_s)
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return self.env.step(action)


def tanks(step_s: float = 0.0) -> gym.Env:
    """Make the plant of `examples/tanks.py`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    plant: Any = importlib.import_module("tanks")
    return plant.Tanks(step_s)


def slow_to_start(step_s: float = 0.04, reset_s: float = 2.0, steps: int = 50) -> gym.Env:
    """Make Pendulum that is slow, with episodes of `steps` steps."""
    return gym.wrappers.TimeLimit(
        SlowToStart(gym.make("Pendulum-v1").unwrapped, step_s, reset_s), steps
    )


class PositionsOnly(gym.ObservationWrapper):
    """Leave the velocities out: [position of the cart, angle of the pole]. The policy has to remember."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = gym.spaces.Box(
            space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


class Sensors(gym.ObservationWrapper):
    """Show some numbers of the state as `sensors`, and all of them as `state`, for a critic."""

    def __init__(self, env: gym.Env, sensors: list[int]) -> None:
        super().__init__(env)
        self._sensors = sensors
        state: Any = env.observation_space
        seen = gym.spaces.Box(state.low[sensors], state.high[sensors], dtype=np.float32)
        self.observation_space = gym.spaces.Dict({"sensors": seen, "state": state})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"sensors": observation[self._sensors], "state": observation}


def cartpole_sensors() -> gym.Env:
    """Make CartPole whose sensors have no velocities."""
    return Sensors(gym.make("CartPole-v1"), [0, 2])


def pendulum_sensors() -> gym.Env:
    """Make Pendulum whose sensors have the angle, and not its velocity."""
    return Sensors(gym.make("Pendulum-v1"), [0, 1])


class Stamping(gym.Wrapper):
    """Write the time of day into the file `stamp` at the first step of all processes."""

    def __init__(self, env: gym.Env, stamp: str) -> None:
        super().__init__(env)
        self._stamp: str | None = stamp

    def step(self, action: Any) -> Any:
        if self._stamp is not None:
            with contextlib.suppress(FileExistsError):
                file = os.open(self._stamp, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(file, repr(time.time()).encode())
                os.close(file)
            self._stamp = None
        return self.env.step(action)


class Squares(gym.Env):
    """Walk to the bright square, seen as an image: a task that a CNN learns within a minute.

    A grid of 5 x 5 fields, drawn as [40, 40, 1] bytes. Return: 1 at the goal, less 0.02 a step; at most 50 steps.
    """

    FIELDS, PIXELS, MOST_STEPS = 5, 8, 50
    observation_space = gym.spaces.Box(0, 255, (FIELDS * PIXELS, FIELDS * PIXELS, 1), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        here, goal = self.np_random.choice(self.FIELDS**2, 2, replace=False)
        self._here, self._goal = (
            np.array(divmod(int(field), self.FIELDS)) for field in (here, goal)
        )
        self._steps = 0
        return self._image(), {}

    def step(self, action: Any) -> Any:
        move = ((0, 1), (1, 0), (0, -1), (-1, 0))[int(action)]
        self._here = np.clip(self._here + move, 0, self.FIELDS - 1)
        self._steps += 1
        there = bool((self._here == self._goal).all())
        return self._image(), float(there) - 0.02, there, self._steps == self.MOST_STEPS, {}

    def _image(self) -> np.ndarray:
        image = np.zeros(self.observation_space.shape, np.uint8)
        for (row, column), colour in ((self._goal, 255), (self._here, 128)):
            y, x = row * self.PIXELS, column * self.PIXELS
            image[y : y + self.PIXELS, x : x + self.PIXELS] = colour
        return image


def make_large() -> gym.Env:
    """Make CartPole-v1 with a reward of 1000 a step."""
    return gym.wrappers.TransformReward(
        gym.make("CartPole-v1"), lambda reward: 1000 * float(reward)
    )


def make_atari(env_id: str) -> gym.Env:
    """Make a game that returns stacks of four frames of 84 x 84 grey pixels: [4, 84, 84] bytes.

    Source: Machado et al., "Revisiting the Arcade Learning Environment" (arXiv:1709.06009), with no-ops at the start.
    """
    import ale_py
    import cv2
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gym.make(env_id, frameskip=1)), 4)


def make_highway() -> gym.Env:
    """Make highway-fast-v0 seen from above: stacks of four frames of 84 x 64 grey pixels, [4, 84, 64] bytes.

    Overtake up to ten cars on three lanes: 20 actions, one a second. The reward of a step is 0 at 20 m/s or less, and 1
    at 30; the episode ends with a crash.
    """
    if os.environ.get("SDL_VIDEODRIVER") == "dummy":
        # highway-env draws nothing with it; without, it needs no display either
        del os.environ["SDL_VIDEODRIVER"]
    import highway_env

    gym.register_envs(highway_env)
    grey = [0.2989, 0.5870, 0.1140]
    pixels = {
        "type": "GrayscaleObservation",
        "observation_shape": (84, 64),
        "stack_size": 4,
        "weights": grey,
    }
    rewards = {"high_speed_reward": 1, "right_lane_reward": 0, "collision_reward": 0}
    traffic = {"duration": 20, "vehicles_count": 10}
    config = {
        "observation": pixels | {"scaling": 1.75},
        "offscreen_rendering": True,
        **traffic,
        **rewards,
    }
    return gym.make("highway-fast-v0", config=config)


def cartpole_positions() -> gym.Env:
    """Make CartPole without velocities."""
    return PositionsOnly(gym.make("CartPole-v1"))


def make(
    env_id: str = "CartPole-v1", step_s: float = 0.0, stamp: str | None = None, atari: bool = False
) -> gym.Env:
    """Make `env_id`, with `step_s` seconds per step, and with `stamp` if given; with `atari`, as `make_atari` does."""
    if env_id == POSITIONS:
        env = cartpole_positions()
    else:
        env = make_atari(env_id) if atari else gym.make(env_id)
    if step_s > 0:
        env = Sleeping(env, step_s)
    return env if stamp is None else Stamping(env, stamp)


def read_stamp(path: Path) -> float | None:
    """Return the time of the first step, in seconds since the epoch; None before it."""
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


class Doors(gym.Env):
    """Open one of two open doors out of 40, five times in a row: a task that only an action mask can solve.

    The observation does not show which doors are open; the mask does. Opening a closed door ends the episode. Return: 1
    for each time that the door with the smaller number was opened; the other open door ends the episode too.
    """

    DOORS = 40
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(DOORS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        self._draw()
        return np.zeros(1, np.float32), {}

    def _draw(self) -> None:
        self._open = self.np_random.choice(self.DOORS, 2, replace=False)

    def action_masks(self) -> np.ndarray:
        return np.isin(np.arange(self.DOORS), self._open)

    def step(self, action: Any) -> Any:
        self._steps += 1
        right = bool(action == min(self._open))
        self._draw()
        return (
            np.full(1, self._steps / 5, np.float32),
            float(right),
            not right,
            self._steps == 5,
            {},
        )


class Reach(gym.Env):
    """Push a mass to a goal, with the Dict observation of goal environments (gymnasium-robotics, panda-gym).

    Return: less the distance to the goal at each of 50 steps. Standing still gives -41 on average.
    """

    observation_space = gym.spaces.Dict(
        observation=gym.spaces.Box(-np.inf, np.inf, (4,), np.float64),
        achieved_goal=gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
        desired_goal=gym.spaces.Box(-1, 1, (2,), np.float64),
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at, self._goal = self.np_random.uniform(-1, 1, (2, 2))
        self._speed, self._steps = np.zeros(2), 0
        return self._observation(), {}

    def _observation(self) -> dict[str, np.ndarray]:
        state = np.concatenate([self._at, self._speed])
        return {
            "observation": state,
            "achieved_goal": self._at.copy(),
            "desired_goal": self._goal.copy(),
        }

    def step(self, action: Any) -> Any:
        self._speed = 0.8 * self._speed + 0.05 * np.asarray(action, np.float64)
        self._at = self._at + self._speed
        self._steps += 1
        distance = float(np.linalg.norm(self._at - self._goal))
        return (
            self._observation(),
            -distance,
            False,
            self._steps == 50,
            {"is_success": distance < 0.05},
        )


class Shop(gym.Env):
    """Dispatch 6 jobs on 4 machines: a job shop with a mask of the jobs that are not finished.

    Each job passes all machines in an order of its own. An action starts the next operation of a job as early as its
    machine and the job allow. Return: less the time until all is done, in units of the best bound (the busiest machine
    or the longest job); -1.72 for random schedules, -1.22 for the operation that can begin earliest.
    """

    JOBS, MACHINES = 6, 4
    observation_space = gym.spaces.Box(0, np.inf, (JOBS * (MACHINES + 4) + MACHINES,), np.float32)
    action_space = gym.spaces.Discrete(JOBS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._order = np.argsort(self.np_random.random((self.JOBS, self.MACHINES)), axis=1)
        self._durations = self.np_random.integers(1, 10, (self.JOBS, self.MACHINES)).astype(float)
        loads = np.bincount(self._order.ravel(), self._durations.ravel(), self.MACHINES)
        self._bound = max(loads.max(), self._durations.sum(axis=1).max())
        self._next = np.zeros(self.JOBS, int)
        self._jobs, self._machines = np.zeros(self.JOBS), np.zeros(self.MACHINES)
        return self._seen(), {}

    def action_masks(self) -> np.ndarray:
        return self._next < self.MACHINES

    def step(self, action: Any) -> Any:
        at, before = self._next[action], self._machines.max()
        machine, duration = self._order[action, at], self._durations[action, at]
        end = max(self._jobs[action], self._machines[machine]) + duration
        self._jobs[action] = self._machines[machine] = end
        self._next[action] += 1
        cost = (self._machines.max() - before) / self._bound
        return self._seen(), -cost, bool((self._next == self.MACHINES).all()), False, {}

    def _seen(self) -> np.ndarray:
        at = np.minimum(self._next, self.MACHINES - 1)
        rows = np.arange(self.JOBS)
        left = np.array([self._durations[job, done:].sum() for job, done in enumerate(self._next)])
        machine = self._order[rows, at]
        begin = np.maximum(self._jobs, self._machines[machine])
        columns = [
            np.eye(self.MACHINES)[machine] * self.action_masks()[:, None],
            self._next[:, None] / self.MACHINES,
        ]
        times = np.stack([self._durations[rows, at], left, begin - begin.min()], axis=1) / 10
        busy = (self._machines - self._machines.min()) / 10
        return np.concatenate([np.hstack([*columns, times]).ravel(), busy]).astype(np.float32)


def make_doorkey() -> gym.Env:
    """Make MiniGrid-DoorKey-5x5-v0: take the key, open the door, go to the goal; 1 - 0.9 * steps / 250."""
    import minigrid

    gym.register_envs(minigrid)
    return gym.make("MiniGrid-DoorKey-5x5-v0")
