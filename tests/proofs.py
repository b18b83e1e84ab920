"""Which test proves which row of docs/FAULT_TABLE.md, read from `pytest.mark.proves` without importing a test."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent


@cache
def proofs() -> dict[str, list[str]]:
    """Return, for each fault, the tests that prove it, as `tests/test_x.py::test_y`; a file whose tests all do."""
    tests: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text(encoding="utf8")
        if "mark.proves(" not in source:
            continue
        name = f"tests/{file.relative_to(TESTS).as_posix()}"
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                proof = f"{name}::{node.name}"
                marks = node.decorator_list
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                proof = name
                marks = [node.value]
            else:
                continue
            for fault in _faults(marks):
                tests.setdefault(fault, []).append(proof)
    return tests


def _faults(marks: list[ast.expr]) -> list[str]:
    calls = [call for mark in marks for call in ast.walk(mark) if isinstance(call, ast.Call)]
    proving = [call for call in calls if ast.unparse(call.func) == "pytest.mark.proves"]
    return [ast.literal_eval(argument) for call in proving for argument in call.args]
