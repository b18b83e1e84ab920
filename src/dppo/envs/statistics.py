"""Detect wrappers that normalize by running statistics of their own, such as Gymnasium's NormalizeObservation.

Each instance has other statistics: another sampler, an evaluation and a resumed run have different ones, and no
checkpoint holds them. A policy that learned behind one set of them acts behind another.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gymnasium.vector import AsyncVectorEnv

from dppo.envs.closing import close_all
from dppo.errors import ConfigError

# The name of the class in Gymnasium, in Stable-Baselines3, and in copies of either.
STATISTICS = "RunningMeanStd"
# attributes in which wrappers of several packages keep what is inside
INNER = ("env", "venv", "par_env", "_env")
# attributes that are False if nothing is updated
FROZEN = ("update_running_mean", "_update_running_mean", "training")
IN_PROCESSES = {"obs_rms": "NormalizeObservation", "return_rms": "NormalizeReward"}
REMEDY = (
    "Leave it out: norm_obs=True and norm_reward=True do this, and are saved with the policy. Or freeze it "
    "(update_running_mean=False), or use `running_statistics=allow`."
)


def running_statistics(env: Any) -> list[str]:
    """Return the names of the wrappers of `env` that update statistics of their own, outermost first."""
    names = [
        type(layer).__name__
        for layer in _layers(env)
        if _has_statistics(layer) and not _is_frozen(layer)
    ]
    return names + _in_processes(getattr(env, "unwrapped", None))


def check_statistics(env: Any, setting: Literal["refuse", "allow"]) -> None:
    """Close `env`, and raise ConfigError, if a wrapper of it has running statistics and `setting` refuses them."""
    if setting == "allow":
        return
    try:
        wrappers = running_statistics(env)
        if wrappers:
            raise ConfigError(
                f"running_statistics=refuse: {describe_statistics(wrappers)}. {REMEDY}"
            )
    except BaseException:
        close_all([env])
        raise


def describe_statistics(wrappers: list[str]) -> str:
    """Describe what is wrong with such wrappers, without a full stop."""
    names = " and ".join(wrappers)
    return (
        f"{names} around the environment normalizes by running statistics of its own. They differ between samplers, "
        f"and evaluations, exports and resumed runs begin with none"
    )


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and all that is inside of it; of the environments in a vector, the first."""
    visited = set[int]()
    inside = [env]
    while inside:
        layer = inside.pop(0)
        if id(layer) in visited:
            continue
        visited.add(id(layer))
        yield layer
        attributes = _attributes(layer)
        inside += [attributes[name] for name in INNER if attributes.get(name) is not None]
        environments = attributes.get("envs")
        if isinstance(environments, list | tuple):
            inside += environments[:1]


def _attributes(layer: Any) -> dict[str, Any]:
    return getattr(layer, "__dict__", {})


def _has_statistics(layer: Any) -> bool:
    values = list(_attributes(layer).values())
    for value in tuple(values):
        if isinstance(value, Mapping):  # one for each part of a Dict observation
            values += value.values()
    return any(base.__name__ == STATISTICS for value in values for base in type(value).__mro__)


def _is_frozen(layer: Any) -> bool:
    return any(getattr(layer, name, True) is False for name in FROZEN)


def _in_processes(base: Any) -> list[str]:
    """Return the names of such wrappers around environments in processes of their own."""
    if not isinstance(base, AsyncVectorEnv):
        return []
    return [
        name
        for attribute, name in IN_PROCESSES.items()
        if any(base.call("has_wrapper_attr", attribute))
        and any(base.call("get_wrapper_attr", FROZEN[0]))
    ]
