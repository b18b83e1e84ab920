"""A space with several leaves, a scripted environment, and the arrays that a group of environments writes to."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from builders import group_of
from gymnasium import spaces

from dppo.envs.group import EnvGroup
from dppo.envs.spaces import dtype_of
from dppo.ppo.exchange.records import EnvLog, Incident, SamplerCarry

HAND = spaces.Box(-9, 9, (2,), np.float64)
ELBOW = spaces.Box(-9, 9, (), np.float32)
ROBOT = spaces.Dict(
    arm=spaces.Tuple([HAND, ELBOW]),
    camera=spaces.Box(0, 255, (2, 3, 1), np.uint8),
    gear=spaces.Discrete(5),
    lamps=spaces.MultiBinary(3),
)
OBS = dtype_of(ROBOT)
UNLIMITED = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Scripted(gym.Env[Any, Any]):
    """Returns given results and records actions; an episode of `length` steps is truncated."""

    def __init__(
        self,
        *,
        obs: Any = None,
        reward: Any = 1.0,
        at_step: int = 2,
        length: int = 10**9,
        space: gym.Space[Any] | None = None,
        actions: gym.Space[Any] | None = None,
        info: Any = None,
    ) -> None:
        self.observation_space = space or UNLIMITED
        self.action_space = actions or spaces.Discrete(3)
        self._obs = obs
        self._reward = reward
        self._at_step = at_step
        self._length = length
        self._info = info
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.steps = 0
        return self._answer(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Any]:
        self.actions.append(action)
        self.steps += 1
        reward = self._reward if self.steps == self._at_step else 1.0
        return (
            self._answer(),
            reward,
            False,
            self.steps >= self._length,
            {} if self._info is None else self._info,
        )

    def _answer(self) -> Any:
        if self._obs is not None and self.steps == self._at_step:
            return self._obs
        space = self.observation_space
        if space.shape is None:
            return space.sample()
        return np.full(space.shape, self.steps, space.dtype)


class Stepper:
    """A group, with the arrays and the log that a sampler would own."""

    def __init__(self, group: EnvGroup) -> None:
        num_envs = group.num_envs
        self.group = group
        self.obs = np.full(num_envs, 77, group.obs)
        self.rewards = np.full(num_envs, 777.0)
        self.terminated = np.ones(num_envs, bool)
        self.truncated = np.ones(num_envs, bool)
        self.valid = np.ones(num_envs, bool)
        self.log = EnvLog()

    def start(self) -> None:
        self.group.start(self.obs, self.log)

    def restore(self, carry: SamplerCarry, actions: tuple[np.ndarray, ...]) -> list[Incident]:
        return self.group.restore(carry, actions, self.obs, self.log)

    def step(self, actions: Any) -> dict[int, np.ndarray]:
        """Return the final observation of each environment at a time limit."""
        self.valid[:] = True
        self.log.time_limits.clear()
        rows = (
            np.asarray(actions),
            self.obs,
            self.rewards,
            self.terminated,
            self.truncated,
            self.valid,
        )
        self.group.step(rows, self.log)
        return {limit.env: limit.obs for limit in self.log.time_limits}


def started(*envs: gym.Env[Any, Any]) -> Stepper:
    stepper = Stepper(group_of(envs))
    stepper.start()
    return stepper
