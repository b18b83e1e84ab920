"""All settings of a run: their parts, checks, files, and what may change on resume."""

from dppo.config.config import Config
from dppo.config.groups import flattened, grouped
from dppo.config.parts import PPO, Actors, Env, Learners, Network, Run, Sampling
from dppo.config.plain import plain_settings
from dppo.config.reading import read_settings

__all__ = [
    "PPO",
    "Actors",
    "Config",
    "Env",
    "Learners",
    "Network",
    "Run",
    "Sampling",
    "flattened",
    "grouped",
    "plain_settings",
    "read_settings",
]
