"""Returns of zero, random and baseline actions, which show whether the reward distinguishes good actions from bad."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import combinations, islice
from statistics import fmean, pstdev, stdev
from typing import Any

from dppo.config import Config
from dppo.envs.arguments import check_all_arguments
from dppo.envs.checks.actions import action_nearest_zero
from dppo.errors import ControllerFault, EnvironmentFault
from dppo.policies.acting import PlaySettings
from dppo.policies.controller import Controller
from dppo.policies.controller_acting import ControllerActing
from dppo.policies.playing import Playing
from dppo.tools.doctor.playing import FIRST_SHARE
from dppo.tools.doctor.speed import Facts

MIN_EPISODES = 2
MAX_EPISODES = 10
MIN_STEPS_WITHOUT_END = 500  # steps without an end after which episodes count as endless
START_S = 20.0  # time of imports, and of making the environment
MARGIN = 1.2  # episodes of other actions may be longer
BY_CHANCE = 2.0  # standard errors by which mean returns may differ by chance
ZERO = "zero actions"
RANDOM = "random actions"
Returns = Mapping[str, Sequence[float]]
"""Returns of the same episodes, by the name of the controller."""


def simple_actions(config: Config) -> str:
    """Name the controllers that are played."""
    if config.baseline is None:
        return "zero and random actions"
    return "zero, random and baseline actions"


class Zero:
    """Always takes the action that is nearest to zero."""

    def __init__(self, action_space: Any) -> None:
        self._action = action_nearest_zero(action_space)

    def act(self, obs: Any) -> Any:
        return deepcopy(self._action)


class Random:
    """Takes each action of the space with the same probability."""

    def __init__(self, action_space: Any, seed: int) -> None:
        self._space = deepcopy(action_space)
        self._space.seed(seed)

    def act(self, obs: Any) -> Any:
        return self._space.sample()


def reason_to_leave_out(
    lengths: Sequence[int], steps: int, step_s: float, until: float, share: float, config: Config
) -> str:
    """Return why controllers cannot play `MIN_EPISODES` in time, and what to do; "" if they can.

    Args:
        lengths: of the episodes that have ended in `steps` steps.
        step_s: seconds of a step.
        until: the time at which they have to be over.
        share: of the time of the first process, in which they play.
    """
    if not lengths:
        remedy = "Let them end" if steps >= MIN_STEPS_WITHOUT_END else "Raise --seconds"
        return f"no episode ended in {steps:,} steps. {remedy}"
    controllers = 2 if config.baseline is None else 3
    needed_s = MIN_EPISODES * controllers * fmean(lengths) * step_s
    seconds = until - time.monotonic()
    if needed_s > seconds:
        needed = _in_words(needed_s)
        enough_s = START_S + MARGIN * needed_s / share / FIRST_SHARE
        return (
            f"{MIN_EPISODES} episodes of each take {needed}, and {_in_words(seconds)} are left for them. To measure "
            f"them, raise --seconds to {10 * math.ceil(enough_s / 10)}"
        )
    return ""


def check_names(config: Config) -> None:
    """Raise ConfigError if there is no such baseline, or the environment does not take its arguments."""
    check_all_arguments(config.env_id, config.env_kwargs, config.eval_env_kwargs)
    if config.baseline is not None:
        Controller(config.baseline, "baseline")


def ask_baseline(env: Any, config: Config) -> Facts:
    """Reset the environment, and take the first action of the baseline; return the facts."""
    if config.baseline is None:
        return {}
    episode = _playing(Controller(config.baseline, "baseline"), env, config).play(0)
    try:
        list(islice(episode, 2))  # after the reset, and after the first step
    except (ControllerFault, EnvironmentFault) as fault:
        return {"controllers_failed": str(fault)}
    return {}


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def play_controllers(env: Any, config: Config, until: float) -> Facts:
    """Play the same episodes with each controller in turn, until the time is up; return the facts.

    Raise ConfigError if there is no such baseline.
    """
    controllers = {ZERO: Controller(Zero), RANDOM: Controller(Random)}
    if config.baseline is not None:
        controllers[str(config.baseline_name)] = Controller(config.baseline, "baseline")
    returns: dict[str, list[float]] = {name: [] for name in controllers}
    playings = {name: _playing(controller, env, config) for name, controller in controllers.items()}
    facts: Facts = {}
    began = time.monotonic()
    try:
        for episode in range(MAX_EPISODES):
            now = time.monotonic()
            if episode >= MIN_EPISODES and now + (now - began) / episode > until:
                break
            for name, playing in playings.items():
                returns[name].append(_return_of(playing, episode, until))
    except TimeoutError:
        facts["controllers_left_out"] = (
            "their episodes take longer than those before. To measure them, raise --seconds"
        )
    except (ControllerFault, EnvironmentFault) as fault:
        facts["controllers_failed"] = str(fault)
    num_episodes = min(map(len, returns.values()))
    if num_episodes < MIN_EPISODES:
        return facts
    facts.pop("controllers_left_out", None)
    common_returns = {name: values[:num_episodes] for name, values in returns.items()}
    return facts | {"controllers": common_returns}


def _playing(controller: Controller, env: Any, config: Config) -> Playing:
    settings = PlaySettings(config.seed)
    return Playing(ControllerActing(controller, settings), env, config.env_name, settings)


def _return_of(playing: Playing, episode: int, until: float) -> float:
    """Play an episode, and return its return; raise TimeoutError if it is not over in time."""
    episode_return = 0.0
    for so_far in playing.play(episode):
        if time.monotonic() > until:
            raise TimeoutError
        episode_return = so_far.episode_return
    return episode_return


# --------------------------------------------------------------- what the returns say


def described(returns: Returns) -> str:
    """Return the mean and the standard deviation of the returns of each controller."""
    return ", ".join(
        f"{name} {fmean(values):.4g} +- {pstdev(values):.2g}" for name, values in returns.items()
    )


def differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the returns of the same episodes differ by more than chance."""
    differences = [value - other for value, other in zip(first, second, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences))
    return abs(fmean(differences)) > BY_CHANCE * error


def are_alike(returns: Returns) -> bool:
    return not any(differ(first, second) for first, second in combinations(returns.values(), 2))
