"""Create one environment from an id, `module:Name-v0`, `module:factory` or a callable, and in wrappers."""

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from dppo.envs.arguments import refusing_arguments
from dppo.envs.checks.faults import WrapperRaised
from dppo.envs.closing import close, close_all
from dppo.envs.instance import ANY_INSTANCE, Instance
from dppo.envs.kinds import checked_kind, joint_kind, refuse_sub_envs
from dppo.envs.names import EnvId, factory_of
from dppo.errors import ConfigError, DppoError
from dppo.files import make_scratch_dir
from dppo.process_state.forks import FORKS
from dppo.signals import INTERRUPTIONS
from dppo.user_code import import_path, imported, in_a_line


def make_env(env_id: EnvId, env_kwargs: dict[str, Any], instance: Instance = ANY_INSTANCE) -> Any:
    """Create one environment with its own copy of `env_kwargs`; exceptions of its constructor are not caught.

    A callable of the user gets further arguments if it has parameters with their names: fields of `instance`,
    `scratch_dir`, a folder that is removed when the environment is closed, and `slots`, cores that are free again then.

    Raise ConfigError if an argument cannot be copied, the result is not an environment that `instance` accepts, or the
    factory cannot use the ranks of `instance`; NoCores if too few cores are free.
    """
    factory = env_id if callable(env_id) else factory_of(env_id)
    with ExitStack() as stack:
        arguments = _accepted_arguments(factory, env_kwargs, instance, stack)
        with refusing_arguments(env_id, factory, env_kwargs):
            result = factory(**_own_copy(env_kwargs), **arguments)
        env = checked_kind(result, f"env_id={import_path(env_id)}", joint=instance.num_sub_envs > 0)
        if "scratch_dir" in arguments or "slots" in arguments:
            # An environment may close itself in its reset, to restart its simulator: its folder stays then.
            is_single = isinstance(env, gym.Env) and not joint_kind(env)
            holder: Any = gym.Wrapper(env) if is_single else _Holder(env)
            holder.close = _Closing(env, stack.pop_all())
            env = holder
    if instance.max_steps is None:
        return env
    return _limited(env, instance.max_steps)


def _limited(env: Any, max_steps: int) -> Any:
    refuse_sub_envs(
        env,
        "replay_limit",
        "truncates single environments, and this one has sub-environments. Leave it out.",
    )
    if not isinstance(env, gym.Env):
        close_all([env])
        raise ConfigError(
            "replay_limit: truncates only a gymnasium.Env. Derive the environment from it, or leave it out."
        )
    return TimeLimit(env, max_steps)


class _Holder:
    """An environment that is no gymnasium.Env, or has sub-environments, with a `close` of its own."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.env, name)


class _Closing:
    """Closes an environment, and ends what it got: its folder and slots, which copies and forks do not end."""

    def __init__(self, env: Any, resources: ExitStack) -> None:
        self._env = env
        self._resources = resources
        self._process = FORKS.number
        resources.callback(close, env)  # first, and only once

    def __call__(self) -> None:
        if self._process == FORKS.number:
            self._resources.close()

    def __reduce__(self) -> Any:
        """Copy without the resources; `copy.deepcopy` and `pickle` call this."""
        return _Closing, (self._env, ExitStack())


def _accepted_arguments(
    factory: Any, env_kwargs: dict[str, Any], instance: Instance, stack: ExitStack
) -> dict[str, Any]:
    """Return arguments for parameters of `factory` that `env_kwargs` does not have; none for a registered id."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # it is written in C
        return {}
    # the latter by functools.partial
    passed_names = env_kwargs.keys() | getattr(factory, "keywords", {}).keys()
    names = parameters.keys() - passed_names
    required = {name for name in names if parameters[name].default is inspect.Parameter.empty}
    arguments = {
        name: value for name, value in instance.optional_arguments().items() if name in names
    }
    if "scratch_dir" in names:
        arguments["scratch_dir"] = make_scratch_dir(stack)
    # a parameter of this name that has a default of its own is something else
    if "slots" in names and parameters["slots"].default in (inspect.Parameter.empty, None):
        arguments["slots"] = _slots(instance, stack)
    elif not instance.layout.is_plain:
        raise ConfigError(
            f"{instance.layout}: has no effect, because the environment does not ask for its slots. Give its factory a "
            f"parameter `slots`, and start the program with `slots.launch`, or leave these settings out."
        )
    arguments |= {
        name: value for name, value in instance.required_arguments().items() if name in required
    }
    return arguments


def _slots(instance: Instance, stack: ExitStack) -> Any:
    from dppo.slots.slots import Slots

    slots = Slots(instance.layout, instance.sampler_id, instance.env_index, instance.restarting)
    stack.callback(slots.close)
    return slots


def _own_copy(env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copy arguments deeply, so that an environment that changes its arguments does not change another one's."""
    copied: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for name, value in env_kwargs.items():
        try:
            copied[name] = copy.deepcopy(value, memo)
        except Exception as error:  # a class of the user's may raise anything
            raise ConfigError(
                f"env_kwargs: {name}={value!r} cannot be copied, but each environment needs its own copy "
                f"({in_a_line(error)}). Pass plain data, and create such objects inside the environment."
            ) from None
    return copied


def in_wrappers(env: Any, wrappers: Iterable[Any]) -> Any:
    """Return `env` in `wrappers`, the first one innermost; close it, and raise, if one of them fails.

    Raise ConfigError if a wrapper does not return an environment, and WrapperRaised from what it raises.
    """
    for code in wrappers:
        try:
            env = checked_kind(_wrapped(env, code), f"wrappers={import_path(code)}")
        except BaseException:
            close_all([env])
            raise
    return env


def _wrapped(env: Any, code: Any) -> Any:
    wrapper = wrapper_of(code)
    try:
        return wrapper(env)
    except (DppoError, *INTERRUPTIONS):
        raise
    except BaseException as error:
        raise WrapperRaised(f"the wrapper {import_path(code)}") from error


def wrapper_of(code: Any) -> Callable[[Any], Any]:
    """Return a wrapper by its import path, or itself; raise ConfigError if it cannot be imported or called."""
    try:
        wrapper = imported(code, "Wrapper") if isinstance(code, str) else code
    except ImportError as error:
        raise ConfigError(f"wrappers={code}: {error}.") from None
    if not callable(wrapper):
        raise ConfigError(
            f"wrappers={import_path(code)}: is {wrapper!r}. Name a class or function env -> env."
        )
    try:
        signature = inspect.signature(wrapper)
    except (TypeError, ValueError):  # it is written in C
        return wrapper
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"wrappers={import_path(code)}: cannot be called with the environment alone ({error}). Write a function "
            f"env -> env that passes the other arguments, and name it instead."
        ) from None
    return wrapper
