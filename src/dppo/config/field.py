"""Define settings: fields of a dataclass with metadata, explained by the docstrings below them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

FlatSettings = Mapping[str, Any]
"""Settings of all parts by their names, `{"num_steps": 64}`, which need not be valid."""


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """Metadata of a setting."""

    limits: dict[str, Any] = field(default_factory=dict)
    """Limits by pydantic's names: gt, ge, lt, le, min_length. For a tuple, the limits of each item."""
    resume: Literal["fixed", "raised", "close", "free"] = "fixed"
    """Permission to change on resume. free: results do not depend on it; close: results differ by rounding or by the
    order of rows; raised: it may grow; fixed: it must not change."""
    branch: bool = True
    """True if a run that branches off another run's checkpoint may have another value."""


def setting(default: Any, *, resume: Any = "fixed", branch: bool = True, **limits: Any) -> Any:
    about = {"about": SettingInfo(limits, resume, branch)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


free = partial(setting, resume="free")
"""A setting that changes no result."""
constant = partial(setting, branch=False)
"""A setting on which the meaning of weights and statistics depends."""
