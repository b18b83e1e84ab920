"""`dppo train`: train one policy."""

from __future__ import annotations

import signal
from pathlib import Path

from dppo.commands import arguments
from dppo.config import Config
from dppo.config.trust import code_named_by
from dppo.errors import ConfigError


def main(argv: list[str]) -> int:
    """Train as the flags say; return the exit code: 0, or 128 + n where signal n stopped the run."""
    wanted = arguments.parse(argv, "dppo train")
    try:
        config = Config(**wanted.settings)
    except ConfigError as error:
        if not any(setting in str(error) for setting in wanted.tuned):
            raise
        hint = f"The settings tuned for {wanted.preset} apply; --preset none leaves them out."
        raise ConfigError(f"{error}\n{hint}") from None

    if isinstance(wanted.resume, Path):
        for action in code_named_by(wanted.settings).values():
            print(f"{wanted.resume} {action}.", flush=True)

    from dppo.runner import train

    if wanted.preset is not None:
        print(f"Settings tuned for {wanted.preset} (--preset none leaves them out).", flush=True)
    result = train(config, resume=wanted.resume, branch=wanted.branch)
    return 0 if result.stopped_by is None else 128 + signal.Signals[result.stopped_by]
