"""Every setting, in seven frozen records; each component gets the records that it needs, whole.

They are plain dataclasses because they travel to actors, which must not import pydantic. Names follow CleanRL where it
has one.
"""

from dppo.config.parts.env import Env, Sampling
from dppo.config.parts.network import Network
from dppo.config.parts.ppo import PPO, annealed, annealed_settings
from dppo.config.parts.processes import Actors, Learners
from dppo.config.parts.registry import PARTS, about, default_of, settings_by_name, types_by_name
from dppo.config.parts.run import Run

__all__ = [
    "PARTS",
    "PPO",
    "Actors",
    "Env",
    "Learners",
    "Network",
    "Run",
    "Sampling",
    "about",
    "annealed",
    "annealed_settings",
    "default_of",
    "settings_by_name",
    "types_by_name",
]
