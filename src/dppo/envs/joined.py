"""Take an environment of several rows for what it is."""

from collections.abc import Callable
from typing import Any

from dppo.envs.agents import AgentRows
from dppo.envs.joint import JointEnv
from dppo.envs.make import close_all, joint_kind
from dppo.envs.vectors import VectorRows
from dppo.errors import ConfigError


def joined(made: Any, make: Callable[[], Any], num_envs: int, standby: int) -> JointEnv:
    """Return `made` as a `JointEnv`; close it and raise ConfigError if it does not fit the settings.

    `make` returns another one. `num_envs` and `standby` are the settings `envs_per_sampler` and `standby_envs`.
    """
    try:
        joint: JointEnv = AgentRows(made, make) if joint_kind(made) == "agents" else VectorRows(made, make)
        if len(joint.rows) != num_envs:
            rows = "agents, each of which is a row" if joint.shared else "rows"
            raise ConfigError(
                f"envs_per_sampler={num_envs}: the environment has {len(joint.rows)} {rows}. Use "
                f"`envs_per_sampler={len(joint.rows)}`."
            )
        if standby:
            raise ConfigError(
                f"standby_envs={standby}: copies cannot take turns with the rows of an environment that steps "
                f"{num_envs} at once. Leave it out."
            )
    except BaseException:
        close_all([made])
        raise
    return joint
