"""The checkpoint that a run deploys: the newest one, or with `never_worse` the best that is shown to be better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dppo.config import flattened
from dppo.errors import CheckpointError, NotBetter
from dppo.log import logger
from dppo.records.comparison import BaselineComparison
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import LoadedCheckpoint, best_json
from dppo.records.terminal.figures import number


def find_deployed(newest: LoadedCheckpoint, path: Path) -> LoadedCheckpoint:
    """Return the checkpoint that a run deploys, by its best.json if it has `never_worse`, and its comparison.

    Args:
        newest: the newest checkpoint of the run, or the one at `path`.
        path: the folder of the run; or a checkpoint, which is deployed as it was named.

    Raises:
        NotBetter: with `never_worse`, no evaluation shows that a policy is better than the baseline.
        CheckpointError: the best checkpoint, or best.json, is damaged.
    """
    settings = flattened(newest.checkpoint.state["config"])
    if settings.get("baseline") is None:
        return newest
    decides = path.is_dir() and settings.get("never_worse")
    best: dict[str, Any] = {}
    try:
        best = best_json(newest.path.parent)
    except CheckpointError:
        if decides:
            raise
    newest = replace(newest, comparison=comparison_in(best))
    if not decides:
        return newest
    if best.get("deployed") != "policy" or newest.comparison is None:
        raise NotBetter(_explain_baseline(path, newest), newest.comparison)
    logger.info("%s: %s", path, newest.comparison)
    best_path = newest.path.with_name(checkpoints.file_name(newest.comparison.iteration or 0))
    if best_path.name == newest.path.name:
        return newest
    return replace(newest, path=best_path, checkpoint=checkpoints.load(best_path), newest=False)


def notes_on_best(run: Path, newest: LoadedCheckpoint) -> Iterator[str]:
    """Yield a line if the best evaluation of a run was of an earlier policy than its newest one, which is deployed."""
    settings = flattened(newest.checkpoint.state["config"])
    if not run.is_dir() or settings.get("never_worse") or settings.get("eval_every") is None:
        return
    path = newest.path.with_name(checkpoints.BEST)
    with suppress(CheckpointError, KeyError, OverflowError, TypeError, ValueError):
        best = best_json(path.parent)
        score = float(best["score"])
        checkpoint = path.with_name(checkpoints.file_name(int(best["iteration"])))
        if checkpoint.name != newest.path.name and checkpoint.is_file():
            yield (
                f"{run}: this is its newest policy, {newest.path.stem}. Its best evaluation, {number(score)}, was of "
                f"{checkpoint.stem}: pass {path} for that policy."
            )


def comparison_in(best: dict[str, Any]) -> BaselineComparison | None:
    """Return the comparison with a baseline in the content of best.json; None without a valid one."""
    try:
        return BaselineComparison.from_json(best["baseline"])
    except (KeyError, OverflowError, TypeError, ValueError):
        return None


def _explain_baseline(path: Path, newest: LoadedCheckpoint) -> str:
    """Explain why the baseline is deployed, and how to get the policy."""
    name = flattened(newest.checkpoint.state["config"]).get("baseline")
    fact = "none has ended yet"
    checkpoint = newest.path
    comparison = newest.comparison
    if comparison is not None and comparison.difference is not None:
        fact = f"the best one differs by {comparison.difference}"
        best_path = newest.path.with_name(checkpoints.file_name(comparison.iteration or 0))
        checkpoint = best_path if best_path.exists() else newest.path
    return (
        f"{path}: no evaluation shows at 95 % that the policy is better than the baseline {name}: {fact}. With "
        f"never_worse the baseline is deployed: use {name} itself. To use the policy all the same, pass {checkpoint}."
    )
