"""Kinds of environments, and advice for objects that are not environments."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium as gym

from dppo.envs.closing import close_all
from dppo.errors import ConfigError

ONE_AGENT = (
    "Train one agent: write a gymnasium.Env whose step takes the action of that agent and computes those of the "
    "others."
)
PARALLEL = (
    "If its agents may share one policy, make it a parallel environment of PettingZoo (pettingzoo.ParallelEnv) with "
    "methods observation_space(agent) and action_space(agent) in place of dicts, and set `envs_per_sampler` to the "
    "number of its possible_agents. Or: "
) + ONE_AGENT


JointKind = Literal["vector", "agents"]
"""Kinds of environments that step several sub-environments at once; `JOINT_ENVS` has the class for each."""


def joint_kind(env: Any) -> JointKind | None:
    """Return how `env` steps several sub-environments at once, or None if it does not."""
    if inspect.isclass(env) or not hasattr(env, "step"):
        return None
    if (
        hasattr(env, "possible_agents")
        and not hasattr(env, "agent_iter")
        and not isinstance(env, gym.Env)
    ):
        return "agents"
    is_vector = all(
        hasattr(env, name)
        for name in ("num_envs", "single_observation_space", "single_action_space")
    )
    return "vector" if is_vector else None


def checked_kind(env: Any, label: str, *, joint: bool = False) -> Any:
    """Return `env`; close it and raise ConfigError if it is not a single environment, nor with `joint` one of several.

    `label`: the setting that made it, for the message.
    """
    problem = None
    if _has_dicts_of_spaces(env):
        problem = f"{_kind_of(env)}, which has dicts of spaces, one for each of several agents. {PARALLEL}"
    elif joint_kind(env) == "agents" and not len(env.possible_agents):
        problem = f"a {_kind_of(env)} with no agents. Set self.possible_agents in its constructor."
    elif not (joint and joint_kind(env)):
        problem = _describe_other(env)
    if problem:
        if not inspect.isclass(env):
            close_all([env])
        raise ConfigError(f"{label}: made {problem}")
    return env


def refuse_sub_envs(env: Any, setting: str, remedy: str) -> None:
    """Close `env`, and raise ConfigError, if it has sub-environments and `setting` is for single environments."""
    if joint_kind(env):
        close_all([env])
        raise ConfigError(f"{setting}: {remedy}")


def _kind_of(env: Any) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def _is_of_rllib(env: Any) -> bool:
    inner = env.unwrapped if isinstance(env, gym.Wrapper) else env
    return any(base.__name__ == "MultiAgentEnv" for base in type(inner).__mro__)


def _has_dicts_of_spaces(env: Any) -> bool:
    """Return whether `env`, or what it wraps, has a space for each agent in a dict, as in RLlib, and no single space.

    PettingZoo has such dicts beside its methods.
    """
    if inspect.isclass(env) or inspect.isroutine(env):
        return False
    inner = env.unwrapped if isinstance(env, gym.Wrapper) else env
    for name in ("observation_space", "action_space"):
        space = getattr(inner, name, None)
        if isinstance(space, dict):
            return True
        if space is None and isinstance(getattr(inner, f"{name}s", None), Mapping):
            return True
    return False


def _describe_other(env: Any) -> str | None:
    """Describe something that is not a single Gymnasium environment, with advice; return None if it is one."""
    kind = _kind_of(env)
    is_env = isinstance(env, gym.Env)
    space = getattr(env, "observation_space", None)
    has_agents = hasattr(env, "possible_agents") or hasattr(env, "agents")
    missing = [
        name for name in ("observation_space", "action_space") if getattr(env, name, None) is None
    ]
    problem = None
    if inspect.isclass(env) or inspect.isroutine(env):
        problem = f"{env!r}, which is not an environment. Return the result of calling it."
    elif joint_kind(env) == "agents":
        problem = (
            f"a PettingZoo environment ({kind}), which has several agents, and is not taken here."
        )
    elif not is_env and inspect.isroutine(space) and not hasattr(env, "agent_iter"):
        problem = f"a {kind}, with spaces of several agents. If it is a parallel environment, set its possible_agents."
    elif not is_env and (has_agents or inspect.isroutine(space)):
        problem = (
            f"a PettingZoo environment ({kind}) that is not a parallel one. Return "
            f"pettingzoo.utils.aec_to_parallel(env), if its agents may act at the same time. Or: {ONE_AGENT}"
        )
    elif _is_of_rllib(env):
        problem = f"a multi-agent environment of RLlib ({kind}). {PARALLEL}"
    elif space is None and hasattr(env, "observation_spec") and hasattr(env, "action_spec"):
        problem = f"a dm_env environment ({kind}). Wrap it with shimmy.DmControlCompatibilityV0."
    elif hasattr(env, "num_envs") and (hasattr(env, "single_observation_space") or not is_env):
        problem = (
            f"a vector environment ({kind}) of {env.num_envs}. Return a single environment here; training also takes "
            f"vectors with the API of gymnasium.vector, with `envs_per_sampler={env.num_envs}`."
        )
    elif is_env and missing:
        problem = f"a {kind} without {missing[0]}. Set self.{missing[0]} in its constructor."
    elif missing or not hasattr(env, "reset") or not hasattr(env, "step"):
        problem = f"{env!r}, which is not a Gymnasium environment. Return a gymnasium.Env."
    return problem
