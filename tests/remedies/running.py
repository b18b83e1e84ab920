"""Start tiny runs in this process, and read what to change from the messages that they end with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_origin

import dppo
from dppo.config.parts import types_by_name
from dppo.errors import DppoError
from remedies.carrying_out import parsed

TINY: dict[str, Any] = {
    "num_samplers": 1,
    "num_steps": 16,
    "update_epochs": 1,
    "minibatch_size": 16,
    "hidden_sizes": (4,),
    "progress": "off",
}


class Started(Exception):
    """The run has started."""


class _Starts(dppo.Observer):
    def on_start(self, run: Any) -> None:
        raise Started


def problem(tmp_path: Path, *, starts: bool = False, **settings: Any) -> str:
    """Train for one iteration, or only until the run `starts`; return the message with which it failed, or ""."""
    run_dir = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
    try:
        sizes = TINY
        if settings.keys() & {"model", "image_encoder"}:  # a network that has no such layers
            sizes = {name: value for name, value in TINY.items() if name != "hidden_sizes"}
        steps = TINY["num_steps"] * settings.get("envs_per_sampler", 1)
        config = dppo.Config(**{**sizes, "total_timesteps": steps, "run_dir": run_dir, **settings})
        dppo.train(config, observers=[_Starts()] if starts else [])
    except Started:
        return ""
    except DppoError as error:
        return getattr(error, "message", str(error))
    return ""


def settings_in(message: str) -> dict[str, Any]:
    """Return the settings with values between backticks in a message."""
    settings = dict(parsed(assignment) for assignment in re.findall(r"`([a-z_]+=[^`]*)`", message))
    for name, value in settings.items():
        if name in types_by_name() and get_origin(types_by_name()[name]) is tuple:
            settings[name] = tuple(str(value).split())
    return settings


def captured(message: str, pattern: str) -> str:
    """Return the part of a message that a pattern captures, such as a command."""
    match = re.search(pattern, message)
    assert match, f"{pattern!r} is not in: {message}"
    return match[1]


def pattern_of(words: str, *, as_typed: bool = False) -> str:
    """Return words of a source text as a regular expression, in which {} stands for any text.

    With `as_typed`, settings between backticks are flags, as in the messages of commands.
    """
    if as_typed:
        words = re.sub("`[a-z_]+(?:=[^`]*)?`", "{}", words)
    return ".*".join(map(re.escape, words.split("{}")))
