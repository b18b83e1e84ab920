"""Every setting, in seven frozen records; each component gets the records that it needs, whole.

They are plain dataclasses because they travel to actors, which must not import pydantic. Names follow CleanRL where it
has one.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_type_hints

from dppo.config.field import About
from dppo.config.parts.env import Env, Sampling
from dppo.config.parts.network import Network
from dppo.config.parts.ppo import PPO, annealed, annealed_settings
from dppo.config.parts.processes import Actors, Learners
from dppo.config.parts.run import Run

__all__ = ["PPO", "Actors", "Env", "Learners", "Network", "Run", "Sampling", "annealed", "annealed_settings"]

PARTS: dict[str, type] = {part.__name__.lower(): part for part in (Env, Sampling, PPO, Network, Actors, Learners, Run)}


@cache
def names_of(part: str) -> tuple[str, ...]:
    """Return the names of the settings of a part."""
    return tuple(field.name for field in dataclasses.fields(PARTS[part]))


@cache
def settings_by_name() -> dict[str, dataclasses.Field[Any]]:
    """Return the dataclass field of every setting, in the order of the parts."""
    return {field.name: field for part in PARTS.values() for field in dataclasses.fields(part)}


def about(name: str) -> About:
    """Return the metadata of a setting."""
    found: About = settings_by_name()[name].metadata["about"]
    return found


def default_of(name: str) -> Any:
    """Return the default of a setting, or `dataclasses.MISSING` if it has none."""
    field = settings_by_name()[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def types_by_name() -> dict[str, Any]:
    """Return the type of every setting."""
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}
