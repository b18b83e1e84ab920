"""Choose the sub-environments of a sampler by what its environment is."""

from collections.abc import Callable
from typing import Any

from dppo.envs.episode import GroupSettings
from dppo.envs.kinds import JointKind, joint_kind
from dppo.envs.sub_envs.agents import JointAgents
from dppo.envs.sub_envs.joint import JointEnv, JointSubEnvs
from dppo.envs.sub_envs.port import SubEnvs
from dppo.envs.sub_envs.serial import SerialSubEnvs
from dppo.envs.sub_envs.vector import JointVector
from dppo.errors import ConfigError

JOINT_ENVS: dict[JointKind, Callable[[Any, Callable[[], Any]], JointEnv]] = {
    "vector": JointVector,
    "agents": JointAgents,
}


def adapted(env: Any, make: Callable[[], Any]) -> Any:
    """Return a vector environment, or one of several agents, as a `JointEnv`, and any other environment as it is.

    `make` returns another one. Raise ConfigError if its sub-environments cannot be stepped.
    """
    kind = joint_kind(env)
    if kind is None:
        return env
    return JOINT_ENVS[kind](env, make)


def check_size(env: Any, num_envs: int, standby: int) -> None:
    """Raise ConfigError if `env` has sub-environments, but not as many as a sampler has environments.

    `num_envs` and `standby` are the settings `envs_per_sampler` and `standby_envs`.
    """
    if not isinstance(env, JointEnv):
        return
    num_sub_envs = len(env.sub_envs)
    if num_sub_envs != num_envs:
        sub_envs = "sub-environments"
        if env.shared:
            sub_envs = "agents, each of which is a sub-environment"
        raise ConfigError(
            f"envs_per_sampler={num_envs}: the environment has {num_sub_envs} {sub_envs}. Use "
            f"`envs_per_sampler={num_sub_envs}`."
        )
    if standby:
        raise ConfigError(
            f"standby_envs={standby}: copies cannot take turns with the sub-environments of an environment that steps "
            f"{num_envs} at once. Leave it out."
        )


def make_all(make: Callable[[int], Any], num_envs: int, standby: int, envs: list[Any]) -> None:
    """Make the environments of a sampler, or the one that steps all; add each to `envs`, also before an error."""
    for env in [*range(num_envs)] * (1 + standby):
        envs.append(make(env))
        if isinstance(envs[0], JointEnv):
            return


def sub_envs_of(
    envs: list[Any],
    settings: GroupSettings,
    make: Callable[[int], Any] | None = None,
    standby: int = 0,
) -> SubEnvs:
    """Return the sub-environments of environments that were made by `make_all` or `adapted`: see `SerialSubEnvs`."""
    if isinstance(envs[0], JointEnv):
        return JointSubEnvs(envs[0], settings)
    return SerialSubEnvs(envs, settings, make, standby)
