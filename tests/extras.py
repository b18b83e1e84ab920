"""Packages of extras are hidden from each test that does not ask for them, as where only the extra `test` is installed.

A test asks by `pytest.importorskip`. Processes that tests start see all packages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest

EXTRAS = (("av", "pygame"), ("onnx", "onnxscript", "onnxruntime"), ("optuna", "pyarrow", "pandas"))
"""Import names of the packages of the extras `video`, `onnx` and `tune`, which `dev` has and `test` has not."""
import_or_skip = pytest.importorskip
loaded: dict[str, Any] = {}
"""Modules that were imported by a test, while they are hidden from others."""


def pytest_runtest_setup() -> None:
    """Hide the packages: Python then neither finds nor imports them."""
    for names in EXTRAS:
        for name in names:
            module = sys.modules.get(name)
            if module is not None:
                loaded[name] = module
            sys.modules[name] = None  # type: ignore[assignment]


def importorskip(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Show the packages of the extra with this one until the next test; skip this test if it is not installed."""
    for names in EXTRAS:
        if name in names:
            show(names)
    return import_or_skip(name, *arguments, **keywords)


def show(names: Iterable[str]) -> None:
    """Let this test import packages that are hidden."""
    for name in names:
        # imported twice, a package lacks its modules
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]
            if name in loaded:
                sys.modules[name] = loaded[name]


pytest.importorskip = importorskip  # type: ignore[assignment]
