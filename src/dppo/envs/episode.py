"""CheckedEnv: one environment with its open episode; every result is checked, and errors name the place."""

import math
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from dppo.envs.checks.faults import user_traceback
from dppo.envs.checks.masks import MaskReader
from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.checks.returned import LARGEST_REWARD, OLD_API, BadResult, describe_bad, flag_of, reward_of
from dppo.errors import EnvFault, EnvironmentFault
from dppo.numerics.arithmetic import changed
from dppo.ppo.exchange.records import Episode
from dppo.process_state.borders import Guard
from dppo.process_state.forks import Forks
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MASK, Spaces
from dppo.user_code import in_a_line

NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
FOUR_VALUES = "(expected 5, got 4)"  # in the ValueError of a wrapper around a step of the old API
MOST_BITS = 1000  # of an integer, for a float to hold it
Measured = tuple[int, float, float, float]
"""Number of values, their sum, the least and the largest."""


@dataclass(eq=False)
class CheckedEnv:
    """Step and reset one environment of a group, check what it returns, and keep count of its open episode."""

    env: Any
    index: int
    _: KW_ONLY
    owner: str
    """Prefix of messages."""
    spaces: Spaces
    checks: SpaceChecks
    episode_seed: Callable[[int, int], int]
    """Of the index of the environment and of the episode."""
    alone: bool = True
    """False for a row of an environment that steps several: its episode depends on the actions of all."""

    def __post_init__(self) -> None:
        self.episode, self.episode_return, self.length = 0, 0.0, 0
        self.options: dict[str, Any] | None = None  # of the reset of the open episode
        self.offers_mask = False  # the info of a reset held an action mask
        self.last_obs = np.empty(0)  # as the environment returned it; nothing writes to it again
        self.take(self.env)

    def take(self, env: Any) -> None:
        """Step this environment from now on."""
        self.env, self._masks = env, None if self.spaces.mask is None else MaskReader(env, self.spaces)
        self.guard = Guard(self.owner.partition("(")[2].rstrip(")") or self.owner)  # alike for all samplers

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step the environment; raise EnvironmentFault, with a `place`, if it raises or returns something invalid."""
        guard = self.guard
        try:
            if guard.arithmetic is not None:
                guard.enter()
            answer: Any = self.env.step(action)
            if changed() or guard.arithmetic is not None or guard.process != Forks.number:  # quicker than a call
                guard.leave()
            try:
                returned, reward, terminated, truncated, info = answer
                # Identity answers in the shortest time; other booleans, such as NumPy's, are rare.
                if not ((terminated is False or terminated is True) and (truncated is False or truncated is True)):
                    terminated, truncated = flag_of(terminated), flag_of(truncated)
            except Exception:
                raise BadResult(describe_bad(answer, step=True)) from None
            seen = (self.checks.pack_last if terminated else self.checks.pack)(returned)
            if type(reward) is not float or not abs(reward) <= LARGEST_REWARD:
                reward = reward_of(reward)
            if self._masks is not None:
                seen = self._masks.beside(seen, info, ended=terminated or truncated)
        except BadResult as error:
            raise self._fault("step", f"returned {error}.") from None
        except BaseException as error:
            guard.leave(error)
            raise self._raised("step", error) from None
        self.episode_return += reward
        self.length += 1
        self.last_obs = seen
        return seen, reward, terminated, truncated, info

    def reset(self, episode: int, options: dict[str, Any] | None = None) -> np.ndarray:
        """Start the episode with this index, and return its first observation; raise as `step` does."""
        self.episode, self.episode_return, self.length, self.options = episode, 0.0, 0, options
        more = {} if options is None else {"options": deepcopy(options)}
        seed = self.episode_seed(self.index, episode)
        try:
            answer = self.guard.call(partial(self.env.reset, seed=seed, **more))
        except BadResult as error:  # of several rows
            raise self._fault("reset", f"returned {error}.") from None
        except BaseException as error:
            raise self._raised("reset", error) from None
        if problem := self.checks.change(self.index, self.env):
            raise self._fault("reset", problem)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self._fault("reset", f"returned {describe_bad(answer, step=False)}.")
        try:
            seen = self.checks.pack(answer[0])
            if self._masks is not None:
                seen = self._masks.beside(seen, answer[1], ended=False)
        except BadResult as error:
            old = "" if isinstance(answer[1], dict) else OLD_API
            raise self._fault("reset", f"returned {error}{old}.") from None
        except BaseException as error:
            raise self._raised("reset", error) from None
        self.offers_mask, self.last_obs = isinstance(answer[1], dict) and MASK in answer[1], seen
        return seen

    def finished(self, info: Any, end: int) -> Episode:
        """Describe the open episode, which has ended with `info` after `end` steps of the segment."""
        success = info.get("is_success") if isinstance(info, dict) else None
        unknown = success is None or np.any(np.not_equal(success, success))  # NaN
        solved = None if unknown else bool(np.all(success))
        of = self.checksum(), numbers_in(info), deepcopy(self.options)  # observers may change theirs
        return Episode(self.index, self.episode, self.episode_return, self.length, solved, end, *of, alone=self.alone)

    def checksum(self) -> int:
        """Return a checksum of the latest observation, as the environment returned it, and of the return so far."""
        return zlib.crc32(np.float64(self.episode_return).tobytes(), zlib.crc32(self.last_obs.tobytes()))

    def place(self, episode: int, step: int) -> str:
        """Name a step of an episode of this environment in a message; step 0 is the reset."""
        seed = self.episode_seed(self.index, episode)
        phase = "step" if step else "reset"
        return f"{self.owner}, env {self.index}: {phase} of episode {episode} (seed {seed}, step {step})"

    def _fault(self, phase: str, what: str, error: str = "invalid", traceback: str = "") -> EnvironmentFault:
        """Return a fault of the step or reset that was made last, in words that follow its place."""
        step, seed = self.length + (phase == "step"), self.episode_seed(self.index, self.episode)
        last_obs = np.array2string(self.last_obs, threshold=100) if step else ""
        more: dict[str, Any] = {"last_obs": last_obs, "options": deepcopy(self.options), "alone": self.alone}
        place = EnvFault(phase, error, traceback, self.index, self.episode, seed, step, **more)
        return EnvironmentFault(f"{self.place(self.episode, step)} {what}", traceback, place)

    def _raised(self, phase: str, error: BaseException) -> BaseException:
        """Return the fault of an environment that raised `error`; return a signal that ends the run as it is."""
        if isinstance(error, INTERRUPTIONS):
            return error
        summary = in_a_line(error)
        no_seed = phase == "reset" and isinstance(error, TypeError) and "'seed'" in str(error)
        four_values = phase == "step" and isinstance(error, ValueError) and FOUR_VALUES in str(error)
        if no_seed or four_values:
            return self._fault(phase, f"raised {summary}{OLD_API}", type(error).__name__, user_traceback(error))
        if phase == "step":
            try:
                self.checks.check_limits(self.spaces.as_returned(self.last_obs))
            except BadResult as before:
                summary += f" (the environment had returned {before})"
        return self._fault(phase, f"raised {summary}", type(error).__name__, user_traceback(error))


def numbers_in(info: Any) -> dict[str, float]:
    """Return the finite numbers of an info by name."""
    items = info.items() if isinstance(info, dict) else ()
    found = ((key, value) for key, value in items if isinstance(value, NUMBERS))
    small = ((key, value) for key, value in found if not isinstance(value, int) or value.bit_length() <= MOST_BITS)
    return {str(key): float(value) for key, value in small if math.isfinite(value)}


class InfoMeter:
    """Sums up some numbers in the info of a sampler's env steps, in the order of these."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys, self._seen = keys, dict[str, Measured]()

    def watch(self, env: Any) -> Any:
        """Return `env`, whose steps are measured from now on."""
        step, reset = env.step, env.reset

        def unmeasured(*args: Any, **arguments: Any) -> Any:
            seen = self._seen.copy()
            try:
                return reset(*args, **arguments)
            finally:
                self._seen = seen  # steps that an environment makes in its reset are not env steps

        def measured(action: Any) -> Any:
            answer = step(action)
            if isinstance(answer, tuple | list) and len(answer) == 5 and isinstance(answer[4], dict):
                for key, value in numbers_in({key: answer[4][key] for key in self._keys if key in answer[4]}).items():
                    count, total, low, high = self._seen.get(key, (0, 0.0, value, value))
                    self._seen[key] = count + 1, total + value, min(low, value), max(high, value)
            return answer

        env.step, env.reset = measured, unmeasured
        return env

    def take(self) -> dict[str, Measured]:
        """Return what was measured since the last call."""
        seen, self._seen = self._seen, {}
        return seen
