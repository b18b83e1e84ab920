"""Parallel environments of PettingZoo, whose agents share one policy: each agent is a row."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dppo.envs.joint import JointEnv, Row
from dppo.envs.spaces.leaves import short
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions


class AgentRows(JointEnv):
    """A parallel environment. An agent that is gone, or not there yet, stands still until the next episode of all."""

    shared = True

    def __init__(self, made: Any, make: Callable[[], "AgentRows"]) -> None:
        """Take over `made`; raise ConfigError if its agents have different spaces."""
        self._names = list(made.possible_agents)
        super().__init__(made, make, len(self._names))
        for kind in ("observation_space", "action_space"):
            first, *others = [(name, getattr(made, kind)(name)) for name in self._names]
            for name, space in others:
                if space != first[1]:
                    raise ConfigError(
                        f"env_id: agents share one policy, so that their spaces must be equal, but the {kind} of "
                        f"{first[0]} is {short(first[1])}, and that of {name} is {short(space)}. Pad them, with "
                        f"supersuit.pad_observations_v0 or pad_action_space_v0 for instance."
                    )
            setattr(self, kind, first[1])

    def step(self, actions: np.ndarray, space: Actions) -> None:
        """Step the agents that are there; if none is left, begin the next episode."""
        each, there = space.each(actions), set(self.env.agents)
        chosen = {name: each[row.index] for name, row in zip(self._names, self.rows, strict=True) if name in there}
        obs, rewards, terminated, truncated, infos = self.env.step(chosen)
        over = not self.env.agents
        for name, row in zip(self._names, self.rows, strict=True):
            if name in there:
                ends = [terminated[name], truncated[name] or (over and not terminated[name])]
                row.answer, row.present = (obs[name], rewards[name], *ends, infos.get(name, {})), True
                row.waiting = any(ends)
            else:
                row.stand_still(ended=over)
                if name in self.env.agents:  # it acts from now on
                    row.answer, row.waiting = (obs[name], 0.0, False, False, infos.get(name, {})), False
        if over and not self.once:
            self._begin_all(self.next_seed(0))

    def begin(self, row: Row, seed: int) -> None:
        """Begin the next episode of all agents."""
        self._begin_all(seed)
        self.restarts += 1

    def _begin_all(self, seed: int) -> None:
        obs, infos = self.env.reset(seed=seed)
        other = next(name for name in self._names if name in obs)
        for name, row in zip(self._names, self.rows, strict=True):
            shown = name if name in obs else other
            row.first = obs[shown], infos.get(shown, {})
