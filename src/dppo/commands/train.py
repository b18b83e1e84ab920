"""`dppo train`: train one policy."""

from __future__ import annotations

import signal
from typing import Any

from dppo.commands import arguments
from dppo.config import make_config
from dppo.errors import ConfigError


def main(argv: list[str]) -> int:
    """Train as the flags say; returns the exit code."""
    wanted = arguments.parse(argv, "dppo train")
    try:
        config = make_config(wanted.settings)
    except ConfigError as error:
        if not any(setting in str(error) for setting in wanted.tuned):
            raise
        hint = f"The settings tuned for {wanted.preset} are in force; --preset none leaves them out."
        raise ConfigError(f"{error}\n{hint}") from None

    from dppo.runner import train

    if wanted.preset is not None:
        print(f"Settings tuned for {wanted.preset} (--preset none leaves them out).", flush=True)
    result = train(config, resume=wanted.resume)
    return 0 if result.stopped_by is None else 128 + signal.Signals[result.stopped_by]


def parse_settings(argv: list[str], prog: str) -> dict[str, Any]:
    """The settings that `ENV_ID --flag value ...` asks for, not yet checked."""
    return arguments.parse(argv, prog).settings
