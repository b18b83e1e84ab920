"""The source as syntax trees, which take longer to make than most tests: once for all tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import dppo

SRC = Path(dppo.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Return the tree of each file of the source, by its path below src/dppo."""
    paths = sorted(SRC.rglob("*.py"))
    return {
        path.relative_to(SRC).as_posix(): ast.parse(path.read_text(encoding="utf8"))
        for path in paths
    }
