"""The user's modules in other processes: import paths, and the class of a network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dppo.cluster import wire
from dppo.errors import ConfigError
from dppo.user_code import in_a_line

Model = str | Callable[..., Any] | None


def import_paths() -> tuple[str, ...]:
    """Return the folders from which this process imports."""
    return tuple(path for path in sys.path if path)


def import_also_from(paths: tuple[str, ...]) -> None:
    """Append these folders to the import path of this process."""
    sys.path += [path for path in paths if path not in sys.path]


def packed_model(model: Model) -> bytes:
    """Return a user's network ready to send; `ConfigError` if its class cannot be pickled."""
    try:
        return wire.pack_code(model)
    except Exception as error:  # pickling a user's class may raise anything
        raise ConfigError(
            f"model={model!r}: cannot be sent to other processes: {error}. Move it to a module, and pass it as "
            f"module:Class."
        ) from None


def unpacked_model(packed: bytes | None) -> Model:
    """Reverse `packed_model`, after `import_also_from`; `ConfigError` if its module cannot be imported here."""
    try:
        model: Model = wire.unpack(packed)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"model: the network cannot be loaded in another process: {in_a_line(error)}. Its module must be "
            f"importable on every node."
        ) from None
    return model
