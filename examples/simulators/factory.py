"""Dispatch jobs in a small factory with SimPy, with action masks: pip install simpy; dppo train factory:make.

The environment runs SimPy from one decision to the next: a step takes as much simulated time as it happens to take.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import simpy

KINDS, ROOM = 3, 5
EVERY, WORK, SET_UP, SHIFT = (3.0, 4.0, 6.0), (1.0, 1.2, 1.5), 1.0, 480.0  # minutes


class Factory(gym.Env[np.ndarray, int]):
    """One machine makes three kinds of products, and has to be set up when the kind changes.

    Observation [10]: orders that wait, of each kind; the age of the oldest of each; the kind that the machine is set up
    for; the time. Action: the kind to make next, or 3 to wait for the next order; kinds without an order are masked.
    Reward: minus the minutes that orders have waited since the last decision, in hundreds; minus 1 for each that found
    no room.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, np.inf, (3 * KINDS + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(KINDS + 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._world, self._kind, self._lost = simpy.Environment(), 0, 0
        self._orders: list[list[float]] = [[] for _ in range(KINDS)]  # the times at which they came
        for kind in range(KINDS):
            self._world.process(self._order(kind))
        self._arrival = self._world.event()
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        began, self._lost = self._world.now, 0
        self._world.run(
            self._world.process(self._make(int(action)) if action < KINDS else self._wait())
        )
        waiting = sum(
            self._world.now - max(began, time) for orders in self._orders for time in orders
        )
        reward = -waiting / 100 - self._lost
        return self._seen(), reward, False, self._world.now >= SHIFT, {}

    def action_masks(self) -> np.ndarray:
        """Return which actions are allowed."""
        return np.array([*(bool(orders) for orders in self._orders), True])

    def _order(self, kind: int) -> Any:
        while True:
            yield self._world.timeout(self.np_random.exponential(EVERY[kind]))
            if len(self._orders[kind]) == ROOM:
                self._lost += 1
                continue
            self._orders[kind].append(self._world.now)
            self._arrival.succeed()
            self._arrival = self._world.event()

    def _make(self, kind: int) -> Any:
        self._orders[kind].pop(0)
        if kind != self._kind:
            yield self._world.timeout(SET_UP)
            self._kind = kind
        yield self._world.timeout(WORK[kind] * self.np_random.uniform(0.8, 1.2))

    def _wait(self) -> Any:
        yield self._arrival | self._world.timeout(5.0)

    def _seen(self) -> np.ndarray:
        ages = [(self._world.now - orders[0]) / 10 if orders else 0.0 for orders in self._orders]
        ready = np.eye(KINDS)[self._kind]
        return np.array(
            [*map(len, self._orders), *ages, *ready, self._world.now / SHIFT], np.float32
        )


def make() -> Factory:
    """Return the environment."""
    return Factory()
