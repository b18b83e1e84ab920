"""A module that computes the same with less of Python around it: for few rows, that is half the time."""

from __future__ import annotations

from torch import jit, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def quick(module: nn.Module) -> nn.Module:
    """Return `module`, changed: its parts are found, and called, without the detours that torch makes.

    Parameters and submodules become plain attributes, beside what torch knows of them, so that `self.layer` need not
    search; torch's own layers, if they have no hooks, call `forward` at once. The tensors stay the same objects; the
    structure must not change afterwards.
    """
    for part in module.modules():
        if isinstance(part, jit.ScriptModule):
            continue
        for name, value in (*part._parameters.items(), *part._modules.items()):
            part.__dict__[name] = value
        if _is_plain_layer(part):
            part.__class__ = _calling_forward(type(part))
    return module


def _is_plain_layer(part: nn.Module) -> bool:
    kind = type(part)
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and kind.__call__ is nn.Module.__call__
        and "forward" not in part.__dict__
        and not any(getattr(part, hooks) for hooks in HOOKS)
    )


def _calling_forward(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__call__": kind.forward, "__module__": kind.__module__})
