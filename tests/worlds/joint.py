"""Environments with sub-environments: vectors of every kind, and agents that share an episode."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from worlds.acting import Actuated, Masked
from worlds.faulty import is_first
from worlds.observed import Everything

LOCK = threading.Lock()
ENDS = {"ann": 3, "bob": 5, "cid": 8}
"""The step after which an agent leaves."""


def cartpole() -> gym.Env[Any, Any]:
    """Return CartPole with a time limit that is often reached."""
    return TimeLimit(CartPoleEnv(), 30)


def masked() -> gym.Env[Any, Any]:
    return Masked(source="info")


def everything() -> gym.Env[Any, Any]:
    return Everything()


VECTORS: dict[str, Any] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


def vector(
    num_envs: int, of: str = "cartpole", kind: str = "sync", mode: str = "NextStep", **options: Any
) -> VectorEnv:
    """Return a vector of Gymnasium's, of environments of this module; a name with a colon is an action space."""
    if ":" in of:
        make = partial(Actuated, of.removeprefix("actions:"))
    else:
        make = globals()[of]
    vectors: VectorEnv = VECTORS[kind](
        [make] * num_envs, autoreset_mode=AutoresetMode(mode), **options
    )
    return vectors


def four(of: str) -> VectorEnv:
    """Return a vector whose number of sub-environments is its own affair."""
    return vector(4, of)


class Native(VectorEnv):
    """A vector that resets its sub-environments by itself. Number i counts its steps, and ends after 2 + i of them.

    Those of even number terminate, the others are truncated. The second element of an observation is the episode.
    """

    single_observation_space = gym.spaces.Box(0, np.inf, (2,), np.float32)
    single_action_space = gym.spaces.Discrete(4)

    def __init__(
        self, num_envs: int, mode: str, *, obeys: bool = False, fails_at: int = -1
    ) -> None:
        self.num_envs = num_envs
        self._mode = AutoresetMode(mode)
        self._obeys = obeys
        self._fails_at = fails_at
        self.metadata = {"autoreset_mode": self._mode}
        self.seeds: list[Any] = []
        self._steps = self._episodes = np.zeros(num_envs, int)
        self._over = np.zeros(num_envs, bool)
        self._taken = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        mask = options["reset_mask"] if options and self._obeys else np.ones(self.num_envs, bool)
        self._steps = np.where(mask, 0, self._steps)
        self._over = self._over & ~mask
        self._episodes = self._episodes + mask
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self._taken += 1
        if self._taken == self._fails_at:
            raise OSError("the simulator is gone")
        index = np.arange(self.num_envs)
        rests = self._over & (self._mode is AutoresetMode.NEXT_STEP)
        self._steps = np.where(rests, 0, self._steps + 1)
        self._episodes = self._episodes + rests
        over = ~rests & (self._steps == 2 + index)
        rewards = np.where(rests, 0.0, np.asarray(actions) + 0.5)

        info = {}
        if self._mode is AutoresetMode.SAME_STEP and over.any():
            final_info = {"is_success": over.copy(), "_is_success": over}
            info = {"final_obs": self._seen(), "final_info": final_info}
            self._steps = np.where(over, 0, self._steps)
            self._episodes = self._episodes + over
        self._over = over
        terminated = over & (index % 2 == 0)
        truncated = over & (index % 2 == 1)
        return self._seen(), rewards, terminated, truncated, info

    def _seen(self) -> np.ndarray:
        return np.stack([self._steps, self._episodes], 1).astype(np.float32)


class Agents:
    """A parallel environment, as those of PettingZoo. The agents leave after 3, 5 and 8 steps; the last one is cut off.

    Each sees the number of steps, a number of the episode that follows from its seed, and who is there. With `reuses`,
    a reset and a step return the same arrays and infos, filled anew.
    """

    def __init__(
        self, *, fails_at: int = -1, late: bool = False, odd: bool = False, reuses: bool = False
    ) -> None:
        self.possible_agents = ["ann", "bob", "cid"]
        self._arrays = (
            {agent: np.empty(5, np.float32) for agent in self.possible_agents} if reuses else {}
        )
        self._infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.possible_agents}
        self.agents: list[str] = []
        self.seeds: list[Any] = []
        self._fails_at = fails_at
        self._late = late
        self._odd = odd
        self._taken = 0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        is_odd = self._odd and agent == "bob"
        size = 6 if is_odd else 5
        return gym.spaces.Box(-10, 10, (size,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.agents = self.possible_agents[: 2 if self._late else 3]
        self._steps = 0
        self._number = np.random.default_rng(seed).normal()
        return self._seen(self.agents), self._told(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        assert sorted(actions) == sorted(self.agents)
        self._steps = self._steps + 1
        self._taken = self._taken + 1
        if self._taken == self._fails_at:
            raise OSError("the simulator is gone")

        acted = self.agents
        stay = [agent for agent in acted if ENDS[agent] > self._steps]
        comes = ["cid"] if self._late and self._steps == 2 else []
        self.agents = stay + comes
        self._number += 0.1 * sum(actions.values())

        observations = self._seen([*acted, *self.agents])
        infos = self._told(list(observations))
        rewards = {}
        terminated = {}
        truncated = {}
        for agent in observations:
            is_over = agent not in stay
            rewards[agent] = float(actions.get(agent, 0))
            terminated[agent] = is_over and agent != "cid"
            truncated[agent] = is_over and agent == "cid" and agent in acted
            if is_over:
                infos[agent]["is_success"] = True
        return observations, rewards, terminated, truncated, infos

    def _seen(self, agents: list[str]) -> dict[str, np.ndarray]:
        there = [float(agent in self.agents) for agent in self.possible_agents]
        observation = np.array([self._steps, np.tanh(self._number), *there], np.float32)
        for array in self._arrays.values():
            array[:] = observation
        return {agent: self._arrays.get(agent, observation.copy()) for agent in agents}

    def _told(self, agents: list[str]) -> dict[str, dict[str, Any]]:
        """Return infos, each with something that cannot be copied."""
        for agent in agents:
            if self._arrays:
                self._infos[agent].clear()
            else:
                self._infos[agent] = {}
            self._infos[agent]["lock"] = LOCK
        return {agent: self._infos[agent] for agent in agents}

    def close(self) -> None:
        self.agents = []


def agents(**settings: Any) -> Agents:
    return Agents(**settings)


def deadly(
    world: str, world_kwargs: dict[str, Any], marker: str, at_step: int, num_envs: int
) -> Any:
    """Return an environment of this module. The first instance to reach step `at_step` kills its process.

    The file `marker` shows that it has happened.
    """
    if world.endswith(":vector"):
        world_kwargs = world_kwargs | {"num_envs": num_envs}
    env = globals()[world.partition(":")[2]](**world_kwargs)
    step = env.step
    numbers = count(1)

    def step_or_die(actions: Any) -> Any:
        if next(numbers) == at_step and is_first(Path(marker)):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(actions)

    env.step = step_or_die
    return env
