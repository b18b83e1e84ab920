"""An environment whose observation has several leaves, and a sampler that reads them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from builders import sampler_of, spec_of
from gymnasium import spaces

from dppo.envs.spaces import dtype_of
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.networks.network import NetworkSpec, Outputs
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import leaves

ROBOT = spaces.Dict(
    arm=spaces.Tuple([spaces.Box(-9, 9, (2,), np.float64), spaces.Box(-9, 9, (), np.float32)]),
    camera=spaces.Box(0, 255, (2, 3, 1), np.uint8),
    gear=spaces.Discrete(5),
    lamps=spaces.MultiBinary(3),
)
OBS = dtype_of(ROBOT)


class Robot(gym.Env[Any, Any]):
    """All leaves depend on the seed and the actions; episodes are truncated after `length` steps."""

    observation_space = ROBOT
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 7) -> None:
        self._length = length
        self.steps = 0
        self._arm = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self._arm = self.np_random.normal(size=2)
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self._arm += self.np_random.normal(size=2) * 0.1 + action
        np.clip(self._arm, -9, 9, out=self._arm)
        return self.observation(), float(self._arm.sum()), False, self.steps == self._length, {}

    def observation(self) -> dict[str, Any]:
        return {
            # not in the order of the space
            "lamps": np.array([self.steps & 1, self.steps & 2, self.steps & 4], bool),
            "gear": self.steps % 5,
            "camera": np.full(
                (2, 3, 1), 10 * self.steps + int(self.np_random.integers(9)), np.uint8
            ),
            "arm": (self._arm, np.float32(self._arm.mean())),
        }


class ReadsLeaves(PPOAgent):
    """An agent that concatenates the leaves."""

    def _outputs(self, obs: np.ndarray, state: np.ndarray | None) -> Outputs:
        assert obs.dtype == OBS
        flat = [leaf.reshape(*obs.shape, -1) for leaf in leaves(obs).values()]
        return super()._outputs(np.concatenate(flat, axis=-1, dtype=np.float64), state)


def robot_sampler(num_steps: int) -> tuple[PPOSampler, NetworkSpec]:
    agent = ReadsLeaves(
        spec_of(DiscreteActions(3), obs_size=2 + 1 + 6 + 1 + 3, hidden_sizes=(8,), dtype="float32")
    )
    return sampler_of([Robot(7), Robot(5)], num_steps=num_steps, agent=agent)
