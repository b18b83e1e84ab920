"""Forward passes without the overhead of torch's calls."""

from typing import Any

from torch import jit, nn

from dppo.ppo.kernels.linear_layers import forwards_of, has_hooks


def without_call_overhead(module: nn.Module) -> nn.Module:
    """Modify `module` so that its forward pass takes half the time for few rows, and return it.

    Submodules also become plain attributes, so that `self.layer` skips torch's `__getattr__`. Layers of torch that have
    no hooks call `forward` directly. The tensors stay the same objects. The structure of the module must not change
    afterwards.
    """
    for part, forward in forwards_of(module):
        if isinstance(part, jit.ScriptModule):
            continue
        # not parameters: torch.func.functional_call replaces them for a call
        part.__dict__.update(part._modules)
        kind = type(part)
        is_plain_layer = (
            kind.__module__.startswith("torch.nn.modules.") and kind.__call__ is nn.Module.__call__
        )
        if is_plain_layer and "forward" not in part.__dict__ and not has_hooks(part):
            call = kind.forward if forward is None else _call_forward
            part.__class__ = type(
                kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
            )
        # of this module alone: a slice or a copy of it has the class, and another `forward`
        if forward is not None:
            part.__dict__["forward"] = forward
    return module


def _call_forward(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """Call the `forward` that this module has been given, without torch's `__call__`."""
    return module.forward(*inputs, **keywords)
