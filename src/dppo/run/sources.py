"""The files of the user's functions, by whose hashes a resumed run notices that they have changed."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.log import logger
from dppo.user_code import import_path

PRIOR = "prior_sha256"
"""The key of the hash of the prior's file in a checkpoint."""


def prior_source(config: Config) -> dict[str, str | None]:
    """Return what a checkpoint holds of the prior's file; {} without a prior."""
    if config.prior is None:
        return {}
    return {PRIOR: source_sha256(config.prior)}


def warn_of_other_prior(state: Mapping[str, Any], config: Config) -> None:
    """Log a warning if the prior's file has changed in the middle of the iterations that the prior collects."""
    collected = config.collected_by_prior
    stored_source = state.get(PRIOR)
    if stored_source is None or not 0 < state["iteration"] < collected:
        return
    if prior_source(config)[PRIOR] != stored_source:
        logger.warning(
            "prior=%s: its file has changed after %s of the %s iterations that it collects, so the policy learns from "
            "both versions. Restore the file, or start again, in another folder.",
            config.prior_name,
            state["iteration"],
            collected,
        )


def source_sha256(code: Any) -> str | None:
    """Return the SHA-256 of the file that defines a function, a class or an import path; None without such a file."""
    if not isinstance(code, str) and not inspect.isclass(code) and not inspect.isroutine(code):
        return None
    module, _, name = import_path(code).rpartition(":")
    if "<" in name:  # a lambda, or a function within another one
        return None
    file: Any = module
    if not module.endswith(".py"):
        file = getattr(sys.modules.get(module), "__file__", None)
        with suppress(ImportError, ValueError):
            file = file or getattr(find_spec(module), "origin", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None
