"""dppo: distributed PPO on Ray. The number of actors changes the time, never the result.

import dppo

result = dppo.train(dppo.Config.preset("CartPole-v1", num_actors=8))
print(dppo.evaluate(result, episodes=20))
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dppo.config import Config as Config
    from dppo.numerics.portable import portable_numerics as portable_numerics
    from dppo.policies.evaluation import evaluate as evaluate
    from dppo.policies.loading import load_policy as load_policy
    from dppo.policies.policy import Policy as Policy
    from dppo.ppo.kernels.recurrence import over_time as over_time
    from dppo.records.observer import Evaluation as Evaluation
    from dppo.records.observer import Observer as Observer
    from dppo.records.observer import Result as Result
    from dppo.records.observer import RunInfo as RunInfo
    from dppo.run.runner import train as train
    from dppo.spaces.spaces import Spaces as Spaces
    from dppo.tools.export.policies import export_onnx as export_onnx

_HOMES = {
    "Config": "config",
    "Evaluation": "records.observer",
    "Observer": "records.observer",
    "Policy": "policies.policy",
    "Result": "records.observer",
    "RunInfo": "records.observer",
    "Spaces": "spaces.spaces",
    "evaluate": "policies.evaluation",
    "export_onnx": "tools.export.policies",
    "load_policy": "policies.loading",
    "over_time": "ppo.kernels.recurrence",
    "portable_numerics": "numerics.portable",
    "train": "run.runner",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: an actor imports this package, and needs none of them."""
    from importlib import import_module

    if name not in _HOMES:
        other_names = import_module("dppo.config.aliases")
        if name in other_names.ABSENT_NAMES:
            return other_names.AbsentName(name)
        raise AttributeError(f"module 'dppo' has no attribute {name!r}")
    import_module("dppo.numerics.portable").portable_numerics()  # the others load NumPy
    return getattr(import_module(f"dppo.{_HOMES[name]}"), name)
