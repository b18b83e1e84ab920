"""`dppo train`: train one policy."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from dppo.commands import arguments
from dppo.config import Config
from dppo.config.trust import code_named_by
from dppo.errors import ConfigError
from dppo.records.observer import Observer, RunInfo

logger = logging.getLogger("dppo")


def main(argv: list[str]) -> int:
    """Train with the settings of the command line; return the exit code: 0, or 128 + n if signal n stopped the run."""
    wanted = arguments.parse(argv, "dppo train")
    try:
        config = Config(**wanted.settings)
    except ConfigError as error:
        if "is not a known setting" in str(error) or not any(setting in str(error) for setting in wanted.tuned):
            raise
        hint = f"The settings tuned for {wanted.preset} apply; --preset none disables them."
        raise ConfigError(f"{error}\n{hint}") from None
    if isinstance(wanted.resume, Path):
        for action in code_named_by(wanted.settings).values():
            print(f"{wanted.resume} {action}.", flush=True)

    from dppo.run.runner import train

    observers = [] if wanted.preset is None else [_NamePreset(wanted.preset)]
    result = train(config, resume=wanted.resume, branch=wanted.branch, observers=observers)
    return 0 if result.stopped_by is None else 128 + signal.Signals[result.stopped_by]


class _NamePreset(Observer):
    """Report the preset of a run, once the run has begun."""

    def __init__(self, preset: str) -> None:
        self._preset = preset

    def on_start(self, run: RunInfo) -> None:
        """Log the name of the preset."""
        logger.info("using the settings tuned for %s; --preset none disables them", self._preset)
