"""Values of settings as users and other libraries write them: `PPO`, `nn.ReLU`, a class of torch, none, False."""

from typing import Any, Literal, get_args, get_origin

from dppo.config.field import FlatSettings
from dppo.config.parts import may_be_none, types_by_name


def with_our_spelling(settings: FlatSettings) -> dict[str, Any]:
    """Return flat settings in which each value that stands for exactly one of the choices of its setting is replaced.

    Other values stay as they are, also those that are not valid.
    """
    return {name: _our_spelling(name, value) for name, value in settings.items()}


def _our_spelling(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "none" and may_be_none(name):
        return None  # as in flags
    hint = types_by_name().get(name)
    if get_origin(hint) is not Literal:
        return value
    choices = get_args(hint)
    if value is False:  # also YAML's own word off
        return next((choice for choice in ("off", "none") if choice in choices), value)
    # a class or function has a name; dtypes and devices of torch have a text
    text = getattr(value, "__name__", None) or str(value)
    choice = str(text).removesuffix("()").rpartition(".")[2].lower()
    return choice if choice in choices else value
