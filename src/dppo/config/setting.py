"""One setting: its default, its help, its limits, and what else the program has to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

KEY = "setting"

Resume = Literal["fixed", "raised", "close", "free"]


@dataclass(frozen=True, slots=True)
class When:
    """A condition under which a setting has an effect."""

    holds: Callable[[Any], bool]
    """Return whether it holds for all settings together, a `Settings`."""
    otherwise: str
    """Why the setting has no effect, and what to do; `{config.name}` stands for a value."""


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a setting."""

    help: str
    limits: dict[str, Any]
    """pydantic's names: gt, ge, lt, le, min_length. For a tuple, the limits of each item."""
    resume: Resume
    """Whether the setting may change on resume. free: results do not depend on it; close: results change in rounding or
    in the order of rows; raised: it may grow; fixed: another value would be another run."""
    branch: bool
    """Whether a run that starts from another run's checkpoint may have another value."""
    when: tuple[When, ...]
    """Conditions of its effect: a value other than the default is refused where one of them does not hold."""


def metadata(
    help: str, *, resume: Resume = "fixed", branch: bool = True, when: tuple[When, ...] = (), **limits: Any
) -> dict[str, About]:
    """Return the metadata of a dataclass field that is a setting."""
    return {KEY: About(help, limits, resume, branch, when)}


def setting(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field with this default; `more` as for `metadata`."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata(help, **more))
    return field(default=default, metadata=metadata(help, **more))
