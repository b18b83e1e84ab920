"""The class of a user's network, by its import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dppo.errors import ConfigError
from dppo.user_code import import_path, imported

if TYPE_CHECKING:
    from torch import nn

ModelClass = str | Callable[..., Any]


def model_class(model: ModelClass) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself; raise ConfigError if it is no `nn.Module`."""
    from torch import nn

    try:
        found: Any = imported(model, "Class") if isinstance(model, str) else model
    except ImportError as error:
        raise ConfigError(f"model={import_path(model)}: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"model={import_path(model)}: {found!r} is not a subclass of torch.nn.Module. Pass one.")
    return found
