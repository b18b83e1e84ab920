"""A controller of the user's, and its instance that controls one environment."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from dppo.envs.checks.actions import action_checker
from dppo.envs.checks.faults import user_traceback
from dppo.envs.checks.returned import BadResult
from dppo.errors import ConfigError, ControllerFault, DppoError
from dppo.policies.controller_names import FORMS, absolute, imported_controller, method_name
from dppo.process_state.borders import Guard, user_code
from dppo.signals import INTERRUPTIONS
from dppo.user_code import import_path, in_a_line

ARGUMENTS = ("action_space", "observation_space", "seed")
"""Arguments that a class gets, if its constructor has parameters of these names."""


class Controller:
    """A controller by the name, class or function that the user has given; makes instances.

    It can be sent to other processes. An import path is imported again there.
    """

    def __init__(self, code: Any, setting: str = "policy") -> None:
        """Find the controller; raise ConfigError if there is none, or it cannot be called with an observation.

        Args:
            code: `module:name`, `file.py:name`, or a function, a class or an object.
            setting: the setting or argument that names it, for messages.
        """
        self.name = _name_of(code)
        """Import path of the controller, or of the class of an object."""
        self.setting = setting
        self._named = absolute(code) if isinstance(code, str) else code
        self._definition: Any = None
        _check(self.definition, str(self))

    def __str__(self) -> str:
        return f"{self.setting}={self.name}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_definition": None}

    @property
    def definition(self) -> Any:
        """The function, class or object, imported when it is first needed in a process."""
        if self._definition is None:
            self._definition = self._named
            if isinstance(self._named, str):
                self._definition = imported_controller(self._named, self.setting)
        return self._definition

    @property
    def samples(self) -> bool:
        """True if the controller can sample actions, by `predict(obs, deterministic=False)`."""
        return method_name(self.definition) == "predict"

    @property
    def plays_again(self) -> bool:
        """True if an instance may play several episodes: the class has `reset`, and its constructor takes no seed."""
        takes_seed = inspect.isclass(self.definition) and "seed" in _parameters(self.definition)
        return callable(getattr(self.definition, "reset", None)) and not takes_seed

    def instance(self, arguments: dict[str, Any]) -> Any:
        """Return an instance of a class, a copy of an object, or a function as it is.

        Objects with `predict` are returned as they are, too: their state is passed to them.

        Args:
            arguments: a value for each of `ARGUMENTS`.
        """
        definition = self.definition
        if inspect.isclass(definition):
            names = _parameters(definition)
            return definition(**{name: value for name, value in arguments.items() if name in names})
        if _is_copied(definition):
            return copy.deepcopy(definition)
        return definition


class ControllerInstance:
    """The controller of one environment: it plays one episode after the other, and its actions are checked.

    Nothing is carried from one episode to the next: an instance is reset, or replaced by a new one.
    """

    def __init__(self, controller: Controller, env: Any, *, deterministic: bool = True) -> None:
        """Prepare for the spaces of `env`; `deterministic` is passed on to `predict`."""
        self._controller = controller
        self._env = env
        self._deterministic = deterministic
        self._checked = action_checker(env.action_space)
        self._guard = Guard(controller.name)
        self._instance: Any = None
        self._act: Callable[[Any], Any] = controller.definition
        self._episode = ""
        self._step = 0

    def begin(self, episode: int, seed: int) -> None:
        """Begin an episode, given its index and its seed; raise ControllerFault if the controller raises."""
        self._episode = f"episode {episode} (seed {seed})"
        self._step = 0
        try:
            if self._instance is None or not self._controller.plays_again:
                self._instance = self._made(seed)
            if callable(getattr(self._instance, "reset", None)):
                self._guard.call(self._instance.reset)
        except (DppoError, *INTERRUPTIONS):
            raise
        except BaseException as error:  # a controller may raise anything
            raise self._raised("at the beginning", error) from None
        self._act = _act_of(self._instance, deterministic=self._deterministic)

    def act(self, obs: Any) -> Any:
        """Return the action of the environment's own space for an observation as the environment returned it.

        Raise ControllerFault if the controller raises, or returns anything but an action of that space.
        """
        self._step += 1
        try:
            returned = self._guard.call(partial(self._act, obs))
        except (DppoError, *INTERRUPTIONS):
            raise
        except BaseException as error:  # a controller may raise anything
            raise self._raised(f"in step {self._step}", error) from None
        try:
            return self._checked(returned)
        except BadResult as problem:
            raise ControllerFault(
                f"{self._controller}: in step {self._step} of {self._episode} it returned {problem}."
            ) from None

    def _made(self, seed: int) -> Any:
        values = (self._env.action_space, self._env.observation_space, seed)
        with user_code(f"the constructor of {self._controller.name}"):
            return self._controller.instance(dict(zip(ARGUMENTS, values, strict=True)))

    def _raised(self, moment: str, error: BaseException) -> ControllerFault:
        return ControllerFault(
            f"{self._controller}: {moment} of {self._episode} it raised {in_a_line(error)}",
            user_traceback(error),
        )


class _Predictor:
    """Calls `predict` as Stable-Baselines3 defines it; the state of a recurrent policy lasts for an episode."""

    def __init__(self, predict: Callable[..., Any], *, deterministic: bool) -> None:
        names = _parameters(predict)
        self._predict = predict
        self._arguments = {"deterministic": deterministic} if "deterministic" in names else {}
        self._takes_state = "state" in names
        self._state: Any = None

    def __call__(self, obs: Any) -> Any:
        arguments: dict[str, Any] = dict(self._arguments)
        if self._takes_state:
            arguments["state"] = self._state
        returned = self._predict(obs, **arguments)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"predict returned {type(returned).__name__}, not (action, state)")
        action, self._state = returned
        return action


def _act_of(instance: Any, *, deterministic: bool) -> Callable[[Any], Any]:
    """Find the function to call with each observation of an episode."""
    method = method_name(instance)
    if method == "predict":
        return _Predictor(instance.predict, deterministic=deterministic)
    act: Callable[[Any], Any] = instance.act if method == "act" else instance
    return act


def _check(definition: Any, label: str) -> None:
    """Raise ConfigError, which `label` begins, unless instances can be made, and called with an observation."""
    method = method_name(definition)
    if method is None:
        raise ConfigError(f"{label}: is {definition!r}, which is no controller. {FORMS}.")
    if inspect.isclass(definition):
        required = [name for name, value in _parameters(definition).items() if _is_required(value)]
        unknown = [name for name in required if name not in ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"{label}: its constructor needs {', '.join(unknown)}, and it can get only {', '.join(ARGUMENTS)}. "
                f"Give {unknown[0]} a default value."
            )
    function = definition if _is_function(definition) else getattr(definition, method)
    if not _takes_observation(function, is_unbound=_is_method_of_class(definition, method)):
        raise ConfigError(
            f"{label}: takes {inspect.signature(function)}, and must take one observation. {FORMS}."
        )
    if _is_copied(definition):
        try:
            copy.deepcopy(definition)
        except Exception as error:  # a class of the user's may raise anything
            raise ConfigError(
                f"{label}: cannot be copied, but each environment has a copy of its own ({in_a_line(error)}). Use its "
                f"class, or a function."
            ) from None


def _is_method_of_class(definition: Any, method: str) -> bool:
    """Return whether the method of `definition` takes `self` as its first argument."""
    if not inspect.isclass(definition):
        return False
    return not isinstance(inspect.getattr_static(definition, method), staticmethod | classmethod)


def _is_function(definition: Any) -> bool:
    return inspect.isroutine(definition) or isinstance(definition, partial)


def _is_copied(definition: Any) -> bool:
    """Return whether `definition` is an object that may keep something between the steps of an episode."""
    is_object = not inspect.isclass(definition) and not _is_function(definition)
    return is_object and method_name(definition) != "predict"


def _is_required(parameter: inspect.Parameter) -> bool:
    is_single = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return is_single and parameter.default is parameter.empty


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it is written in C
        return {}


def _takes_observation(function: Any, *, is_unbound: bool) -> bool:
    arguments = (None, None) if is_unbound else (None,)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C
        return True
    return True


def _name_of(code: Any) -> str:
    if isinstance(code, str):
        return code
    is_named = inspect.isclass(code) or hasattr(code, "__qualname__")
    return import_path(code if is_named else type(code))
