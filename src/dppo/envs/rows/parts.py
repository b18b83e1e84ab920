"""The form of what an environment of several rows returns."""

from typing import Any

from dppo.envs.checks.returned import BadResult

PARTS = ("observation", "reward", "terminated", "truncated", "info")


def check_parts(answer: Any, *, step: bool) -> None:
    """Raise BadResult unless a step or reset of several rows returned a tuple of five parts, or of two."""
    parts = PARTS if step else ("observation", "info")
    if not isinstance(answer, tuple | list) or len(answer) != len(parts):
        form = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__name__
        raise BadResult(f"{form} instead of ({', '.join(parts)})")
