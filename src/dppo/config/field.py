"""Define settings: fields of a dataclass with metadata, explained by the docstrings below them."""

import ast
import inspect
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a setting."""

    limits: dict[str, Any] = field(default_factory=dict)
    """By pydantic's names: gt, ge, lt, le, min_length. For a tuple, the limits of each item."""
    resume: Literal["fixed", "raised", "close", "free"] = "fixed"
    """Permission to change on resume. free: results do not depend on it; close: results differ by rounding or by the
    order of rows; raised: it may grow; fixed: it must not change."""
    branch: bool = True
    """True if a run that branches off another run's checkpoint may have another value."""


def setting(default: Any, *, resume: Any = "fixed", branch: bool = True, **limits: Any) -> Any:
    """Return a dataclass field with this default and this metadata."""
    about = {"about": About(limits, resume, branch)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


free = partial(setting, resume="free")
"""A setting that changes no result."""
constant = partial(setting, branch=False)
"""A setting on which the meaning of weights and statistics depends."""


@cache
def help_in(module: str) -> dict[str, str]:
    """Return the docstrings of the settings in a module, which only its source has; each is the help of a flag."""
    records = ast.parse(inspect.getsource(sys.modules[module])).body
    pairs: list[Any] = [pair for one in records if isinstance(one, ast.ClassDef) for pair in pairwise(one.body)]
    texts = {ast.unparse(one.target): text.value.value for one, text in pairs if isinstance(one, ast.AnnAssign)}
    return {name: " ".join(text.split()) for name, text in texts.items()}
