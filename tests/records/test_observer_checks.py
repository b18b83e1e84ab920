"""Observers whose methods would never be called, or cannot be, are refused before training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from remedies import executes

import dppo
from dppo.errors import ConfigError
from dppo.records.observer_checks import ELSEWHERE, checked_observers


def observer_with(name: str, method: Any = lambda self, *passed: None) -> dppo.Observer:
    """Return an observer of a class with a method of this name."""
    kind: type[dppo.Observer] = type("Watch", (dppo.Observer,), {name: method})
    return kind()


def refusal_of(observers: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        checked_observers(observers)
    return str(refused.value)


THEIRS = [(name, ours) for ours, names in ELSEWHERE.items() for name in names.split()]


@executes("records/observer_checks.py: Name it {}, or in another way if you call it yourself")
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("on_iterations", "on_iteration"),
        ("on_epsiode", "on_episode"),
        ("closing_note", "closing_notes"),
        *THEIRS,
    ],
)
def test_a_method_that_a_run_never_calls_is_refused(name: str, ours: str) -> None:
    assert refusal_of([observer_with(name)]).startswith(
        f"observers: a run never calls Watch.{name}. Name it {ours}, "
    )
    assert checked_observers([observer_with(ours)])


@pytest.mark.parametrize("name", ["on_target_reached", "_on_iteration", "reached", "once"])
def test_methods_of_the_users_own_are_no_mistakes(name: str) -> None:
    assert len(checked_observers([observer_with(name)])) == 1


@executes("records/observer_checks.py: Write def {}({})")
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("on_end", lambda self, result: None, lambda self, result, error: None),
        ("on_iteration", lambda self: None, lambda self, row: None),
        ("on_start", lambda self, run, config: None, lambda self, run, config=None: None),
        ("closing_notes", lambda self, result: (), lambda self: ()),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_before_training(
    name: str, wrong: Any, right: Any
) -> None:
    message = refusal_of([observer_with(name, wrong)])
    assert message.startswith(f"observers: Watch.{name}(")
    assert f"Write def {name}(self" in message
    assert checked_observers([observer_with(name, right)])


@executes(
    "records/observer_checks.py: Pass a list: [{}(...)]",
    "records/observer_checks.py: Pass a list of observers",
    "records/observer_checks.py: Pass an observer of it: {}()",
)
def test_observers_are_a_list_of_instances() -> None:
    assert "Pass a list: [Observer(...)]" in refusal_of(dppo.Observer())
    assert "Pass a list of observers" in refusal_of(7)
    assert "Pass an observer of it: Observer()" in refusal_of([dppo.Observer])
    assert checked_observers([dppo.Observer()])


def test_a_callback_of_another_library_is_answered_with_what_replaces_it() -> None:
    kind = type("BestSoFar", (type("EvalCallback", (), {}),), {})
    assert "is not a dppo.Observer. Evaluations are a setting: dppo.Config(" in refusal_of([kind()])
    assert "Make its class a subclass of it." in refusal_of([object()])


def test_a_run_refuses_its_observers_before_it_makes_a_folder(tmp_path: Path) -> None:
    observers: Sequence[Any] = [
        observer_with("_on_step"),
        observer_with("on_end", lambda self: None),
    ]
    with pytest.raises(ConfigError) as refused:
        dppo.train(tiny_run(tmp_path / "run"), observers=observers)
    assert len(str(refused.value).splitlines()) == 2
    assert not (tmp_path / "run").exists()
