"""The settings of the environment and of its samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dppo.config.field import About, setting
from dppo.user_code import import_path


@dataclass(frozen=True, kw_only=True)
class Env:
    """The environment."""

    env_id: str | Callable[..., Any] = field(  # not `setting`: type checkers see that it has no default
        metadata={
            "about": About(
                "The environment: a Gymnasium id (CartPole-v1); module:Name-v0, an id that importing the module "
                "registers; module:factory, a function or class that returns an environment; or, in Python, any "
                "callable that does. Modules are found in the current folder and among installed packages."
            )
        }
    )
    env_kwargs: dict[str, Any] = setting({}, "Keyword arguments of the environment, as JSON: '{\"g\": 9.8}'.")
    on_bad_step: Literal["raise", "drop"] = setting(
        "raise",
        "Reaction to an invalid observation, reward, flag or mask: raise ends the run; drop abandons the episode, "
        "counts it as an incident and starts a new one.",
        resume="free",
    )
    drop_obs: tuple[str, ...] = setting(
        (),
        "Parts of a Dict or Tuple observation to leave out, by name: mission; robot.mission for a part of a part.",
        branch=False,
    )
    obs_dtype: Literal["float32", "float64"] = setting(
        "float32",
        "Dtype in which float64 observations are stored, sent and normalized, and with float64 also integers of a Box "
        "beyond 2**24. float64 is for numbers such as 1e9 + 0.1 and 1e9 + 0.2, which float32 cannot tell apart.",
        branch=False,
    )
    action_bounds: Literal["auto", "clip", "squash", "rescale"] = setting(
        "auto",
        "Map of real-valued actions into the bounds of their Box: clip; rescale: clip to [-1, 1], then map linearly; "
        "squash: tanh, then map linearly; auto: rescale if the bounds are finite and go beyond 2, else clip.",
        branch=False,
    )
    action_mask: Literal["auto", "info", "off"] = setting(
        "auto",
        "Source of masks of the allowed actions: info, the item action_mask of reset's and step's info; auto: a part "
        "action_mask of a Dict observation, or the method action_masks() of the environment, if there is one.",
        branch=False,
    )

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of a callable."""
        return import_path(self.env_id)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """N samplers of E environments, T steps each."""

    num_samplers: int = setting(
        8,
        "Samplers N, each with its own environments. Part of the learning problem: with the same N, any number of "
        "actors gives the same result.",
        gt=0,
    )
    envs_per_sampler: int = setting(1, "Environments E of each sampler, stepped one after the other.", gt=0)
    num_steps: int = setting(128, "Steps T of each environment in one iteration.", gt=0)
    overlap: bool = setting(
        False,
        "Collect while learning: actors use the weights from before the update. Policy lag is exactly one, which the "
        "loss corrects for, but which changes what is learned. Results stay reproducible and independent of the number "
        "of actors.",
    )

    @property
    def batch_size(self) -> int:
        """Return B = N * E * T, the env steps of one iteration."""
        return self.num_samplers * self.envs_per_sampler * self.num_steps
