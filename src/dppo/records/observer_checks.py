"""Checks of the observers that a user passes: a method that is never called, or cannot be, is found before training."""

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from dppo.config.aliases import ABSENT_NAMES
from dppo.errors import ConfigError, refuse
from dppo.records.observer import Observer

METHODS = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""The methods that a run calls."""

ELSEWHERE = {
    "on_start": "_on_training_start on_training_start on_train_begin on_algorithm_init",
    "on_iteration": (
        "_on_step on_step _on_rollout_start _on_rollout_end on_rollout_start on_rollout_end on_train_result on_update "
        "on_sample_end on_learn_on_batch on_epoch_end on_episode_step"
    ),
    "on_episode": "on_episode_end on_episode_start on_episode_created",
    "on_end": "_on_training_end on_training_end on_train_end on_finish",
}
"""For our methods, the names of methods that other libraries call at about the same time."""


def checked_observers(observers: Iterable[Any]) -> list[Observer]:
    """Return the observers as a list; raise ConfigError if they are not observers, or have methods that cannot work."""
    if isinstance(observers, Observer):
        name = type(observers).__name__
        raise ConfigError(f"observers={name}(...): is one observer. Pass a list: [{name}(...)].")
    if not isinstance(observers, Iterable):
        raise ConfigError(f"observers={observers!r}: is not a list. Pass a list of observers.")
    observer_list = list(observers)
    refuse(error for observer in observer_list for error in _problems(observer))
    return observer_list


def _problems(observer: Any) -> Iterator[ConfigError]:
    """Yield a ConfigError for everything that keeps a run from calling the methods of an observer."""
    if isinstance(observer, type) and issubclass(observer, Observer):
        name = observer.__name__
        yield ConfigError(f"observers: {name} is a class. Pass an observer of it: {name}().")
        return
    if not isinstance(observer, Observer):
        names = [kind.__name__ for kind in type(observer).__mro__]
        answers = [ABSENT_NAMES[name] for name in names if name in ABSENT_NAMES]
        answer = next(iter(answers), "Make its class a subclass of it.")
        yield ConfigError(f"observers: {observer!r} is not a dppo.Observer. {answer}")
        return
    yield from _uncalled(type(observer))
    for method in METHODS:
        yield from _uncallable(observer, method)


def _uncalled(kind: type) -> Iterator[ConfigError]:
    """Yield a ConfigError for each method whose name is almost one of ours, or that of another library."""
    theirs = {name: method for method, names in ELSEWHERE.items() for name in names.split()}
    for name in dir(kind):
        if name in METHODS or not callable(getattr(kind, name)):
            continue
        alike = theirs.get(name)
        if alike is None and name.startswith(("on_", "closing_")):  # not a private helper
            close_names = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.8)
            alike = next(iter(close_names), None)
        if alike is not None:
            yield ConfigError(
                f"observers: a run never calls {kind.__name__}.{name}. Name it {alike}, or in another way if you call "
                f"it yourself. A run calls {', '.join(METHODS)}."
            )


def _uncallable(observer: Observer, method: str) -> Iterator[ConfigError]:
    """Yield a ConfigError if a method does not take the arguments with which a run calls it."""
    parameters = list(inspect.signature(getattr(Observer, method)).parameters)[1:]  # without self
    try:
        signature = inspect.signature(getattr(observer, method))
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        arguments = ", ".join(["self", *parameters])
        yield ConfigError(
            f"observers: {type(observer).__name__}.{method}{signature} cannot be called: {error}. Write "
            f"def {method}({arguments})."
        )
