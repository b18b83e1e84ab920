"""Every setting, in eight frozen records; each component gets the records that it needs, whole.

They are plain dataclasses because they travel to actors, which must not import pydantic. Names follow CleanRL where it
has one.
"""

import ast
import dataclasses
import inspect
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, get_args, get_type_hints

from dppo.config.field import SettingInfo
from dppo.config.parts.env import Env, Sampling
from dppo.config.parts.ppo import (
    PPO,
    Network,
    ResolvedPPO,
    annealed,
    annealed_settings,
    reuse_clip_factor,
)
from dppo.config.parts.processes import Actors, Learners, Run
from dppo.config.parts.sac import SAC

__all__ = [
    "PPO",
    "SAC",
    "Actors",
    "Env",
    "Learners",
    "Network",
    "ResolvedPPO",
    "Run",
    "Sampling",
    "annealed",
    "annealed_settings",
    "reuse_clip_factor",
]

PARTS: dict[str, type] = {
    part.__name__.lower(): part
    for part in (Env, Sampling, PPO, SAC, Network, Actors, Learners, Run)
}


@cache
def names_of(part: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(PARTS[part]))


@cache
def settings_by_name() -> dict[str, dataclasses.Field[Any]]:
    """Return the dataclass field of every setting, in the order of the parts."""
    return {field.name: field for part in PARTS.values() for field in dataclasses.fields(part)}


def about(name: str) -> SettingInfo:
    about: SettingInfo = settings_by_name()[name].metadata.get("about", SettingInfo())
    return about


@cache
def help_by_name() -> dict[str, str]:
    """Return the help of every setting: the docstring below it, which only the source has."""
    texts = {}
    for part in PARTS.values():
        record: Any = ast.parse(inspect.getsource(part)).body[0]
        for statement, docstring in pairwise(record.body):
            if isinstance(statement, ast.AnnAssign):
                texts[ast.unparse(statement.target)] = " ".join(docstring.value.value.split())
    return texts


def default_of(name: str) -> Any:
    """Return the default of a setting, or `dataclasses.MISSING` if it has none."""
    field = settings_by_name()[name]
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


@cache
def types_by_name() -> dict[str, Any]:
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}


def may_be_none(name: str) -> bool:
    """Return whether None is a value of the setting, which is written `none`."""
    return NoneType in get_args(types_by_name().get(name))
