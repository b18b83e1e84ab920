"""Check the results of an environment's step and reset."""

from __future__ import annotations

from typing import Any

OLD_API = (
    ". This is the API of Gym before 0.26. Let reset take a seed and return (observation, info), and step return "
    "(observation, reward, terminated, truncated, info), or wrap the environment with shimmy.GymV21CompatibilityV0"
)


class BadResult(ValueError):
    """An invalid result of an environment. The message continues "... returned"."""


def reward_of(raw: Any) -> float:
    """Convert a reward to a float.

    Raises:
        BadResult: it is not a finite number.
    """
    try:
        reward = float(raw)
    except (TypeError, ValueError):
        raise BadResult(f"{raw!r} as the reward, which is not a number") from None
    except OverflowError:
        raise BadResult("a reward too large for a float") from None
    if reward - reward != 0:  # nan or infinite
        raise BadResult(f"{reward} as the reward")
    return reward


def describe_bad_step(result: Any) -> str:
    """Describe the result of a step that is not (observation, reward, terminated, truncated, info)."""
    if not isinstance(result, tuple | list) or len(result) != 5:
        old = OLD_API if isinstance(result, tuple | list) and len(result) == 4 else ""
        return f"{_form(result)} instead of (observation, reward, terminated, truncated, info){old}"
    name, flag = next(one for one in zip(("terminated", "truncated"), result[2:4], strict=True) if not _is_flag(one[1]))
    return f"{name}={flag!r}, which is not a boolean"


def describe_bad_reset(result: Any) -> str | None:
    """Describe the result of a reset that is not a pair; None if it is one."""
    if isinstance(result, tuple | list) and len(result) == 2:
        return None
    return f"{_form(result)} instead of (observation, info){OLD_API}"


def _is_flag(value: Any) -> bool:
    try:
        bool(value)
    except Exception:  # NumPy and torch raise different errors
        return False
    return True


def _form(result: Any) -> str:
    """Name the type of a result: "a tuple of 4", "ndarray"."""
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
