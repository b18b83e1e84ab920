"""Environments that fail: they crash, hang, drift, raise in the user's own lines, or return something invalid."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit

from dppo.envs.make import make_env
from worlds.episodic import Episodic

Env = gym.Env[Any, Any]


def is_first(marker: Path) -> bool:
    """Create the file `marker`; it exists already for all processes but the first that asks."""
    try:
        marker.touch(exist_ok=False)  # atomic
    except FileExistsError:
        return False
    return True


class CrashingSimulator(gym.Wrapper[Any, Any, Any, Any]):
    """Fails at one place: in a step, in a reset or in its constructor.

    `how` is "raise", "interrupt" (KeyboardInterrupt), "bare" (BaseException), "exit" (code 13), "kill" (SIGKILL to its
    own process), "sigint" (Ctrl-C in its own process, after which it continues) or "hang". `where` is one of:

    - "step": step `at_step` (1, 2, ...) of episode `at_episode` (0, 1, ...), or of all episodes together if
      `at_episode` is None;
    - "reset": the reset that begins that episode;
    - "constructor".

    Each instance counts its own episodes and steps. With `marker`, the path of a file that does not exist yet, only one
    of all processes that see the path fails: the one that creates the file.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        *,
        how: str = "raise",
        where: str = "step",
        at_step: int = 1,
        at_episode: int | None = 0,
        marker: str | None = None,
    ) -> None:
        super().__init__(env)
        self._how = how
        self._where = where
        self._at_step = at_step
        self._at_episode = at_episode
        self._marker = None if marker is None else Path(marker)
        self._episode = -1
        self._steps = 0
        self._steps_of_all = 0
        self._fail_if("constructor", here=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode += 1
        self._steps = 0
        self._fail_if("reset", here=self._episode == self._at_episode)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._steps_of_all += 1
        place = (
            (None, self._steps_of_all) if self._at_episode is None else (self._episode, self._steps)
        )
        self._fail_if("step", here=place == (self._at_episode, self._at_step))
        return self.env.step(action)

    def _fail_if(self, where: str, *, here: bool) -> None:
        if where != self._where or not here or not self._is_first():
            return
        if self._how == "exit":
            os._exit(13)
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "sigint":
            signal.raise_signal(signal.SIGINT)
            return
        while self._how == "hang":
            time.sleep(3600.0)
        if self._how == "interrupt":
            raise KeyboardInterrupt
        if self._how == "bare":
            raise BaseException("neither an error nor an exit")
        place = "" if where == "constructor" else f" (episode {self._episode}, step {self._steps})"
        raise RuntimeError(f"the simulator failed in its {where}{place}")

    def _is_first(self) -> bool:
        return self._marker is None or is_first(self._marker)


def crashing(
    world: str = "CartPole-v1", world_kwargs: dict[str, Any] | None = None, **failure: Any
) -> Env:
    """Return the environment `world`, named as in `env_id`, that fails; `failure` are those of CrashingSimulator."""
    return CrashingSimulator(make_env(world, world_kwargs or {}), **failure)


class DriftingSimulator(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose gravity is drawn at each reset, independent of the seed.

    Neither its spec nor the first observation of an episode shows this; only a replay does.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        cartpole: Any = self.env.unwrapped
        cartpole.gravity = 9.8 + np.random.default_rng().uniform(0.01, 0.1)
        return self.env.reset(seed=seed, options=options)


def drifting_cartpole() -> Env:
    """Return CartPole-v1 that no seed reproduces."""
    return TimeLimit(DriftingSimulator(CartPoleEnv()), 500)


def deadly(
    world: str, world_kwargs: dict[str, Any], folder: str, moments: Sequence[str], at_step: int
) -> Env:
    """Return the environment `world` that kills its process once at each of these moments.

    Moments are "constructor", "reset" and "step", that of number `at_step` of an instance. Files of these names in
    `folder` show that it has happened.
    """
    place: dict[str, Any] = {"constructor": {}, "reset": {"at_episode": 1}}
    place["step"] = {"at_episode": None, "at_step": at_step}
    env = make_env(world, world_kwargs)
    for moment in moments:
        marker = str(Path(folder) / moment)
        env = CrashingSimulator(env, how="kill", where=moment, marker=marker, **place[moment])
    return env


class LicenceError(Exception):
    """A user's own exception; with two arguments it cannot be unpickled, like many of them."""

    def __init__(self, server: str, code: int) -> None:
        super().__init__(f"{server} said {code}")


class Brittle(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at one place: in its constructor, in the reset that begins its second episode, or in its third step."""

    def __init__(self, where: str) -> None:
        if where == "constructor":
            raise LicenceError("licence server", 503)  # in constructor
        super().__init__(gym.make("CartPole-v1"))
        self._where = where
        self._resets = 0
        self._steps = 0

    def reset(self, **keywords: Any) -> Any:
        self._resets += 1
        if self._where == "reset" and self._resets == 2:
            raise LicenceError("licence server", 503)  # in reset
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._where == "step" and self._steps == 3:
            raise LicenceError("licence server", 503)  # in step
        return self.env.step(action)


def unlicensed(env: Any) -> Any:
    """Raise in place of a wrapper."""
    raise LicenceError("licence server", 503)


def line_that_raises(where: str) -> int:
    """Return the number of the line of this file that raises there."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# in {where}"))


class Faulty(Episodic):
    """Return one invalid value at step `at_step` of each episode in `episodes`.

    Other observations are `observe` of the number of steps, or that number itself.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        *,
        obs: Any = None,
        reward: Any = 1.0,
        terminated: Any = False,
        at_step: int = 3,
        episodes: Sequence[int] = (0,),
        length: int = 6,
        space: gym.Space[Any] | None = None,
        observe: Callable[[int], Any] | None = None,
    ) -> None:
        self.observation_space = space or gym.spaces.Box(-100, 100, (2,), np.float32)
        self._bad = (obs, reward, terminated)
        self._at_step = at_step
        self._episodes = episodes
        self._length = length
        self._valid = observe or (lambda steps: np.full(2, steps, self.observation_space.dtype))
        self.episode = -1

    def begin(self) -> None:
        self.episode += 1

    def step(self, action: Any) -> Any:
        self.steps += 1
        _, reward, terminated = self._bad if self._is_bad() else (None, 1.0, False)
        return self.observation(), reward, terminated, self.steps >= self._length, {}

    def _is_bad(self) -> bool:
        return self.steps == self._at_step and self.episode in self._episodes

    def observation(self) -> Any:
        if self._is_bad() and self._bad[0] is not None:
            return self._bad[0]
        return self._valid(self.steps)


class Unreliable(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that fails in a share of its steps and resets; the seed of the episode decides in which, and how.

    `kinds` are those of `FAILURES`. With `at`, each episode fails where the cart is farther to the right than that
    after 15 steps.
    """

    FAILURES = ("raise", "interrupt", "exit", "nan", "reward")

    def __init__(
        self,
        steps: float = 0.0,
        resets: float = 0.0,
        kinds: Sequence[str] = FAILURES,
        at: float = np.inf,
    ) -> None:
        super().__init__(TimeLimit(CartPoleEnv(), 500))
        self._steps = steps
        self._resets = resets
        self._kinds = kinds
        self._at = at
        self._random = np.random.default_rng()
        self._made = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._random = np.random.default_rng(seed)
        self._made = 0
        if self._random.random() < self._resets:
            raise LicenceError("licence server", 503)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._made += 1
        fails_by_chance = self._random.random() < self._steps
        is_far = obs[0] > self._at and self._made > 15
        if not fails_by_chance and not is_far:
            return obs, reward, terminated, truncated, info
        number = int(self._random.integers(len(self._kinds)))
        kind = self._kinds[number]
        if kind == "nan":
            return np.full(4, np.nan, np.float32), reward, False, False, info
        if kind == "reward":
            return obs, None, False, False, info
        if kind == "raise":
            raise LicenceError("licence server", 503)
        if kind == "exit":
            raise SystemExit(3)
        raise KeyboardInterrupt()
