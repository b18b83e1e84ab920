"""Check the arguments of an environment by the signature of what makes it, before any is made."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from dppo.envs.instance import ANY_INSTANCE
from dppo.envs.names import EnvId, factory_of, make_registered
from dppo.errors import ConfigError, refusals_of, refuse, unknown_name
from dppo.process_state.borders import importing
from dppo.user_code import import_path, in_a_line, place_of

Parameters = Mapping[str, inspect.Parameter]
SLOTS = "slots"
SCRATCH_DIR = "scratch_dir"
PASSED = {
    *ANY_INSTANCE.optional_arguments(),
    *ANY_INSTANCE.required_arguments(),
    SCRATCH_DIR,
    SLOTS,
}
"""Names of parameters for which a factory gets arguments that the user does not pass."""
OF_GYMNASIUM = ("max_episode_steps", "disable_env_checker")
"""Arguments of gymnasium.make, which takes them for each registered environment."""
TAKES_NONE = re.compile(
    r"takes no (keyword )?arguments|takes exactly one argument \(the instance to initialize\)"
)
NOT_TAKEN = re.compile("(unexpected|invalid) keyword argument")
"""This, and `TAKES_NONE`, are Python's messages about keywords that a function does not have."""


def check_arguments(
    env_id: EnvId,
    env_kwargs: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    setting: str = "env_kwargs",
) -> None:
    """Raise ConfigError, with a line for each, if arguments are not known to what makes the environment, or missing.

    Nothing is refused where the signature cannot be known, or has **kwargs.

    Args:
        env_id: an environment that `check_env_id` accepts.
        env_kwargs: all arguments.
        names: those that are checked; None: all.
        setting: the setting that has them.
    """
    parameters, passed_names = _signature_of(env_id)
    if parameters is None:
        return
    checked = env_kwargs if names is None else names
    refuse(
        _problems(
            parameters, env_kwargs.keys() | passed_names, checked, import_path(env_id), setting
        )
    )


@contextmanager
def refusing_arguments(
    env_id: EnvId, factory: Callable[..., Any], env_kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Raise ConfigError in place of a TypeError about arguments that `factory` passes on by its **kwargs.

    `check_arguments` cannot refuse these, because only a call shows which function they are for.
    """
    try:
        yield
    except TypeError as error:
        text = in_a_line(error)
        parameters = _parameters(factory) or {}
        passed_on = set()
        if _has_kwargs(parameters):
            # render_mode: whether it is taken is asked, and answered, where the environment is to be shown
            passed_on = env_kwargs.keys() - parameters.keys() - {"render_mode"}
        refused = set()
        if TAKES_NONE.search(text):
            refused = passed_on
        elif NOT_TAKEN.search(text):
            refused = passed_on & set(re.findall(r"'(\w+)'", text))
        if not refused:
            raise
        raise ConfigError(
            f"env_kwargs: {import_path(env_id)} passes its **kwargs ({', '.join(sorted(refused))}) to a function that "
            f"does not take them: {text}{place_of(error)}. Correct their names, or leave them out.",
            setting="env_kwargs",
        ) from error


def check_all_arguments(
    env_id: EnvId, env_kwargs: Mapping[str, Any], eval_env_kwargs: Mapping[str, Any]
) -> None:
    """Raise ConfigError if arguments of a run, or of its evaluations, are unknown or missing: see `check_arguments`."""
    evaluated = {**env_kwargs, **eval_env_kwargs}
    refuse(
        refusals_of(
            [
                partial(check_arguments, env_id, env_kwargs),
                partial(
                    check_arguments,
                    env_id,
                    evaluated,
                    names=eval_env_kwargs,
                    setting="eval_env_kwargs",
                ),
            ]
        )
    )


def _problems(
    parameters: Parameters, passed_names: set[str], checked: Iterable[str], label: str, setting: str
) -> Iterator[ConfigError]:
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if not _has_kwargs(parameters):
        listed = ", ".join(name for name in names if name not in PASSED or name in passed_names)
        for name in checked:
            if name not in names:
                fact = unknown_name(f"argument of {label}", name, names)
                yield ConfigError(
                    f"{setting}: {fact} It takes {listed or 'none'}.", setting=setting
                )
    for name in names:
        is_required = parameters[name].default is inspect.Parameter.empty
        if is_required and name not in passed_names and name not in PASSED:
            yield ConfigError(
                f"env_kwargs: {name} is missing, and {label} has no default value for it. Pass it in `env_kwargs`.",
                setting="env_kwargs",
            )


def _has_kwargs(parameters: Parameters) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _signature_of(env_id: EnvId) -> tuple[Parameters | None, set[str]]:
    """Return the parameters of what makes the environment, and those that its registration passes.

    None: they cannot be known.
    """
    factory: Any = env_id if callable(env_id) else factory_of(env_id)
    if not (isinstance(factory, partial) and factory.func is make_registered):
        return _parameters(factory), set()
    spec = gym.spec(factory.args[0])
    creator = _creator_of(spec)
    parameters = None if creator is None else _parameters(creator)
    if parameters is None:
        return None, set()
    optional = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in OF_GYMNASIUM
    }
    return {**parameters, **optional}, set(spec.kwargs)


def _creator_of(spec: Any) -> Callable[..., Any] | None:
    """Return what Gymnasium calls to make an environment; None if it cannot be imported here."""
    if not isinstance(spec.entry_point, str):
        creator: Callable[..., Any] | None = spec.entry_point
        return creator
    try:
        with importing(spec.entry_point):
            return load_env_creator(spec.entry_point)
    except Exception:  # the constructor will raise it again, where it is reported
        return None


def _parameters(factory: Any) -> Parameters | None:
    try:
        outer = inspect.signature(factory, follow_wrapped=False).parameters
        inner = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # it is written in C
        return None
    # a decorator with **kwargs may take arguments of its own
    if outer.keys() != inner.keys():
        return outer
    return inner
