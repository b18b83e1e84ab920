"""Choose the rows of a sampler by what its environment is."""

from collections.abc import Callable
from typing import Any

from dppo.envs.episode import GroupSettings
from dppo.envs.kinds import joint_kind
from dppo.envs.rows.agents import JointAgents
from dppo.envs.rows.joint import JointEnv, JointRows
from dppo.envs.rows.port import Rows
from dppo.envs.rows.serial import SerialRows
from dppo.envs.rows.vector import JointVector
from dppo.errors import ConfigError


def adapted(made: Any, make: Callable[[], Any]) -> Any:
    """Return a vector environment, or one of several agents, as a `JointEnv`, and any other environment as it is.

    `make` returns another one. Raise ConfigError if its rows cannot be stepped.
    """
    kind = joint_kind(made)
    if kind is None:
        return made
    return JointAgents(made, make) if kind == "agents" else JointVector(made, make)


def check_size(env: Any, num_envs: int, standby: int) -> None:
    """Raise ConfigError if `env` has several rows, but not as many as a sampler has environments.

    `num_envs` and `standby` are the settings `envs_per_sampler` and `standby_envs`.
    """
    if not isinstance(env, JointEnv):
        return
    num_rows = len(env.rows)
    if num_rows != num_envs:
        rows = "agents, each of which is a row" if env.shared else "rows"
        raise ConfigError(
            f"envs_per_sampler={num_envs}: the environment has {num_rows} {rows}. Use `envs_per_sampler={num_rows}`."
        )
    if standby:
        raise ConfigError(
            f"standby_envs={standby}: copies cannot take turns with the rows of an environment that steps "
            f"{num_envs} at once. Leave it out."
        )


def make_all(make: Callable[[int], Any], num_envs: int, standby: int, made: list[Any]) -> None:
    """Make the environments of a sampler, or the one that steps all rows; add each to `made`, also before an error."""
    for env in [*range(num_envs)] * (1 + standby):
        made.append(make(env))
        if isinstance(made[0], JointEnv):
            return


def rows_of(
    made: list[Any],
    settings: GroupSettings,
    make: Callable[[int], Any] | None = None,
    standby: int = 0,
) -> Rows:
    """Return the rows of environments that were made by `make_all` or `adapted`: see `SerialRows`."""
    if isinstance(made[0], JointEnv):
        return JointRows(made[0], settings)
    return SerialRows(made, settings, make, standby)
