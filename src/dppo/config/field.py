"""Define one setting: its default, its help, its limits, and its metadata."""

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
    """Return whether the condition holds, given all settings as a `FlatSettings`."""
    otherwise: str
    """The reason why the setting has no effect otherwise, and a remedy; `{config.name}` stands for a value."""


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a setting."""

    help: str
    limits: dict[str, Any]
    """By pydantic's names: gt, ge, lt, le, min_length. For a tuple, the limits of each item."""
    resume: Resume
    """Permission to change on resume. free: results do not depend on it; close: results differ by rounding or by the
    order of rows; raised: it may grow; fixed: it must not change."""
    branch: bool
    """True if a run that branches off another run's checkpoint may have another value."""
    when: tuple[When, ...]
    """Conditions of its effect: where one does not hold, only the default is accepted."""


def metadata(
    help: str, *, resume: Resume = "fixed", branch: bool = True, when: tuple[When, ...] = (), **limits: Any
) -> dict[str, About]:
    """Return the metadata of a dataclass field that is a setting."""
    return {KEY: About(help, limits, resume, branch, when)}


def setting(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field with this default; `more` is passed to `metadata`."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata(help, **more))
    return field(default=default, metadata=metadata(help, **more))
