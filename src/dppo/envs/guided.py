"""GuidedEnv: an environment with a controller, which sees each observation and computes its own action."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.episode import CheckedEnv, GroupSettings, ResetOptions, StepResult
from dppo.envs.guidance import Guidance
from dppo.envs.witness import Witness


class GuidedEnv(CheckedEnv):
    """An environment whose controller follows its episode from the reset on, also while the episode is replayed.

    After a replay, in any process, a controller with a state is where it was before.
    """

    def __init__(
        self, env: Any, index: int, settings: GroupSettings, checks: SpaceChecks, guidance: Guidance
    ) -> None:
        """Wrap `env`, and make its controller."""
        super().__init__(env, index, settings, checks)
        self._guidance = guidance
        self._guide = guidance.make(env)

    @override
    def take(self, env: Any) -> None:
        self._witness = Witness(env)
        super().take(self._witness)

    @override
    def step(self, action: Any) -> StepResult:
        result = super().step(action)
        _, _, terminated, truncated, _ = result
        if self._guidance.is_on and not (terminated or truncated):
            self._ask()
        return result

    @override
    def reset(self, episode: int, options: ResetOptions = None) -> np.ndarray:
        obs = super().reset(episode, options)
        if self._guidance.is_on:
            self._guide.begin(episode, self.settings.episode_seed(self.index, episode))
            self._ask()
        return obs

    def _ask(self) -> None:
        action = self._guide.act(self._witness.obs)
        intended = self.settings.spaces.actions.from_env(action)
        self._guidance.intended[self.index] = intended
