"""Wrappers for environments of packages, which their users cannot correct: `--wrappers dppo.envs.wrappers:old_api`."""

from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.closing import close


def old_api(env: Any) -> gym.Env[Any, Any]:
    """Return an environment with the API of Gym before 0.26 with Gymnasium's API.

    Its reset may take no seed, and return the observation alone; its step may return a single flag. The wrappers that
    `gymnasium.make` puts around it stay where they are.
    """
    if not isinstance(env, gym.Wrapper):
        return _Adapted(env)
    innermost = env
    while isinstance(innermost.env, gym.Wrapper):
        innermost = innermost.env
    innermost.env = _Adapted(innermost.env)
    return env


class _Adapted(gym.Env[Any, Any]):
    """An environment of the old API, which may not be a gymnasium.Env."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.metadata = getattr(env, "metadata", {})
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while it is copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Seed the environment if it has a method `seed`, and start an episode; options are not passed on."""
        super().reset(seed=seed)
        seed_method = getattr(self.env, "seed", None)
        if callable(seed_method):
            seed_method(seed)
        answer = self.env.reset()
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
            return answer
        return answer, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step; `info["TimeLimit.truncated"]` distinguishes a time limit from an end."""
        answer = self.env.step(action)
        if len(answer) != 4:
            return tuple(answer)
        obs, reward, done, info = answer
        is_time_limit = bool(info.get("TimeLimit.truncated", False))
        return obs, reward, bool(done) and not is_time_limit, bool(done) and is_time_limit, info

    def render(self) -> Any:
        """Return the image that the environment shows, in the old way if it has no render_mode."""
        if self.render_mode is None and not hasattr(self.env, "render_mode"):
            return self.env.render(mode="rgb_array")
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        close(self.env)


def no_limits(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return an environment with observations of floats without limits, for one that exceeds its own."""
    space = _without_limits(env.observation_space)
    return gym.wrappers.TransformObservation(env, lambda obs: obs, space)


def _without_limits(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({name: _without_limits(part) for name, part in space.spaces.items()})
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([_without_limits(part) for part in space.spaces])
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return gym.spaces.Box(-np.inf, np.inf, space.shape, space.dtype)
    return space


class SummedReward(gym.RewardWrapper[Any, Any]):
    """Returns the sum of rewards that are arrays or lists: of several objectives, or of several agents."""

    def reward(self, reward: Any) -> float:
        return float(np.sum(reward))
