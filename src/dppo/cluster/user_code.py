"""The user's modules in other processes: where they are imported from, and a network's class on its way there."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from dppo.cluster import wire
from dppo.errors import ConfigError

Model = str | Callable[..., Any] | None
PackedModel = str | bytes | None


def import_paths() -> tuple[str, ...]:
    """Return the folders that this process imports from."""
    return tuple(path for path in sys.path if path)


def import_also_from(paths: tuple[str, ...]) -> None:
    """Import from these folders, too, after this process's own."""
    sys.path += [path for path in paths if path not in sys.path]


def packed_model(model: Model) -> PackedModel:
    """Return a user's network ready to send: its import path, or its class, packed.

    Raises:
        ConfigError: the class cannot be packed.
    """
    if model is None or isinstance(model, str):
        return model
    try:
        return wire.pack_code(model)
    except Exception as error:  # whatever a user's class raises when it is pickled
        raise ConfigError(
            f"model={model!r}: cannot be sent to other processes: {error}. Put it into a module of its own, and give "
            f"it as module:Class."
        ) from None


def unpacked_model(packed: PackedModel) -> Model:
    """Return what `packed_model` was given; `import_also_from` comes before it.

    Raises:
        ConfigError: its module cannot be imported here.
    """
    if not isinstance(packed, bytes):
        return packed
    try:
        model: Model = wire.unpack(packed)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ConfigError(
            f"model: the network cannot be loaded in another process: {last_words(error)}. Its module must be "
            f"importable on every node."
        ) from None
    return model


def last_words(error: BaseException) -> str:
    """Return the last line of a traceback."""
    return traceback.format_exception_only(error)[-1].strip()
