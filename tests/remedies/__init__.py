"""Remedies that messages print, and what carries each of them out: see `tests/test_remedies.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


def executes(*remedies: str) -> Callable[[Test], Test]:
    """Mark a test that carries out remedies: each is a file below src/dppo and words of its text, "file.py: Use x"."""
    assert all(": " in remedy for remedy in remedies)
    return lambda test: test
