"""Witness: an environment that keeps what it has returned last, as it was returned."""

from __future__ import annotations

from typing import Any

import numpy as np

from dppo.envs.episode import CheckedEnv, SkippedStep


class Witness:
    """Stands before an environment, whose results are converted to the form of storage later, and may lose parts."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.obs: Any = None
        """The latest observation, as the environment returned it."""
        self.is_present = True
        """False for an agent that has left its episode, which may go on without it."""

    def step(self, action: Any) -> Any:
        """Step the environment, and return its result unchecked."""
        try:
            answer = self._env.step(action)
        except SkippedStep as skipped:
            self.is_present = skipped.arrival is not None
            if skipped.arrival is not None:
                self.obs = skipped.arrival[0]
            raise
        self.obs = _first_item(answer)
        self.is_present = not _is_end(answer)
        return answer

    def reset(self, **arguments: Any) -> Any:
        """Reset the environment, and return its result unchecked."""
        answer = self._env.reset(**arguments)
        self.obs = _first_item(answer)
        self.is_present = True
        return answer

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # while it is copied
            raise AttributeError(name)
        return getattr(self._env, name)


def witness_of(sub_env: CheckedEnv) -> Witness:
    """Return the witness of a sub-environment, after putting it before the environment if there is none."""
    if not isinstance(sub_env.env, Witness):
        sub_env.take(Witness(sub_env.env))
    witness: Witness = sub_env.env
    return witness


def _first_item(answer: Any) -> Any:
    """Return the observation in a result; None in an invalid one, which is refused later."""
    if isinstance(answer, tuple | list) and answer:
        return answer[0]
    return None


def _is_end(answer: Any) -> bool:
    """Return whether the result of a step ends an episode; False for an invalid one."""
    is_valid = isinstance(answer, tuple | list) and len(answer) == 5
    flags = answer[2:4] if is_valid else ()
    return any(isinstance(flag, bool | np.bool_) and bool(flag) for flag in flags)
