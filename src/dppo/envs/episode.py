"""CheckedEnv: one environment with its open episode; every result is checked, and errors name the place."""

import math
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from dppo.envs.activity import ActivityRecord
from dppo.envs.checks.faults import user_traceback
from dppo.envs.checks.masks import MaskReader
from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.checks.returned import MAX_REWARD, OLD_API, BadResult, bad_form, flag_of, reward_of
from dppo.envs.guidance import Guidance
from dppo.errors import GIVEN_UP, EnvFault, EnvironmentFault
from dppo.numerics.arithmetic import changed
from dppo.ppo.exchange.records import Episode, FatalStep, Incident, InfoSum
from dppo.process_state.borders import Guard
from dppo.process_state.forks import FORKS
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import MASK, Spaces
from dppo.user_code import in_a_line

NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
MAX_BITS = 1000  # of an integer, so that a float holds it
ResetOptions = dict[str, Any] | None
"""Options with which an environment is reset; None: its reset is called without any."""


def numbers_in(info: Any, keys: Sequence[str] | None = None) -> dict[str, float]:
    """Return the finite numbers of an info by name; only those with one of these `keys`, unless they are None."""
    numbers: dict[str, float] = {}
    if not isinstance(info, dict):
        return numbers
    for key in info if keys is None else keys:
        value = info.get(key)
        if not isinstance(value, NUMBERS) or (
            isinstance(value, int) and value.bit_length() > MAX_BITS
        ):
            continue
        number = float(value)
        if math.isfinite(number):
            numbers[str(key)] = number
    return numbers


class InfoMeter:
    """Sum up numbers in the info of env steps, in the order of these steps."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self.sums = dict[str, InfoSum]()
        """By name, those that some step has had."""

    def add(self, info: Any) -> None:
        """Add the numbers of a step."""
        for key, value in numbers_in(info, self._keys).items():
            steps, total, least, largest, _ = self.sums.get(key, (0, 0.0, value, value, value))
            self.sums[key] = InfoSum(
                steps + 1, total + value, min(least, value), max(largest, value), value
            )

    def take(self) -> dict[str, InfoSum]:
        sums = self.sums
        self.sums = {}
        return sums


FATAL = "hung, or ended its process, each time that it was tried."
FOUR_VALUES = "(expected 5, got 4)"  # in the ValueError of a wrapper around a step of the old API
StepResult = tuple[np.ndarray, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated and info."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings that the environments of one sampler share."""

    owner: str
    """Prefix of error messages: "sampler 3 (CartPole-v1)"."""
    spaces: Spaces
    episode_seed: Callable[[int, int], int]
    """Returns the seed of an episode, given the index of the environment and of the episode."""
    sampler_id: int = 0
    progress: ActivityRecord = field(default_factory=ActivityRecord)
    meter: InfoMeter | None = None
    """Measures the info of env steps; None: nothing is measured."""
    limits: bool = False
    """An observation beyond a limit of its space is a fault, in each step."""
    guidance: Guidance | None = None
    """The controllers beside the environments; None without any."""
    restarts: list[Incident] = field(default_factory=list)
    """Restarts of programs since the last segment."""


class SkippedStep(Exception):
    """A sub-environment took no step: its agent is gone, or all that happened was a reset."""

    def __init__(self, *, is_last: bool, arrival: tuple[Any, Any] | None = None) -> None:
        """Describe what the sub-environment shows now.

        Args:
            is_last: the next episode of the sub-environment begins after this step.
            arrival: observation and info of an agent that comes back; None: the first observation is shown again.
        """
        super().__init__(is_last)
        self.is_last = is_last
        self.arrival = arrival


class CheckedEnv:
    """Step and reset one environment of a group, check what it returns, and keep count of its open episode."""

    def __init__(
        self,
        env: Any,
        index: int,
        settings: GroupSettings,
        checks: SpaceChecks,
        *,
        is_single: bool = True,
    ) -> None:
        """Take over `env`, number `index` of its group.

        `is_single`: False for a sub-environment of a `JointEnv`: its episode depends on the actions of all.
        """
        self.index = index
        self.settings = settings
        self.checks = checks
        self.is_single = is_single
        self._open(0)
        self.options: ResetOptions = None
        """Options of the reset of the open episode."""
        self.offers_mask = False
        """The info of the last reset held an action mask."""
        self.last_obs = np.empty(0)
        """The latest observation, as the environment returned it; nothing writes to it again."""
        self.first_obs = self.last_obs
        """The observation of the last reset."""
        self._meter = settings.meter
        self.take(env)

    def take(self, env: Any) -> None:
        """Step this environment from now on."""
        self.env = env
        self.find_masks()
        # so that notes of all samplers are alike
        env_name = self.settings.owner.partition("(")[2].rstrip(")")
        self.guard = Guard(env_name or self.settings.owner)

    def find_masks(self) -> None:
        """Find where masks come from: a wrapper may make its environment again in a reset, or when its state is set."""
        self._masks: MaskReader | None = None
        if self.settings.spaces.mask is not None:
            self._masks = MaskReader(self.env, self.settings.spaces)

    def step(self, action: Any) -> StepResult:
        """Step the environment; raise EnvironmentFault, with a `place`, if it raises or returns something invalid.

        Raise SkippedStep if this sub-environment took no step.
        """
        guard = self.guard
        try:
            if guard.arithmetic is not None:
                guard.enter()
            answer: Any = self.env.step(action)
            # `guard.needed`, inline because it is asked in each step
            if guard.arithmetic is not None or changed() or guard.process != FORKS.number:
                guard.leave()
            try:
                returned, reward, terminated, truncated, info = answer
                # Identity answers in the shortest time; other booleans, such as NumPy's, are rare.
                if not (
                    (terminated is False or terminated is True)
                    and (truncated is False or truncated is True)
                ):
                    terminated = flag_of(terminated)
                    truncated = flag_of(truncated)
            except Exception:
                raise bad_form(answer, step=True) from None
            if self._meter is not None:
                self._meter.add(info)
            pack = self.checks.pack_last if terminated else self.checks.pack
            obs = pack(returned)
            if type(reward) is not float or not abs(reward) <= MAX_REWARD:
                reward = reward_of(reward)
            if self._masks is not None:
                obs = self._masks.attach_mask(obs, info, ended=terminated or truncated)
        except (BadResult, SkippedStep) as error:
            self._raise_without_transition(error)
        except BaseException as error:
            guard.leave(error)
            raise self._raised("step", error) from None
        self.episode_return += reward
        self.length += 1
        self.last_obs = obs
        return obs, reward, terminated, truncated, info

    def _raise_without_transition(self, error: BadResult | SkippedStep) -> NoReturn:
        """Raise a fault for an invalid result; raise SkippedStep again, after counting the step that was not taken."""
        if isinstance(error, BadResult):
            raise self._bad("step", error) from None
        self.guard.leave()
        try:
            shown_obs = self.first_obs
            if error.arrival is not None:
                shown_obs = self._packed(*error.arrival)
        except BadResult as problem:
            raise self._bad("step", problem) from None
        self.last_obs = shown_obs
        self.length += 1
        raise error from None

    def _packed(self, returned: Any, info: Any) -> np.ndarray:
        """Return an observation of an open episode as it is stored, with its mask; raise BadResult if it is invalid."""
        obs = self.checks.pack(returned)
        if self._masks is None:
            return obs
        return self._masks.attach_mask(obs, info, ended=False)

    def reset(self, episode: int, options: ResetOptions = None) -> np.ndarray:
        """Start the episode with this index, and return its first observation; raise as `step` does."""
        self._open(episode)
        self.options = options
        try:
            answer = self.guard.call(
                partial(self.env.reset, **self.reset_arguments(episode, options))
            )
        except BadResult as error:  # of several sub-environments
            raise self._bad("reset", error) from None
        except BaseException as error:
            raise self._raised("reset", error) from None
        problem = self.checks.change(self.index, self.env)
        if problem:
            raise self._fault("reset", problem)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self._bad("reset", bad_form(answer, step=False))
        returned, info = answer
        self.find_masks()
        try:
            obs = self._packed(returned, info)
        except BadResult as error:
            if not isinstance(info, dict):
                error.remedy = OLD_API
            raise self._bad("reset", error) from None
        except BaseException as error:
            raise self._raised("reset", error) from None
        self.offers_mask = isinstance(info, dict) and MASK in info
        self.last_obs = obs
        self.first_obs = obs
        return obs

    def _open(self, episode: int) -> None:
        self.episode = episode
        self.episode_return = 0.0
        self.length = 0

    def avoid(self, fatal: FatalStep) -> None:
        """Raise EnvironmentFault in place of a step, or a reset, that no process has survived."""
        take_step = self.step
        take_reset = self.reset

        def step(action: Any) -> StepResult:
            if (self.episode, self.length + 1) == (fatal.episode, fatal.step):
                raise self._fault("step", FATAL, GIVEN_UP)
            return take_step(action)

        def reset(episode: int, options: ResetOptions = None) -> np.ndarray:
            if (episode, 0) == (fatal.episode, fatal.step):
                self._open(episode)
                raise self._fault("reset", FATAL, GIVEN_UP)
            return take_reset(episode, options)

        vars(self).update(step=step, reset=reset)  # other steps cost nothing in other runs

    def reset_arguments(self, episode: int, options: ResetOptions) -> dict[str, Any]:
        arguments: dict[str, Any] = {"seed": self.settings.episode_seed(self.index, episode)}
        if options is not None:
            arguments["options"] = deepcopy(options)
        return arguments

    def finished(self, info: Any, end: int) -> Episode:
        """Describe the open episode, which has ended with `info` after `end` steps of the segment."""
        return Episode(
            self.index,
            self.episode,
            self.episode_return,
            self.length,
            _success_in(info),
            end,
            self.checksum(),
            numbers_in(info),
            deepcopy(self.options),  # observers may change theirs
            is_single=self.is_single,
        )

    def checksum(self) -> int:
        """Return a checksum of the latest observation, as the environment returned it, and of the return so far."""
        return zlib.crc32(
            np.float64(self.episode_return).tobytes(), zlib.crc32(self.last_obs.tobytes())
        )

    def place(self, episode: int, step: int) -> str:
        """Name a step of an episode of this environment in a message; step 0 is the reset."""
        seed = self.settings.episode_seed(self.index, episode)
        phase = "step" if step else "reset"
        return f"{self.settings.owner}, env {self.index}: {phase} of episode {episode} (seed {seed}, step {step})"

    def _bad(self, phase: str, error: BadResult) -> EnvironmentFault:
        problem = f"returned {error}."
        if error.remedy is not None:
            problem += f" {error.remedy.text(is_single=self.is_single)}."
        return self._fault(phase, problem)

    def _fault(
        self, phase: str, problem: str, error: str = "invalid", traceback: str = ""
    ) -> EnvironmentFault:
        """Return a fault of the step or reset that was made last; `problem` follows its place in the message."""
        step = self.length
        if phase == "step":
            step += 1
        place = EnvFault(
            phase,
            error,
            traceback,
            self.index,
            self.episode,
            self.settings.episode_seed(self.index, self.episode),
            step,
            last_obs=np.array2string(self.last_obs, threshold=100) if step else "",
            options=deepcopy(self.options),
            alone=self.is_single,
        )
        return EnvironmentFault(f"{self.place(self.episode, step)} {problem}", traceback, place)

    def _raised(self, phase: str, error: BaseException) -> BaseException:
        """Return the fault of an environment that raised `error`; return a signal that ends the run as it is."""
        if isinstance(error, INTERRUPTIONS):
            return error
        summary = in_a_line(error)
        takes_no_seed = isinstance(error, TypeError) and "'seed'" in str(error)
        has_four_values = isinstance(error, ValueError) and FOUR_VALUES in str(error)
        if (phase == "reset" and takes_no_seed) or (phase == "step" and has_four_values):
            summary += f". {OLD_API.text(is_single=self.is_single)}"
        elif phase == "step":
            try:
                self.checks.check_limits(self.settings.spaces.as_returned(self.last_obs))
            except BadResult as before:
                summary += f" (the environment had returned {before})"
        return self._fault(phase, f"raised {summary}", type(error).__name__, user_traceback(error))


def _success_in(info: Any) -> bool | None:
    """Return whether an episode solved its task by `info["is_success"]`; None if that is absent or NaN."""
    success = info.get("is_success") if isinstance(info, dict) else None
    if success is None or np.any(np.not_equal(success, success)):
        return None
    return bool(np.all(success))
