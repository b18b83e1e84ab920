"""The user's network in other processes, with the folders from which it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dppo.cluster import wire
from dppo.errors import ConfigError
from dppo.user_code import in_a_line

Model = str | Callable[..., Any] | None
PackedModel = tuple[tuple[str, ...], bytes | None]
"""The folders from which the sending process imports, and the pickled network."""


def packed_model(model: Model) -> PackedModel:
    """Return a user's network ready to send; `ConfigError` if its class cannot be pickled."""
    try:
        return tuple(path for path in sys.path if path), wire.pack_code(model)
    except Exception as error:  # pickling a user's class may raise anything
        raise ConfigError(
            f"model={model!r}: cannot be sent to other processes: {error}. Move it to a module, and pass it as "
            f"module:Class."
        ) from None


def unpacked_model(packed: PackedModel) -> Model:
    """Import from the folders of the sender, too, and reverse `packed_model`.

    Raises:
        ConfigError: the module of the network cannot be imported here.
    """
    paths, pickled = packed
    sys.path += [path for path in paths if path not in sys.path]
    try:
        model: Model = wire.unpack(pickled)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"model: the network cannot be loaded in another process: {in_a_line(error)}. Its module must be "
            f"importable on every node."
        ) from None
    return model
