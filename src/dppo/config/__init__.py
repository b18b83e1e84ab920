"""Settings: their parts, the checks across them, files, and what may change on resume.

Importing this loads neither pydantic nor yaml: parts travel to actors.
"""

from dppo.config.config import Config, resolved
from dppo.config.files import flattened, grouped, presets, read_settings
from dppo.config.parts import PPO, Actors, Env, Learners, Network, Run, Sampling

__all__ = [
    "PPO", "Actors", "Config", "Env", "Learners", "Network", "Run", "Sampling",
    "flattened", "grouped", "presets", "read_settings", "resolved",
]  # fmt: skip
