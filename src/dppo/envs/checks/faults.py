"""Faults of environments: invalid results of step and reset, and tracebacks that show the user's code alone."""

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dppo.errors import DppoError, EnvFault, EnvironmentFault
from dppo.signals import INTERRUPTIONS
from dppo.user_code import in_a_line

REMEDY = "Correct the environment, or use on_env_fault=rebuild to go on with a new episode of a new environment."
PACKAGE = str(Path(__file__).parents[2])
LARGEST_REWARD = 1e17  # the value loss squares returns, and the square of a hundred of these fits into float32
NO_MATTER = re.compile("A Box .* is (-)?infinity|For Box action spaces")  # bounds of any size are fine here
OLD_API = (
    ". This is the API of Gym before 0.26. Let reset take a seed and return (observation, info), and step return "
    "(observation, reward, terminated, truncated, info), or wrap the environment with shimmy.GymV21CompatibilityV0"
)


class BadResult(ValueError):
    """An invalid result of an environment. The message continues "... returned"."""

    def __init__(self, what: str, row: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.row = row  # of several observations, the one that is invalid


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, starting at the first frame outside this package."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


@contextmanager
def making(owner: str, sampler_id: int = 0, env: int = 0) -> Iterator[None]:
    """Raise an EnvironmentFault in place of what the constructor of an environment raises, unless it is one of ours."""
    try:
        yield
    except (DppoError, *INTERRUPTIONS):
        raise
    except BaseException as error:
        text, trace = f"{owner}: the environment's constructor raised {in_a_line(error)}", user_traceback(error)
        place = EnvFault("constructor", type(error).__name__, trace, env, sampler_id=sampler_id)
        raise EnvironmentFault(text, trace, place) from None


def reward_of(returned: Any) -> float:
    """Convert a reward to a float; raise BadResult if it is not a finite number, or too large to learn from."""
    try:
        reward = float(returned)
    except (TypeError, ValueError):
        raise BadResult(f"{returned!r} as the reward, which is not a number") from None
    except OverflowError:
        raise BadResult("a reward too large for a float") from None
    if not abs(reward) <= LARGEST_REWARD:
        limit = f", and values cannot be learned from rewards above {LARGEST_REWARD:g}" if reward - reward == 0 else ""
        raise BadResult(f"{reward} as the reward{limit}")
    return reward


def flag_of(returned: Any) -> bool:
    """Convert `terminated` or `truncated` to a bool; raise TypeError for others, which are more often a mistake."""
    if not isinstance(returned, bool | np.bool_):
        raise TypeError(type(returned))  # the message is that of `describe_bad`
    return bool(returned)


def describe_bad(result: Any, *, step: bool) -> str:
    """Describe the result of a step, or of a reset, that has not the form of one."""
    in_parts = isinstance(result, tuple | list)
    if step and in_parts and len(result) == 5:
        name, flag = ("truncated", result[3]) if isinstance(result[2], bool | np.bool_) else ("terminated", result[2])
        return f"{name}={flag!r}, which is not a boolean"
    form = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    expected = "(observation, reward, terminated, truncated, info)" if step else "(observation, info)"
    return f"{form} instead of {expected}{OLD_API if not step or (in_parts and len(result) == 4) else ''}"


def gymnasium_says(env: Any) -> list[str]:
    """Return the warnings of Gymnasium's own checker, and the assertion that failed, if one did."""
    from gymnasium.utils.env_checker import check_env

    failed = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            check_env(getattr(env, "unwrapped", env), skip_render_check=True, skip_close_check=True)
        except Exception as error:  # an environment may raise anything
            failed = [in_a_line(error)]
    texts = [re.sub(r"\x1b\[\d+m|WARN: ", "", str(one.message)) for one in found]
    return [" ".join(one.split()) for one in dict.fromkeys(texts + failed) if not NO_MATTER.search(one)]
