"""Take an environment of several rows for what it is."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from gymnasium.vector.utils import concatenate, create_empty_array

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
        joint = joint_of(made, make)
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


def joint_of(made: Any, make: Callable[[], Any]) -> JointEnv:
    """Return `made` as a `JointEnv`; `make` returns another one."""
    return AgentRows(made, make) if joint_kind(made) == "agents" else VectorRows(made, make)


class Players:
    """Rows that play one episode: all agents, or the first row of a vector, in which each has episodes of its own."""

    def __init__(self, made: Any) -> None:
        """Take an environment, of one row or of several."""
        self._made, self._joint = made, joint_of(made, lambda: made) if joint_kind(made) else None
        self.rows: Sequence[Any] = [made]
        if self._joint is not None:
            self._joint.once, self._joint.next_seed = True, lambda _: 0
            self.rows = self._joint.rows if self._joint.shared else self._joint.rows[:1]

    def reset(self, seed: int) -> list[Any]:
        """Return observation and info of each row at the start of an episode."""
        if self._joint is None:
            return [self._made.reset(seed=seed)]
        self._joint.begin(self.rows[0], seed)
        return [row.reset(seed=seed) for row in self.rows]

    def step(self, actions: list[Any]) -> list[Any]:
        """Return what a step of each row returns; rows that are not there have rewards of 0, and end with the last."""
        if (joint := self._joint) is None:
            return [self._made.step(actions[0])]
        space: Any = joint.action_space
        given = actions + actions[:1] * (len(joint.rows) - len(actions))
        both: Any = SimpleNamespace(each=list)
        both.to_env = lambda items: concatenate(space, items, create_empty_array(space, len(items)))  # type: ignore[arg-type]
        joint.step(given, both)  # type: ignore[arg-type]
        return [row.answer for row in self.rows]
