"""Slow tests, which are run seldom: the names that they replace exist, as those of the fast tests do when they run."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW = [
    path for path in Path(__file__).parent.rglob("test_*.py") if "mark.slow" in path.read_text()
]


def imported(tree: ast.Module) -> dict[str, str]:
    """Return the dotted name of what each name of a file means, for the modules and objects of dppo."""
    names = dict[str, str]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dppo"):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names | {"dppo": "dppo"}


def replaced(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of dppo that `monkeypatch.setattr` replaces."""
    names = imported(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "setattr":
            continue
        target, name = node.args[:2]
        if isinstance(target, ast.Constant) and str(target.value).startswith("dppo."):
            yield str(target.value)
        elif isinstance(name, ast.Constant):
            owner, *attributes = ast.unparse(target).split(".")
            if owner in names:
                yield ".".join([names[owner], *attributes, str(name.value)])


def test_what_a_slow_test_replaces_exists() -> None:
    for path in SLOW:
        for name in replaced(ast.parse(path.read_text("utf8"))):
            try:
                pkgutil.resolve_name(name)
            except AttributeError as error:
                pytest.fail(f"{path.name} replaces {name}, which does not exist: {error}")
